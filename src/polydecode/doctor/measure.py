"""What only running tells: the first loss, and the time a step takes on this machine."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from polydecode.config import TrainConfig
from polydecode.data import Collator, Example
from polydecode.methods import get_method
from polydecode.methods.base import ParallelDecoder
from polydecode.methods.batch import Batch, Finding, LossOutput
from polydecode.ops.sampling import RowGenerators, mix_seed
from polydecode.train import averages
from polydecode.train.dry_run import planned_budget
from polydecode.train.memory import lengths_of

SAMPLE = 4
"""Examples whose loss is measured."""
CLUELESS = 1.1
"""A source whose next-token loss is this many times ln V does not know the data's tokens; random weights are near 1."""


def measured_findings(
    model: ParallelDecoder, config: TrainConfig, examples: Sequence[Example]
) -> tuple[list[Finding], dict[str, Any]]:
    """First losses on a sample, and hours for the whole run by one forward and backward of a micro batch."""
    if torch.cuda.is_available():
        model.to("cuda")  # type: ignore[arg-type]
    loss_finding, numbers = _first_loss(model, config, examples)
    time_finding, times = _time(model, config, examples)
    return [loss_finding, time_finding], numbers | times


def _first_loss(
    model: ParallelDecoder, config: TrainConfig, examples: Sequence[Example]
) -> tuple[Finding, dict[str, Any]]:
    sample = examples[:: max(len(examples) // SAMPLE, 1)][:SAMPLE]
    plain = get_method("autoregressive")[1].from_base(model.base)
    model.eval()
    with torch.no_grad():
        source, own = (_loss(m, sample, config.seed) for m in (plain, model))
    uniform, expected, first = math.log(model.config.vocab_size), float(source.loss), float(own.loss)
    parts = {name: value for name, value in averages(own.sums).items() if "loss" in name and "place" not in name}
    told = "".join(f", {name} {value:.2f}" for name, value in parts.items())
    says = (
        f"{first:.2f} with {model.config.method}{told}; next-token loss of the source {expected:.2f}; "
        f"a model that knows nothing has ln V = {uniform:.2f}"
    )
    numbers = {"first_loss": first, "source_loss": expected, "uniform_loss": uniform, "first_loss_parts": parts}
    if expected > CLUELESS * uniform or not math.isfinite(first):
        mend = "the source knows less than nothing of these data: check that weights and tokenizer belong together"
        return Finding("first loss", "fail" if not math.isfinite(first) else "warn", says, mend), numbers
    return Finding("first loss", "ok", says), numbers


def _time(model: ParallelDecoder, config: TrainConfig, examples: Sequence[Example]) -> tuple[Finding, dict[str, Any]]:
    """Forward and backward of one micro batch of typical examples, and one more where the first was quick."""
    rows = min(config.micro_batch_size or config.batch_size, len(examples))
    typical = sorted(examples, key=lambda e: len(e.input_ids))
    start = max((len(typical) - rows) // 2, 0)
    chosen = typical[start : start + rows]
    model.train()
    seconds = _step_seconds(model, chosen, config.seed)
    if seconds < 5:  # the first one warms up
        seconds = _step_seconds(model, chosen, config.seed)
    model.eval()
    speed = sum(len(e.input_ids) for e in chosen) / seconds
    steps, tokens = planned_budget(config, lengths_of(examples))
    numbers: dict[str, Any] = {"tokens_per_s": round(speed, 1), "steps": steps, "tokens": tokens}
    says = f"{speed:,.0f} tokens/s here without the optimiser"
    if tokens is None:
        return Finding("time", "ok", f"{says}; the run ends by the clock"), numbers
    hours = tokens / speed / 3600
    if config.max_minutes:
        hours = min(hours, config.max_minutes / 60)
    numbers["hours"] = round(hours, 3)
    return Finding("time", "ok", f"{says}: {_duration(hours)} for {steps:,} steps, {tokens:,} tokens"), numbers


def _step_seconds(model: ParallelDecoder, examples: Sequence[Example], seed: int) -> float:
    started = time.perf_counter()
    _loss(model, examples, seed).loss.backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    model.zero_grad()
    return time.perf_counter() - started


def _loss(model: ParallelDecoder, examples: Sequence[Example], seed: int) -> LossOutput:
    tensors: dict[str, Any] = {name: value.to(model.device) for name, value in Collator(0)(examples).items()}
    generator = RowGenerators([mix_seed(seed, 0, e.example_id) for e in examples])
    return model.loss(Batch(**tensors), generator)


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes" if hours >= 1 / 60 else "under a minute"
