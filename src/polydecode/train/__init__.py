"""Training on `transformers.Trainer`: settings in, a checkpoint or adapter folder out.

The learning rate follows the share of the budget used (steps, tokens or minutes, whichever is furthest); Ctrl-C ends the run
early with a loadable checkpoint; a resumed run equals the uninterrupted one.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from polydecode.auto import load, load_tokenizer
from polydecode.auto.loading import cast_parameters
from polydecode.config import TrainConfig
from polydecode.convert import save_adapter, save_checkpoint
from polydecode.data import Examples, load_examples, pad_token_id, split_held_out
from polydecode.errors import UserError
from polydecode.methods.base import ParallelDecoder
from polydecode.train.budget import Budget
from polydecode.train.parameters import check_same_weights, prepare_parameters, report_parameters
from polydecode.train.trainer import DecoderTrainer, averages

__all__ = ["METRICS_FILE", "Budget", "DecoderTrainer", "averages", "prepare_parameters", "train"]

METRICS_FILE = "training_metrics.json"


def train(config: TrainConfig) -> dict[str, Any]:
    """Train and write the result to `config.out`; returns the final metrics.

    The folder holds the trained checkpoint (or adapter), `training_metrics.json` and, while `save_steps` says so,
    `checkpoints/`. Raises `UserError` for bad settings or data before anything is written.
    """
    config.check()
    out = Path(config.out)
    if out.exists() and any(out.iterdir()) and not config.resume:
        raise UserError(f"output folder {str(out)!r} is not empty; choose another or give --resume")
    last = _last_checkpoint(out) if config.resume else None
    tokenizer = load_tokenizer(config.checkpoint)
    training, held_out = _examples(config, tokenizer)
    set_seed(config.seed)
    model = load(config.checkpoint, dtype=torch.float32)
    if config.adapter_source:
        check_same_weights(model, config)
    adapter = prepare_parameters(model, config)
    trainer = DecoderTrainer(model, config, training, held_out, pad_token_id(tokenizer))
    report_parameters(model)
    started = time.monotonic()
    if last is not None:
        trainer.budget.restore(Path(last))
    with _finish_on_interrupt(trainer):
        trainer.train(resume_from_checkpoint=last)
    metrics = (
        {
            "steps": trainer.state.global_step,
            "tokens": trainer.budget.tokens,
            "minutes": round((time.monotonic() - started) / 60, 2),
            **{k: v for k, v in trainer.evaluate().items() if k.startswith("eval_")},
        }
        if held_out
        else {"steps": trainer.state.global_step, "tokens": trainer.budget.tokens}
    )
    metrics["interrupted"] = trainer.interrupted
    if trainer.is_world_process_zero():
        report = {"final": metrics, "settings": asdict(config), "log": trainer.state.log_history}
        _write_result(model, adapter, tokenizer, config, report)
    return metrics


def _write_result(
    model: ParallelDecoder, adapter: Any, tokenizer: Any, config: TrainConfig, report: dict[str, Any]
) -> None:
    """Put checkpoint or adapter and the report into `out`, file by file from a finished folder, keeping `checkpoints`."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    finished = out / ".finished"
    dtype = getattr(torch, config.save_dtype)
    if adapter is not None:
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        source = config.adapter_source or config.checkpoint
        save_adapter(adapter, model, source, finished, tokenizer, overwrite=True, destined_for=out)
    else:
        cast_parameters(model, dtype)
        save_checkpoint(model, tokenizer, finished, overwrite=True)
    (finished / METRICS_FILE).write_text(json.dumps(report, indent=1))
    for file in sorted(
        finished.iterdir(), key=lambda f: f.name == "config.json"
    ):  # the config last: it makes a checkpoint
        os.replace(file, out / file.name)
    finished.rmdir()


def _examples(config: TrainConfig, tokenizer: Any) -> tuple[Examples, Examples | None]:
    examples = load_examples(config.data, tokenizer, config)
    if config.eval_data:
        training, held_out = examples, load_examples(config.eval_data, tokenizer, config)[: config.max_eval_examples]
    else:
        training, held_out = split_held_out(examples, config)
    return Examples(training), Examples(held_out) if held_out else None


def _last_checkpoint(out: Path) -> str:
    from transformers.trainer_utils import get_last_checkpoint

    folder = out / "checkpoints"
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if last is None:
        raise UserError(f"nothing to resume: {str(folder)!r} holds no checkpoint")
    return last


class _finish_on_interrupt:
    """The first SIGINT or SIGTERM ends training after the step in progress; a second one is the default."""

    def __init__(self, trainer: DecoderTrainer):
        self.trainer = trainer
        self.previous: dict[int, Any] = {}

    def __enter__(self):
        def handle(number, frame):
            print("stopping after this step; the checkpoint will be written", file=sys.stderr, flush=True)
            self.trainer.interrupted = True
            signal.signal(number, self.previous[number])

        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.previous[number] = signal.signal(number, handle)
            except ValueError:  # not in the main thread
                return self
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)
