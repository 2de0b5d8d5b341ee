"""Decoding speed of a model against the same weights decoded one token per forward, in one process.

The ways to decode take turns (A B C A B C ...) after a warm-up each, so that a machine that slows down slows all of them.
Every run makes exactly the same number of new tokens (EOS is off), and only new tokens are counted. `forwards` are in
forwards of the whole model, the prefill counted as one.

Legend: B rows, P prompt tokens, N new tokens.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from polydecode.errors import UserError
from polydecode.generate import GenerateOutput, generate
from polydecode.methods import get_method
from polydecode.methods.base import ParallelDecoder

BASELINE = "autoregressive"
SANITY = "transformers generate"
WARM_UP_TOKENS = 16


@dataclass
class Run:
    """One call: new tokens over all rows, seconds in all and to the first token, and its cost."""

    num_new_tokens: int
    elapsed_s: float
    ttft_s: float
    forwards: float

    @property
    def decode_s(self) -> float:
        """Seconds after the first token; NaN when its time is unknown."""
        return self.elapsed_s - self.ttft_s


@dataclass
class Summary:
    """One way to decode, over its runs of `new_tokens` tokens per row; speeds count all rows and the prefill.

    `ms_per_token` is per row and after the first token. `ratio`: tokens per second over the baseline's, the median of the
    rounds; `decode_ratio`: the same after the first token, which is what `predicted_ratio` (from `forwards_per_token`, plain
    and with the head counted) predicts. None where it does not apply.
    """

    name: str
    options: dict[str, Any]
    new_tokens: int
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    ms_per_token: float
    tokens_per_forward: float
    ttft_s: float
    ratio: float
    ratio_min: float
    ratio_max: float
    decode_ratio: float | None = None
    predicted_ratio: float | None = None
    predicted_ratio_with_head: float | None = None
    runs: list[Run] = field(default_factory=list)


@dataclass
class _Way:
    """One way to decode: `run(N)` makes N new tokens per row."""

    name: str
    options: dict[str, Any]
    run: Callable[[int], Run]
    predicted: tuple[float, float] | None = None


def measure(
    model: ParallelDecoder,
    input_ids: Tensor,
    new_tokens: Sequence[int],
    repeats: int,
    options: Sequence[dict[str, Any]] = ({},),
    progress: Callable[[str], None] = lambda message: None,
) -> list[Summary]:
    """Summaries per output length: transformers' `generate`, the autoregressive baseline, the model with each of `options`.

    `input_ids` (B, P) without padding. Raises `UserError` for options the model lacks and for what does not fit the context.
    """
    ways = _ways(model, input_ids, options)
    summaries: list[Summary] = []
    for length in new_tokens:
        for way in ways:
            way.run(min(WARM_UP_TOKENS, length))
        rounds: list[list[Run]] = []
        for number in range(repeats):
            rounds.append([way.run(length) for way in ways])
            progress(f"{length} new tokens: round {number + 1} of {repeats}")
        summaries += [_summary(ways, rounds, i, length) for i in range(len(ways))]
    return summaries


def autoregressive_of(model: ParallelDecoder) -> ParallelDecoder:
    """The same weights behind the contract, one token per forward; the model itself if that is what it is."""
    if model.config.method == BASELINE:
        return model
    return get_method(BASELINE)[1].from_base(model.base).eval()


def combinations(values: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of option values, e.g. {"a": [1, 2]} -> [{"a": 1}, {"a": 2}]; [{}] for none."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def random_prompt(model: ParallelDecoder, rows: int, tokens: int, seed: int = 0) -> Tensor:
    """Random token ids (rows, tokens)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (rows, tokens), generator=generator)


def _ways(model: ParallelDecoder, input_ids: Tensor, options: Sequence[dict[str, Any]]) -> list[_Way]:
    baseline = autoregressive_of(model)
    ways = [
        _Way(SANITY, {}, partial(_run_transformers, model.base, input_ids)),
        _Way(BASELINE, {}, partial(_run, baseline, input_ids, options={})),
    ]
    for chosen in options:
        model.check_options(chosen)
        if model.config.method == BASELINE:
            continue
        plain, with_head = model.forwards_per_token(**chosen), model.forwards_per_token(count_head=True, **chosen)
        predicted = (plain, with_head) if plain and with_head else None
        ways.append(_Way(model.config.method, chosen, partial(_run, model, input_ids, options=chosen), predicted))
    return ways


