"""What the demo's table holds: exact-match accuracy per task and tokens per second, for one way of decoding.

Legend: B rows, P prompt tokens, N new tokens.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from polydecode.data import pad_token_id, prompt_ids
from polydecode.demo.tasks import Item
from polydecode.generate import generate
from polydecode.methods.base import ParallelDecoder

ROWS_AT_ONCE = 30
ANSWER_TOKENS = 32


@dataclass
class Row:
    """One line of the table.

    `accuracy`: share of exact answers, per task and over all. `kept`, `speedup`: accuracy and tokens/s relative to the AR
    control. `is_converted`: decoded by the converted model, not by an AR model.
    """

    name: str
    accuracy: dict[str, float]
    tokens_per_s: float
    tokens_per_forward: float
    kept: float | None = None
    speedup: float | None = None
    is_converted: bool = False
    answers: list[str] = field(default_factory=list, repr=False)

    def as_json(self) -> dict[str, Any]:
        """The numbers, without the answers."""
        return {k: v for k, v in asdict(self).items() if k != "answers"}


def answer_all(
    model: ParallelDecoder, tokenizer: PreTrainedTokenizerBase, items: Sequence[Item], **options: Any
) -> list[str]:
    """Greedy answers, decoded in padded batches."""
    answers: list[str] = []
    for start in range(0, len(items), ROWS_AT_ONCE):
        rows = [prompt_ids(i.prompt, tokenizer) for i in items[start : start + ROWS_AT_ONCE]]
        width = max(map(len, rows))
        pad = pad_token_id(tokenizer)
        input_ids = torch.tensor([[pad] * (width - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
        out = generate(
            model, input_ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False,
            eos_token_id=tokenizer.eos_token_id, **options,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        answers += tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    return answers


def accuracy(items: Sequence[Item], answers: Sequence[str]) -> dict[str, float]:
    """Share of exact answers per task, and "all"."""
    right = [a.strip() == i.answer.strip() for i, a in zip(items, answers, strict=True)]
    shares = {
        task: statistics.mean(r for i, r in zip(items, right, strict=True) if i.task == task)
        for task in dict.fromkeys(i.task for i in items)
    }
    return {**{k: round(v, 4) for k, v in shares.items()}, "all": round(statistics.mean(right), 4)}


def speeds(
    ways: dict[str, tuple[ParallelDecoder, dict[str, Any]]], prompt: torch.Tensor, new_tokens: int, repeats: int
) -> dict[str, tuple[float, float]]:
    """(median tokens/s, tokens per forward) of each way, batch 1, end tokens ignored, the ways in turn after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    per_forward: dict[str, float] = {}
    for turn in range(repeats + 1):
        for name, (model, options) in ways.items():
            out = generate(
                model, prompt, max_new_tokens=new_tokens if turn else 8, do_sample=False, eos_token_id=None,
                return_dict_in_generate=True, **options,
            )  # fmt: skip
            assert not isinstance(out, torch.Tensor)
            if turn:
                seconds[name].append(out.elapsed_s)
                per_forward[name] = out.tokens_per_forward
    return {name: (new_tokens / statistics.median(s), per_forward[name]) for name, s in seconds.items()}
