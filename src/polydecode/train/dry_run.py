"""What a run would be, without weights: `polydecode train --dry-run` builds everything on the meta device and writes nothing.

The settings, the method's constraints and the data are checked as the run would check them. Data sets on a hub are only
checked by form, since nothing is read from the network here.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from polydecode.auto import load_tokenizer, read_config, resolve_source
from polydecode.auto.loading import has_tokenizer
from polydecode.auto.meta import meta_decoder
from polydecode.config import TrainConfig
from polydecode.data import load_examples, split_held_out
from polydecode.data.files import kind_of
from polydecode.data.hub import hub_name
from polydecode.errors import UserError
from polydecode.methods import get_method
from polydecode.methods.base import ParallelDecoder, ParallelDecoderConfig
from polydecode.train.arguments import reporter
from polydecode.train.distributed import split_batch
from polydecode.train.folder import check_out, out_folder
from polydecode.train.memory import MemoryEstimate, estimate_memory, gigabytes, lengths_of
from polydecode.train.parameters import prepare_parameters
from polydecode.train.resume import last_checkpoint


@dataclass
class Planned:
    """What a recipe says of a checkpoint that is not there yet. `base_config`: the file of the model's config, or None: the
    source's own."""

    source: str
    method: str
    settings: dict[str, Any]
    base_config: Path | None = None


@dataclass
class DryRun:
    """What a run would be. `steps`, `tokens` and `hours` are None where nothing tells them; `memory` is for one process, with
    nothing sharded."""

    method: str
    settings: dict[str, Any]
    parameters: int
    trained: int
    memory: MemoryEstimate
    world_size: int
    examples: int | None
    steps: int | None
    tokens: int | None
    hours: float | None
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items() if value is not None)
        told = [
            f"method {self.method}" + (f" ({settings})" if settings else ""),
            f"training {self.trained:,} of {self.parameters:,} parameters ({self.trained / self.parameters:.1%})",
            self.memory.line(),
        ]
        if self.world_size > 1:
            ddp, fsdp = (gigabytes(self.memory.per_process(self.world_size, sharded)) for sharded in (False, True))
            told.append(f"{self.world_size} processes, each: {ddp} replicated (DDP), {fsdp} sharded (FSDP2)")
        told += [f"examples: {self.examples:,}"] if self.examples is not None else []
        told.append(f"steps: {'by the clock' if self.steps is None else f'{self.steps:,}'}")
        told += [f"tokens: {self.tokens:,}"] if self.tokens is not None else []
        told += [f"hours: {self.hours:.1f}"] if self.hours is not None else []
        return [*told, *self.notes, "dry run: nothing was read from a network, nothing was written"]

    def as_json(self) -> dict[str, Any]:
        """The same as data, bytes for memory."""
        memory = {name: round(value) for name, value in vars(self.memory).items()} | {"total": round(self.memory.total)}
        sharding = {
            name: round(self.memory.per_process(self.world_size, sharded))
            for name, sharded in (("replicated", False), ("sharded", True))
        }
        return {**vars(self), "memory": memory | {"per_process": sharding}}


def dry_run(
    config: TrainConfig, planned: Planned | None = None, world_size: int = 1, tokens_per_s: float = 0.0
) -> DryRun:
    """Check everything that can be checked without weights, and predict the run on `world_size` processes.

    `planned` stands for the checkpoint where it does not exist. `tokens_per_s`: of all processes together, for the hours; 0
    when unknown. Raises `UserError` as the run would.
    """
    config.check()
    if world_size < 1:
        raise UserError(f"world_size is {world_size}; it must be 1 or more")
    check_out(config)
    if config.resume:
        last_checkpoint(out_folder(config))
    reporter(config.report_to)
    split_batch(config.batch_size, config.micro_batch_size, world_size)
    if not 0 <= tokens_per_s < math.inf:
        raise UserError(f"tokens_per_s is {tokens_per_s}; it must be 0 or more")
    tokenizer, notes = _tokenizer(config, planned)
    model = planned_model(config.checkpoint, planned, tokenizer)
    prepare_parameters(model, config)
    lengths, told = _lengths(config, tokenizer)
    parameters = {id(p): p for p in model.parameters()}.values()
    steps, tokens = planned_budget(config, lengths)
    return DryRun(
        method=model.config.method,
        settings=model.config.settings(),
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        memory=estimate_memory(
            model, config, [(0, _row(config, model))] if config.packing else lengths or [(0, _row(config, model))]
        ),
        world_size=world_size,
        examples=len(lengths) if lengths else None,
        steps=steps,
        tokens=tokens,
        hours=tokens / tokens_per_s / 3600 if tokens_per_s and tokens is not None else None,
        notes=notes + told,
    )