def _run(model: ParallelDecoder, input_ids: Tensor, new_tokens: int, options: dict[str, Any]) -> Run:
    _synchronise(model)
    output = generate(
        model,
        input_ids,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        **options,
    )
    _synchronise(model)
    assert isinstance(output, GenerateOutput)
    made = sum(output.num_new_tokens)
    assert made == new_tokens * len(input_ids), f"{made} tokens made, {new_tokens} x {len(input_ids)} asked for"
    return Run(made, output.elapsed_s, output.ttft_s, output.forwards)


class _FirstToken(BaseStreamer):
    """Notes when the first new token comes; transformers puts the prompt first."""

    def __init__(self) -> None:
        self.puts, self.at = 0, 0.0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def _run_transformers(base: Any, input_ids: Tensor, new_tokens: int) -> Run:
    """The same job by transformers' own generate; its streamer takes one row, so more rows have no time to first token."""
    ids = input_ids.to(base.device)
    first = _FirstToken() if len(ids) == 1 else None
    with _without_eos(base), torch.inference_mode():
        _synchronise(base)
        started = time.perf_counter()
        output = base.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, streamer=first
        )
        _synchronise(base)
        elapsed_s = time.perf_counter() - started
    made = output.numel() - ids.numel()
    assert made == new_tokens * len(ids)
    return Run(made, elapsed_s, first.at - started if first else float("nan"), float(new_tokens))


@contextmanager
def _without_eos(base: Any) -> Iterator[None]:
    """Leave `base` without an end token and sampling defaults inside the block, so that every run has full length."""
    kept = base.generation_config
    base.generation_config = GenerationConfig(pad_token_id=0)
    try:
        yield
    finally:
        base.generation_config = kept


def _summary(ways: list[_Way], rounds: list[list[Run]], index: int, length: int) -> Summary:
    way, runs = ways[index], [r[index] for r in rounds]
    baselines = [r[[w.name for w in ways].index(BASELINE)] for r in rounds]
    rows = runs[0].num_new_tokens // length
    speeds = [r.num_new_tokens / r.elapsed_s for r in runs]
    ratios = [b.elapsed_s / r.elapsed_s for b, r in zip(baselines, runs, strict=True)]
    has_decode = length > 1 and not any(math.isnan(r.ttft_s) for r in runs)
    seconds = [r.decode_s / (length - 1) if has_decode else r.elapsed_s / length for r in runs]
    decode_ratios = [b.decode_s / r.decode_s for b, r in zip(baselines, runs, strict=True)] if has_decode else None
    return Summary(
        name=way.name,
        options=way.options,
        new_tokens=length,
        tokens_per_s=median(speeds),
        tokens_per_s_min=min(speeds),
        tokens_per_s_max=max(speeds),
        ms_per_token=1000 * median(seconds),
        tokens_per_forward=median(r.num_new_tokens / rows / r.forwards for r in runs),
        ttft_s=median(r.ttft_s for r in runs),
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        decode_ratio=median(decode_ratios) if decode_ratios else None,
        predicted_ratio=1 / way.predicted[0] if way.predicted else None,
        predicted_ratio_with_head=1 / way.predicted[1] if way.predicted else None,
        runs=runs,
    )


def _synchronise(model: torch.nn.Module) -> None:
    """Wait for the GPU, so that a clock read counts its work."""
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()


def check_measure(prompt_tokens: int, new_tokens: Sequence[int], rows: int, repeats: int) -> None:
    """Refuse counts below 1."""
    for name, value in (("prompt_tokens", prompt_tokens), ("batch_size", rows), ("repeats", repeats)):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be 1 or more")
    for value in new_tokens:
        if value < 1:
            raise UserError(f"{value} new tokens asked for; it must be 1 or more")
