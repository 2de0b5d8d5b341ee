"""`transformers.Trainer` with the method's own loss, its averages in the log, and a budget.

The loss is a sum over the whole global batch divided by its targets, not a mean of means. Random draws belong to (seed,
epoch, example), so they do not depend on the batch split.
"""

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from polydecode.config import TrainConfig
from polydecode.data import Collator, Examples
from polydecode.methods.base import ParallelDecoder
from polydecode.methods.batch import Batch, LossOutput
from polydecode.ops.sampling import RowGenerators, mix_seed
from polydecode.train.budget import Budget
from polydecode.train.progress import ProgressReport


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
        for library_callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(library_callback)
        self.add_callback(_BudgetCallback(self))
        self.add_callback(ProgressReport(self.budget))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            chosen: Any = optimizer if optimizer is not None else self.optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, self.budget.factor)
        return self.lr_scheduler

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        """Targets of the whole global batch, as the method counts them."""
        if not batch_samples:
            return None
        counts = (self._decoder().num_targets(*self._batch_and_noise(inputs)) for inputs in batch_samples)
        count = torch.tensor(sum(counts), device=device)
        if self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return count

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        output = self._loss_output(model, inputs, epoch=None)
        self.budget.tokens += int(inputs["attention_mask"].sum()) * self.args.world_size
        for name, value in {**output.sums, "targets": output.num_targets}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        if num_items_in_batch is None:
            return output.loss
        return output.loss * output.num_targets / num_items_in_batch * self.args.world_size

    def _loss_output(self, model: Any, inputs: dict[str, Tensor], epoch: int | None) -> LossOutput:
        batch, generator = self._batch_and_noise(inputs, epoch)
        return model(batch=batch, generator=generator)

    def _batch_and_noise(self, inputs: dict[str, Tensor], epoch: int | None = None) -> tuple[Batch, RowGenerators]:
        """The batch and its generators, by (seed, epoch, example); `epoch` None is the current one."""
        batch = Batch(**inputs)
        assert batch.example_ids is not None
        epoch = int(self.state.epoch or 0) if epoch is None else epoch
        return batch, RowGenerators([mix_seed(self.run_config.seed, epoch, int(i)) for i in batch.example_ids])

    def _decoder(self) -> ParallelDecoder:
        """The model without distributed wrappers."""
        model = self.accelerator.unwrap_model(self.model)
        assert isinstance(model, ParallelDecoder)
        return model

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
        assert self.model is not None
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
        disable_tqdm=True,
        label_names=[],
        include_for_metrics=[],
    )