def planned_model(checkpoint: str, planned: Planned | None, tokenizer: Any = None) -> ParallelDecoder:
    """The model of `checkpoint` on the meta device or, where it is not there, the one that `planned` would make."""
    if planned is None or Path(checkpoint).is_dir():
        config: Any = read_config(resolve_source(checkpoint))
        if isinstance(config, ParallelDecoderConfig):
            assert isinstance(config.base_config, PreTrainedConfig)
            return meta_decoder(config.base_config, config.method, config.settings(), tokenizer)
        return meta_decoder(config, "autoregressive", {}, tokenizer)
    get_method(planned.method)[0].check_names(planned.settings)
    return meta_decoder(_base_config(planned), planned.method, planned.settings, tokenizer)


def _base_config(planned: Planned) -> PreTrainedConfig:
    if planned.base_config is None:
        config: Any = read_config(resolve_source(planned.source))
        own: Any = config.base_config if isinstance(config, ParallelDecoderConfig) else config
        return own
    try:
        content = json.loads(planned.base_config.read_text())
        return AutoConfig.for_model(**content)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"base_config {str(planned.base_config)!r} is no model's config: {error}") from None


def _tokenizer(config: TrainConfig, planned: Planned | None) -> tuple[Any, list[str]]:
    """The tokenizer of the checkpoint or the planned source, as far as it is on this machine."""
    name = config.checkpoint if planned is None or Path(config.checkpoint).is_dir() else planned.source
    source = resolve_source(name)
    if source.kind == "hub" and planned is not None:
        return None, [f"note: the tokenizer of {name!r} is on a hub, so the data are not read"]
    if source.kind == "folder" and not has_tokenizer(Path(source.location)):
        return None, [f"note: {name!r} has no tokenizer, so the data are not read"]
    return load_tokenizer(name), []


def _lengths(config: TrainConfig, tokenizer: Any) -> tuple[list[tuple[int, int]], list[str]]:
    """(prompt, answer) tokens of the training examples, none where data are on a hub or cannot be tokenised here."""
    on_hub = [name for name in config.data if is_hub_name(name)]
    for name in (*config.data, *config.eval_data):
        if not is_hub_name(name) and not any(c in name for c in "*?[") and not Path(name).expanduser().exists():
            raise UserError(f"no data file {name!r}")
    if on_hub:
        return [], [f"note: not read: {', '.join(on_hub)} (on a hub); every example counts as max_length tokens"]
    if tokenizer is None:
        return [], []
    config = replace(config, no_cache=True)
    examples = load_examples(config.data, tokenizer, config)
    return lengths_of(examples if config.eval_data else split_held_out(examples, config)[0]), []


def is_hub_name(name: str) -> bool:
    """Whether `name` can only mean a data set on a hub: owner/name, with :config or @split behind."""
    return hub_name(name) is not None and not Path(name).exists() and kind_of(name) is None


def _row(config: TrainConfig, model: ParallelDecoder) -> int:
    return min(config.max_length, model.config.max_position_embeddings)


def planned_budget(config: TrainConfig, lengths: Sequence[tuple[int, int]]) -> tuple[int | None, int | None]:
    """(optimiser steps, tokens of the data) of the whole run, whichever limit comes first; None where nothing tells."""
    rows = config.batch_size
    per_row = mean(sum(length) for length in lengths) if lengths and not config.packing else config.max_length
    per_step = rows * per_row
    limits = [config.max_steps] if config.max_steps else []
    if config.max_tokens:
        limits.append(math.ceil(config.max_tokens / per_step))
    if not config.max_steps and config.epochs and lengths:
        limits.append(math.ceil(config.epochs * math.ceil(sum(map(sum, lengths)) / per_row / rows)))
    if not limits:
        return None, None
    steps = min(limits)
    return steps, min(round(steps * per_step), config.max_tokens or round(steps * per_step))
