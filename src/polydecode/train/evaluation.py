"""What a run shows of itself: the loss before it starts, answers to held-out prompts, and the best weights so far.

None of it touches the run's random numbers: losses are the same with and without.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from polydecode.data import Example, Examples
from polydecode.generate import generate
from polydecode.methods.base import ParallelDecoder

SAMPLES_FILE = "samples.jsonl"
FIRST_EXAMPLES = 16


def first_line(metrics: dict[str, float], vocab_size: int) -> str:
    """One line on the loss before training, next to what is normal: the unweighted cross-entropy and ln V of a model that
    knows nothing."""
    cross_entropy = metrics.get("eval_cross_entropy", metrics["eval_loss"])
    return (
        f"before training: loss {metrics['eval_loss']:.4f}  cross-entropy per token {cross_entropy:.4f}  "
        f"(a model that knows nothing: ln V = {math.log(vocab_size):.2f})"
    )


def answer(model: ParallelDecoder, tokenizer: Any, example: Example) -> dict[str, Any]:
    """A held-out prompt answered greedily with the method's defaults: prompt, expected, answer, exact, tokens per forward.

    Text without a prompt is continued from its first half. The answer may be as long as the expected one and a quarter more.
    """
    start = next((i for i, given in enumerate(example.is_prompt) if not given), len(example.input_ids))
    if start == 0:
        start = max(len(example.input_ids) // 2, 1)
    expected = example.input_ids[start:]
    if True in example.is_prompt[start:]:  # later turns of a conversation
        expected = expected[: example.is_prompt[start:].index(True)]
    was_training = model.training
    model.eval()
    ids = torch.tensor([example.input_ids[:start]], device=model.device)
    room = model.config.max_position_embeddings - start
    out: Any = generate(
        model, ids, max_new_tokens=min(len(expected) + len(expected) // 4 + 1, max(room, 1)), do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    model.train(was_training)
    produced = out.sequences[0, start:].tolist()[: out.num_new_tokens[0]]
    return {
        "prompt": tokenizer.decode(example.input_ids[:start]),
        "expected": tokenizer.decode(expected, skip_special_tokens=True),
        "answer": tokenizer.decode(produced, skip_special_tokens=True),
        "exact": produced == expected,
        "tokens_per_forward": round(out.num_new_tokens[0] / max(out.forwards, 1e-9), 3),
    }


def show_samples(
    model: ParallelDecoder, tokenizer: Any, held_out: Examples, count: int, step: int, out: Path | None
) -> dict[str, float]:
    """Answer `count` held-out prompts, and return averages; with `out`, show three and append all to its `samples.jsonl`."""
    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    records = [answer(model, tokenizer, held_out[i]) for i in range(min(count, len(held_out)))]
    torch.set_rng_state(cpu)
    if gpu:
        torch.cuda.set_rng_state_all(gpu)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with (out / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, **record}, ensure_ascii=False) + "\n" for record in records)
        for record in records[:3]:
            mark = "=" if record["exact"] else "x"
            print(f"  {mark} {_short(record['prompt'])} -> {_short(record['answer'])}", file=sys.stderr)
    return {
        "samples_exact": sum(r["exact"] for r in records) / len(records),
        "samples_tokens_per_forward": sum(r["tokens_per_forward"] for r in records) / len(records),
    }


def _short(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"...{line[3 - width :]}"


class Best:
    """The trained weights with the lowest held-out loss, in a file that says of which step they are.

    The best as of the last checkpoint stays until the next one, so that a run that goes on from there has it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.record: dict[str, float] | None = None
        self._held: dict[str, float] | None = None

    def resume(self, step: int) -> None:
        """Take up the best of the files of `step` or before."""
        records = []
        for file in self.folder.glob("step-*.safetensors"):
            with safe_open(file, "pt") as saved:
                records.append(json.loads(saved.metadata()["record"]))
        self.record = min((r for r in records if r["step"] <= step), key=lambda r: r["loss"], default=None)
        self._held = self.record

    def checkpointed(self, write: bool) -> None:
        """A checkpoint is whole: a run that goes on from it needs the best there is now, and none before."""
        self._held = self.record
        if write:
            self._tidy()

    def offer(self, model: ParallelDecoder, step: int, loss: float, write: bool) -> None:
        """Keep these weights if `loss` is the lowest so far; one process of a run writes them."""
        if self.record is not None and loss >= self.record["loss"]:
            return
        self.record = {"step": step, "loss": loss}
        if not write:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self._file(self.record)
        aside = file.with_suffix(".part")
        weights = {n: p.detach().cpu().contiguous() for n, p in model.named_parameters() if p.requires_grad}
        save_file(weights, aside, metadata={"record": json.dumps(self.record)})
        os.replace(aside, file)
        self._tidy()

    def restore(self, model: ParallelDecoder) -> None:
        """Put the best weights into the model; without one yet, nothing."""
        if self.record is None:
            return
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in load_file(self._file(self.record)).items():
                parameters[name].copy_(value)

    def _file(self, record: dict[str, float]) -> Path:
        return self.folder / f"step-{int(record['step'])}.safetensors"

    def _tidy(self) -> None:
        kept = {self._file(r) for r in (self.record, self._held) if r is not None}
        for file in set(self.folder.glob("step-*")) - kept:
            file.unlink()
