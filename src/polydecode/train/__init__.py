"""Training on `transformers.Trainer`: settings in, a checkpoint or adapter folder out.

The learning rate follows the share of the budget used (steps, tokens or minutes, whichever is furthest); Ctrl-C ends the run
early with a loadable checkpoint; a resumed run equals the uninterrupted one.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from polydecode.auto import load, load_tokenizer
from polydecode.auto.loading import cast_parameters
from polydecode.config import TrainConfig
from polydecode.convert import save_adapter, save_checkpoint
from polydecode.data import Examples, PackedExamples, record_thinking, training_data
from polydecode.errors import UserError
from polydecode.methods.base import ParallelDecoder
from polydecode.train.budget import Budget
from polydecode.train.checks import Diverged
from polydecode.train.distributed import among_others, make_whole
from polydecode.train.draws import restore_stream
from polydecode.train.folder import FINISHED, alone_in, check_out, out_folder, writing_to
from polydecode.train.memory import longest_lengths, report_memory
from polydecode.train.parameters import check_same_weights, prepare_parameters, report_parameters
from polydecode.train.resume import check_same_run, description, last_checkpoint, step_of, versions, write_run
from polydecode.train.source import frozen_base, make_source
from polydecode.train.trainer import DecoderTrainer, NothingLeft, averages

__all__ = ["METRICS_FILE", "Budget", "DecoderTrainer", "averages", "prepare_parameters", "train"]

METRICS_FILE = "training_metrics.json"


def train(config: TrainConfig) -> dict[str, Any]:
    """Train and write the result to `config.out`; returns the final metrics.

    The folder holds the trained checkpoint (or adapter), `training_metrics.json` and, while `save_steps` says so,
    `checkpoints/`. Raises `UserError` for bad settings or data before anything is written.
    """
    config.check()
    check_out(config)
    out = out_folder(config)
    last = last_checkpoint(out) if config.resume else None
    tokenizer = load_tokenizer(config.checkpoint)
    record_thinking(tokenizer, config.enable_thinking)
    training, held_out = training_data(config, tokenizer, config.seed)
    if last is not None:
        restore_stream(training, last)
    set_seed(config.seed)
    model = load(config.checkpoint, dtype=torch.float32)
    if config.adapter_source:
        check_same_weights(model, config)
    if config.keep == "best" and held_out is None:
        raise UserError(
            "keep best compares evaluations, and of these data nothing is held out: raise eval_fraction or give eval_data"
        )
    frozen = frozen_base(model, tokenizer, config)
    adapter = prepare_parameters(model, config)
    rows: Any = training
    if config.packing and isinstance(training, Examples):  # a stream packs by itself
        rows = PackedExamples(training, config.max_length, config.seed)
    with alone_in(out, fresh=last is None), writing_to(out), among_others():
        trainer = DecoderTrainer(model, config, rows, held_out, tokenizer)
        trainer.source = make_source(model, adapter, frozen, config)
        trainer.longest = longest_lengths(training, config)
        run = description(config, model, tokenizer, training)
        changed = check_same_run(out, run) if last is not None else []
        if last is not None:
            trainer.restore(last)
        return _trained(trainer, adapter, run, last, changed)


def _trained(
    trainer: DecoderTrainer, adapter: Any, run: dict[str, Any], last: Path | None, changed: list[str]
) -> dict[str, Any]:
    """Run, evaluate and write; the metrics."""
    config, model, out = trainer.run_config, trainer.decoder(), out_folder(trainer.run_config)
    if trainer.is_world_process_zero():
        if last is not None:
            _tell_resume(step_of(last), changed)
        report_parameters(model)
        report_memory(model, config, trainer.longest)
        write_run(out, run)
    if last is None:
        trainer.say_first_loss()
    with _finish_on_interrupt(trainer):
        _run(trainer, last)
        metrics = {
            "steps": trainer.state.global_step,
            "tokens": trainer.budget.tokens,
            "minutes": round(trainer.budget.used()["seconds"] / 60, 2),
        }
        if trainer.eval_dataset is not None:
            metrics |= _final_evaluation(trainer)
        metrics["interrupted"] = trainer.interrupted
        make_whole(model)
        if trainer.is_world_process_zero():
            report = {
                "first": trainer.first,
                "final": metrics,
                "settings": asdict(config),
                "versions": versions(),
                "log": trainer.state.log_history,
            }
            _write_result(model, adapter, trainer.tokenizer, config, report)
    return metrics


def _tell_resume(step: int, changed: list[str]) -> None:
    told = [c for c in changed if not c.startswith("resume ")]
    print(f"resuming from step {step}{'; changed: ' if told else ''}{', '.join(told)}", file=sys.stderr)


def _write_result(
    model: ParallelDecoder, adapter: Any, tokenizer: Any, config: TrainConfig, report: dict[str, Any]
) -> None:
    """Put checkpoint or adapter and the report into `out`, file by file from a finished folder, keeping `checkpoints`."""
    out = out_folder(config)
    finished = out / FINISHED
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


def _final_evaluation(trainer: DecoderTrainer) -> dict[str, float]:
    """The metrics of what is written: the last weights, or the best when they are kept."""
    metrics = trainer.last_evaluation()
    best = trainer.best.record
    if trainer.run_config.keep == "best" and best is not None and best["step"] != trainer.state.global_step:
        trainer.accelerator.wait_for_everyone()
        trainer.best.restore(trainer.decoder())
        metrics = trainer.evaluate() | {"best_step": best["step"]}
    return {k: v for k, v in metrics.items() if k.startswith(("eval_", "best_"))}


def _run(trainer: DecoderTrainer, last: Path | None) -> None:
    try:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    except NothingLeft:
        if trainer.is_world_process_zero():
            print(f"step {trainer.state.global_step} is the end of this run: nothing is left to train", file=sys.stderr)
    except Diverged as error:
        try:
            good = last_checkpoint(out_folder(trainer.run_config), until=error.good_until)
            kept = f"the last good checkpoint is {good}"
        except UserError:
            kept = "no checkpoint of before was saved (see --save-steps)"
        raise UserError(f"training stopped: {error}; {kept}. Lower --learning-rate, or look at the data") from None


class _finish_on_interrupt:
    """The first SIGINT or SIGTERM ends training after the step in progress; a second one is the default."""

    def __init__(self, trainer: DecoderTrainer):
        self.trainer = trainer
        self.previous: dict[int, Any] = {}

    def __enter__(self):
        def handle(number, frame):
            print("finishing; the checkpoint will be written", file=sys.stderr, flush=True)
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
