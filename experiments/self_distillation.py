"""Held-out measures of adapters trained on raw text, on the source's own answers, and with the divergence beside it.

    python experiments/self_distillation.py HELD_SELF.jsonl HELD_RAW.jsonl ADAPTER [ADAPTER ...]

Per adapter and data file: cross-entropy and next-token accuracy at cycle length 3, by phase (EXPERIMENTS.md, section on
self-distillation); on the source's answers accuracy is agreement with the source's greedy choice given the same prefix.
Then greedy decoding at cycle length 3: the share of the source's answer tokens reproduced before the first difference.
"""

import json
import sys

import torch

from polydecode.auto import load, load_tokenizer
from polydecode.config import DataConfig
from polydecode.data import Collator, load_examples, pad_token_id
from polydecode.methods.batch import Batch
from polydecode.ops.sampling import RowGenerators

EXAMPLES = 32
DECODED = 32
BATCH = 8


@torch.no_grad()
def teacher_forced(model, examples, pad: int) -> dict[str, float]:
    """Means of the loss's sums over all targets."""
    sums: dict[str, float] = {}
    loss, targets = 0.0, 0
    for start in range(0, len(examples), BATCH):
        inputs = Collator(pad)(examples[start : start + BATCH])
        output = model.loss(Batch(**inputs), RowGenerators([int(i) for i in inputs["example_ids"]]))
        loss, targets = loss + float(output.loss) * output.num_targets, targets + output.num_targets
        for name, value in output.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    means = {n: round(v / sums[f"{n}_count"], 3) for n, v in sums.items() if sums.get(f"{n}_count")}
    return {"loss": round(loss / targets, 3), **{n: v for n, v in means.items() if n.startswith("accuracy")}}


def decoded(model, examples) -> dict[str, float]:
    """Share of the reference's tokens before the first difference, and of answers that are the same throughout."""
    same, total, exact = 0, 0, 0
    for example in examples[:DECODED]:
        prompt = [i for i, p in zip(example.input_ids, example.is_prompt, strict=True) if p]
        answer = example.input_ids[len(prompt) :]
        new = model.generate(torch.tensor([prompt]), max_new_tokens=len(answer), do_sample=False)[
            0, len(prompt) :
        ].tolist()
        first = next((i for i, (a, b) in enumerate(zip(new, answer, strict=False)) if a != b), len(answer))
        same, total, exact = same + first, total + len(answer), exact + (new == answer)
    return {"prefix": round(same / total, 3), "exact": round(exact / len(examples[:DECODED]), 3)}


def main(held_self: str, held_raw: str, *adapters: str) -> None:
    for name in adapters:
        model, tokenizer = load(name, dtype="float32"), load_tokenizer(name)
        model.config.training_cycle_lengths = None
        files = {
            k: load_examples([f], tokenizer, DataConfig(chat=True)) for k, f in (("self", held_self), ("raw", held_raw))
        }
        result = {
            k: teacher_forced(model, examples[:EXAMPLES], pad_token_id(tokenizer)) for k, examples in files.items()
        }
        print(json.dumps({"adapter": name, **result, "decoded": decoded(model, files["self"])}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
