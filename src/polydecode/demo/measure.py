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

    `method`: of the model. `accuracy`: share of exact answers, per task and over all. `kept`, `speedup`: accuracy and
    tokens/s relative to the AR control. `is_converted`: decoded by a converted model, not by an AR model.
    """

    name: str
    method: str
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
    ways: dict[str, tuple[ParallelDecoder, dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    repeats: int,
) -> dict[str, tuple[float, float]]:
    """(tokens/s, tokens per forward) of each way at answering `items` one by one up to their end token, prompts included.

    The ways take turns item by item, in `repeats` rounds after a warm-up; the median round counts. How many tokens a forward
    commits depends on the text for some methods, so it is the task itself that is timed.
    """
    prompts = [torch.tensor([prompt_ids(item.prompt, tokenizer)]) for item in items]
    rounds: dict[str, list[tuple[int, float, float]]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        totals = dict.fromkeys(ways, (0, 0.0, 0.0))
        for prompt in prompts if turn else prompts[:1]:
            for name, (model, options) in ways.items():
                out = generate(
                    model, prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False,
                    eos_token_id=tokenizer.eos_token_id, return_dict_in_generate=True, **options,
                )  # fmt: skip
                assert not isinstance(out, torch.Tensor)
                tokens, forwards, seconds = totals[name]
                totals[name] = (tokens + out.num_new_tokens[0], forwards + out.forwards, seconds + out.elapsed_s)
        if turn:
            for name, total in totals.items():
                rounds[name].append(total)
    return {
        name: (statistics.median(t / s for t, _, s in done), statistics.median(t / f for t, f, _ in done))
        for name, done in rounds.items()
    }
