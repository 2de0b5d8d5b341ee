"""Training on `transformers.Trainer`: the loss is the method's own, everything else is the Trainer's.

What is unusual: the loss is a sum over the whole global batch divided by its targets, not a mean of means; random draws
belong to (seed, epoch, example), so they do not depend on the batch split; the learning rate follows the share of the budget
used (steps, tokens or minutes, whichever is furthest); Ctrl-C ends the run early with a loadable checkpoint.
"""

import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from polydecode.auto import load, load_tokenizer
from polydecode.config import TrainConfig
from polydecode.convert import save_adapter, save_checkpoint
from polydecode.data import Collator, Examples, load_examples, pad_token_id, split_held_out
from polydecode.errors import UserError
from polydecode.methods.base import Batch, LossOutput, ParallelDecoder
from polydecode.ops.sampling import RowGenerators, mix_seed

METRICS_FILE = "training_metrics.json"
_BUDGET_FILE = "budget.json"
_LORA_TARGETS = "all-linear"


def train(config: TrainConfig) -> dict[str, Any]:
    """Train and write the result to `config.out`; returns the final metrics.

    The folder holds the trained checkpoint (or adapter), `training_metrics.json` and, while `save_steps` says so,
    `checkpoints/`. Raises `UserError` for bad settings or data before anything is written.
    """
    config.check()
    out = Path(config.out)
    if out.exists() and any(out.iterdir()) and not config.resume:
        raise UserError(f"output folder {str(out)!r} is not empty; choose another or give --resume")
    tokenizer = load_tokenizer(config.checkpoint)
    training, held_out = _examples(config, tokenizer)
    set_seed(config.seed)
    model = load(config.checkpoint, dtype=torch.float32)
    adapter = prepare_parameters(model, config)
    trainer = DecoderTrainer(model, config, training, held_out, pad_token_id(tokenizer))
    _report_parameters(model)
    started = time.monotonic()
    last = _last_checkpoint(out) if config.resume else None
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
    if adapter is not None:
        save_adapter(adapter, model, config.checkpoint, finished, tokenizer=tokenizer, overwrite=True)
    else:
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


def prepare_parameters(model: ParallelDecoder, config: TrainConfig) -> Any:
    """Freeze what is not trained; the PeftModel when `lora_rank` asks for adapters, else None."""
    adapter = None
    if config.lora_rank:
        from peft import LoraConfig, get_peft_model

        alpha = config.lora_alpha or 2 * config.lora_rank
        lora = LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules=_LORA_TARGETS, lora_dropout=0.0)
        adapter = get_peft_model(model.base, lora)
    for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
        for parameter in embeddings.parameters():
            parameter.requires_grad_(config.train_embeddings)
    return adapter


def _report_parameters(model: ParallelDecoder) -> None:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"training {trained:,} of {total:,} parameters ({trained / total:.1%})", file=sys.stderr)


class Budget:
    """How much of the run is used: steps, tokens and minutes, and the learning-rate factor that follows from it."""

    def __init__(self, config: TrainConfig, total_steps: int):
        self.config, self.total_steps = config, total_steps
        self.tokens = 0
        self.started = time.monotonic()

    def progress(self, step: int) -> float:
        """Share of the budget used after `step` steps, 0 to 1: the furthest of steps, tokens and minutes."""
        shares = [step / max(self.total_steps, 1)]
        if self.config.max_tokens:
            shares.append(self.tokens / self.config.max_tokens)
        if self.config.max_minutes:
            shares.append((time.monotonic() - self.started) / 60 / self.config.max_minutes)
        return min(max(shares), 1.0)

    def factor(self, step: int) -> float:
        """Learning-rate factor: linear warm-up, then the schedule down to 0 at the end of the budget."""
        progress, warmup = self.progress(step), self.config.warmup_ratio
        if progress < warmup:
            return max(progress / warmup, 1e-3)
        rest = (progress - warmup) / max(1 - warmup, 1e-9)
        if self.config.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * rest)) if self.config.schedule == "cosine" else 1 - rest

    def save(self, folder: Path) -> None:
        """Keep tokens and minutes used beside a checkpoint."""
        used = {"tokens": self.tokens, "seconds": time.monotonic() - self.started}
        (folder / _BUDGET_FILE).write_text(json.dumps(used))

    def restore(self, folder: Path) -> None:
        """Go on from what a checkpoint had used."""
        used = json.loads((folder / _BUDGET_FILE).read_text())
        self.tokens, self.started = used["tokens"], time.monotonic() - used["seconds"]

    def used_up(self, step: int) -> bool:
        """Whether the run should end."""
        return self.progress(step) >= 1.0


class DecoderTrainer(Trainer):
    """`Trainer` with the method's loss, per-phase logging and a budget."""

    def __init__(
        self, model: ParallelDecoder, config: TrainConfig, training: Examples, held_out: Examples | None, pad: int
    ):
        self.run_config = config
        self.interrupted = False
        self._sums: dict[str, float] = {}
        self._since = (time.monotonic(), 0)
        micro = config.micro_batch_size or config.batch_size
        arguments = _arguments(config, micro, has_eval=held_out is not None)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=training,
            eval_dataset=held_out,
            data_collator=Collator(pad),
        )
        self.model_accepts_loss_kwargs = True
        steps_per_epoch = math.ceil(len(training) / (config.batch_size * max(self.args.world_size, 1)))
        self.budget = Budget(config, config.max_steps or math.ceil(config.epochs * steps_per_epoch))
        self.add_callback(_BudgetCallback(self))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            chosen = optimizer if optimizer is not None else self.optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, self.budget.factor)
        return self.lr_scheduler

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        """Targets of the whole global batch: the first token of a row is never one."""
        if not batch_samples:
            return None
        count = torch.tensor(sum(int(b["loss_mask"][:, 1:].sum()) for b in batch_samples), device=device)
        if self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return count

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        output = self._loss_output(model, inputs, epoch=int(self.state.epoch or 0))
        self.budget.tokens += int(inputs["attention_mask"].sum()) * self.args.world_size
        for name, value in {**output.sums, "targets": output.num_targets}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        if num_items_in_batch is None:
            return output.loss
        return output.loss * output.num_targets / num_items_in_batch * self.args.world_size

    def _loss_output(self, model: Any, inputs: dict[str, Tensor], epoch: int) -> LossOutput:
        batch = Batch(**inputs)
        assert batch.example_ids is not None
        seeds = [mix_seed(self.run_config.seed, epoch, int(i)) for i in batch.example_ids]
        return model(batch=batch, generator=RowGenerators(seeds))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(averages(self._sums))
            now, tokens = time.monotonic(), self.budget.tokens
            logs["tokens_per_s"] = round((tokens - self._since[1]) / max(now - self._since[0], 1e-9), 1)
            logs["tokens"] = tokens
            self._sums, self._since = {}, (now, tokens)
        super().log(logs, start_time)

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Token-weighted loss and the method's averages over the held-out examples, with fixed draws."""
        self.model.eval()
        sums: dict[str, float] = {}
        loss = 0.0
        with torch.no_grad():
            for inputs in self.get_eval_dataloader():
                output = self._loss_output(self.model, self._prepare_inputs(inputs), epoch=0)
                loss += float(output.loss) * output.num_targets
                for name, value in {**output.sums, "targets": output.num_targets}.items():
                    sums[name] = sums.get(name, 0.0) + value
        self.model.train()
        metrics = {"loss": loss / max(sums.get("targets", 0.0), 1.0), **averages(sums)}
        named = {f"{metric_key_prefix}_{k}": round(v, 5) for k, v in metrics.items()}
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named


def averages(sums: dict[str, float]) -> dict[str, float]:
    """Every `x` with an `x_count` as their quotient; counts and lone sums are left out."""
    return {
        name: round(value / sums[f"{name}_count"], 4)
        for name, value in sums.items()
        if sums.get(f"{name}_count", 0) > 0
    }


class _BudgetCallback(TrainerCallback):
    def __init__(self, trainer: DecoderTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.budget.used_up(state.global_step) or self.trainer.interrupted:
            control.should_training_stop = True
        return control

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.trainer.budget.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        return control


def _arguments(config: TrainConfig, micro: int, has_eval: bool) -> TrainingArguments:
    bf16 = config.dtype == "bfloat16" or (config.dtype == "auto" and torch.cuda.is_available())
    return TrainingArguments(
        output_dir=str(Path(config.out) / "checkpoints"),
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=config.batch_size // micro,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        max_grad_norm=config.max_grad_norm,
        max_steps=config.max_steps or -1,
        num_train_epochs=config.epochs or 1_000_000,
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=config.gradient_checkpointing,
        logging_steps=config.log_steps,
        eval_strategy="steps" if config.eval_steps and has_eval else "no",
        eval_steps=config.eval_steps or None,
        save_strategy="steps" if config.save_steps else "no",
        save_steps=config.save_steps or 500,
        save_total_limit=config.save_total_limit,
        seed=config.seed,
        data_seed=config.seed,
        report_to=[] if config.report_to == "none" else [config.report_to],
        remove_unused_columns=False,
        dataloader_drop_last=False,
        disable_tqdm=not sys.stderr.isatty(),
        label_names=[],
        include_for_metrics=[],
    )


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
