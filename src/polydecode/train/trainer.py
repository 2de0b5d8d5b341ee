"""`transformers.Trainer` with the method's own loss, its averages in the log, and a budget.

The loss is a sum over the whole global batch divided by its targets, not a mean of means. Random draws belong to (seed,
epoch, example), so they do not depend on the batch split.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from polydecode.config import TrainConfig
from polydecode.data import STREAM_PLACE, Collator, Examples, ExampleStream, Mixture, pad_token_id
from polydecode.methods.base import ParallelDecoder
from polydecode.methods.batch import Batch, LossOutput
from polydecode.ops.sampling import RowGenerators, mix_seed
from polydecode.train.arguments import reporter, tensorboard, training_arguments
from polydecode.train.budget import Budget
from polydecode.train.checks import Watch
from polydecode.train.distributed import EpochOrder, Rows, any_of_them, of_the_first, split_batch, summed, world_size
from polydecode.train.draws import ENDLESS, EpochDraws, StreamState, stream_loader
from polydecode.train.evaluation import FIRST_EXAMPLES, Best, first_line, show_samples
from polydecode.train.folder import out_folder
from polydecode.train.progress import ProgressReport, RunLog
from polydecode.train.resume import COMPLETE_FILE, LOG_FILE, complete, rotate, step_of
from polydecode.train.source import Source


class DecoderTrainer(Trainer):
    """`Trainer` with the method's loss, per-phase logging and a budget."""

    def __init__(
        self, model: ParallelDecoder, config: TrainConfig, training: Any, held_out: Examples | None, tokenizer: Any
    ):
        self.run_config = config
        self.tokenizer = tokenizer
        self.interrupted = False
        self.watch = Watch(config.spike_factor)
        self.best = Best(out_folder(config) / "checkpoints" / "best")
        self.first: dict[str, float] = {}
        self._step: dict[str, Tensor | float] = {"loss": 0.0, "cross_entropy": 0.0, "count": 0.0}
        self._evaluated: dict[str, float] = {}
        self.source: Source | None = None
        self.longest: list[tuple[int, int]] = []
        self._sums: dict[str, float] = {}
        self._since = (time.monotonic(), 0)
        processes = world_size()
        micro, _ = split_batch(config.batch_size, config.micro_batch_size, processes)
        layer = type(model.stack.layers[0]).__name__
        arguments = training_arguments(config, has_eval=held_out is not None, layer_class=layer)
        if isinstance(training, ExampleStream):  # it seeks to its place by itself
            arguments.ignore_data_skip, arguments.max_steps = True, config.max_steps or ENDLESS
        rows = training if isinstance(training, ExampleStream) else Rows(training, micro * processes, config.packing)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=rows,
            eval_dataset=held_out,
            data_collator=Collator(pad_token_id(tokenizer)),
        )
        self.model_accepts_loss_kwargs = True
        if isinstance(training, ExampleStream):
            training.shard(micro, self.args.process_index, processes)
            self.stream_state = StreamState(training, config.batch_size)
            self.add_callback(self.stream_state)
            total_steps = arguments.max_steps
        else:
            if isinstance(training, Mixture):
                self.add_callback(EpochDraws(training))
            total_steps = config.max_steps or math.ceil(config.epochs * math.ceil(len(training) / config.batch_size))
        self.budget = Budget(config, total_steps)
        for library_callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(library_callback)
        self.add_callback(_RunCallback(self))
        self.add_callback(ProgressReport(self.budget))
        self.run_log = RunLog(out_folder(config) / LOG_FILE)
        self.add_callback(self.run_log)
        if reporter(config.report_to) == "tensorboard" and self.is_world_process_zero():
            self.add_callback(tensorboard(out_folder(config) / "logs"))

    def get_train_dataloader(self) -> DataLoader:
        if isinstance(self.train_dataset, ExampleStream):
            pin = self.args.dataloader_pin_memory and torch.cuda.is_available()
            return stream_loader(self.train_dataset, self.data_collator, self._train_batch_size, pin)
        return super().get_train_dataloader()

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if isinstance(self.train_dataset, Rows):
            return EpochOrder(self.train_dataset, self.run_config.seed, lambda: int(self.state.epoch or 0))
        return super()._get_train_sampler(train_dataset)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            chosen: Any = optimizer if optimizer is not None else self.optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, self.budget.factor)
        return self.lr_scheduler

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        """Targets of the whole global batch, as the method counts them."""
        if not batch_samples:
            return None
        if STREAM_PLACE in batch_samples[-1]:
            window, number = batch_samples[-1][STREAM_PLACE].tolist()
            self.stream_state.read = (window, number)
        counts = (self.decoder().num_targets(*self._batch_and_noise(inputs)) for inputs in batch_samples)
        read = sum(int(inputs["attention_mask"].sum()) for inputs in batch_samples)
        told = summed({"targets": sum(counts), "read": read}, self.args.device)
        self.budget.tokens += int(told["read"])
        return torch.tensor(max(int(told["targets"]), 1), device=device)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        output = self._loss_output(model, inputs, epoch=None, source=self.source)
        for name, value in {**output.sums, "targets": output.num_targets}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        loss = output.loss
        if num_items_in_batch is not None:
            loss = loss * output.num_targets / num_items_in_batch * self.args.world_size
        self._step["loss"] = self._step["loss"] + loss.detach() / self.args.world_size
        self._step["cross_entropy"] += output.sums.get("cross_entropy", 0.0)
        self._step["count"] += output.sums.get("cross_entropy_count", 0.0)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The norm before clipping; the update is left out, or the run ended, when it or the loss is out of order."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        step = summed({name: float(value) for name, value in self._step.items()}, self.args.device)
        self._step = dict.fromkeys(self._step, 0.0)
        judged = step["cross_entropy"] / step["count"] if step["count"] else step["loss"]
        if not self.watch.take_update(self.state.global_step + 1, step["loss"], float(norm), judged):
            model.zero_grad(set_to_none=True)
        return norm

    def _loss_output(
        self, model: Any, inputs: dict[str, Tensor], epoch: int | None, source: Source | None = None
    ) -> LossOutput:
        batch, generator = self._batch_and_noise(inputs, epoch)
        if source is not None:
            with self.accelerator.autocast():
                batch.source = source.read(batch)
        return model(batch=batch, generator=generator)

    def _batch_and_noise(self, inputs: dict[str, Tensor], epoch: int | None = None) -> tuple[Batch, RowGenerators]:
        """The batch and its generators, by (seed, epoch, example); `epoch` None is the current one."""
        tensors: dict[str, Any] = {name: value for name, value in inputs.items() if name != STREAM_PLACE}
        batch = Batch(**tensors)
        assert batch.example_ids is not None
        epoch = int(self.state.epoch or 0) if epoch is None else epoch
        rows = batch.example_ids.view(len(batch.input_ids), -1).tolist()
        examples = [i for row in rows for d, i in enumerate(row) if i >= 0 or d == 0]  # a blank row is -1 alone
        return batch, RowGenerators([mix_seed(self.run_config.seed, epoch, i) for i in examples])

    def decoder(self) -> ParallelDecoder:
        """The model without distributed wrappers."""
        model = self.accelerator.unwrap_model(self.model)
        assert isinstance(model, ParallelDecoder)
        return model

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(averages(summed(self._sums, self.args.device)))
            now, tokens = time.monotonic(), self.budget.tokens
            logs["tokens_per_s"] = round((tokens - self._since[1]) / max(now - self._since[0], 1e-9), 1)
            logs["tokens"] = tokens
            self._sums, self._since = {}, (now, tokens)
        super().log(logs, start_time)

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Token-weighted loss and the method's averages over the held-out examples, with fixed draws, and some answers."""
        named = self._held_out_metrics(self.eval_dataset, metric_key_prefix)
        held_out: Any = self.eval_dataset
        if self.run_config.eval_samples:
            found = self._show_samples(held_out)
            named |= {f"{metric_key_prefix}_{k}": round(v, 4) for k, v in found.items()}
        if self.run_config.keep == "best":
            loss, write = named[f"{metric_key_prefix}_loss"], self.is_world_process_zero()
            self.best.offer(self.decoder(), self.state.global_step, loss, write)
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        self._evaluated = {"step": self.state.global_step, **named}
        return named

    def last_evaluation(self) -> dict[str, float]:
        """The metrics of the weights as they are: of the evaluation just made, or of one made now."""
        if self._evaluated.get("step") != self.state.global_step:
            self.evaluate()
        return {name: value for name, value in self._evaluated.items() if name != "step"}

    def _show_samples(self, held_out: Examples) -> dict[str, float]:
        count, step = self.run_config.eval_samples, self.state.global_step
        out = out_folder(self.run_config) if self.is_world_process_zero() else None
        return show_samples(self.decoder(), self.tokenizer, held_out, count, step, out)

    def _held_out_metrics(self, rows: Any, prefix: str) -> dict[str, float]:
        """Over all `rows`, in every process alike."""
        assert self.model is not None
        size, own = self.args.per_device_eval_batch_size, torch.Generator()  # not the run's random numbers
        batches = DataLoader(rows, size, collate_fn=self.data_collator, generator=own)
        self.model.eval()
        sums: dict[str, float] = {}
        loss = 0.0
        with torch.no_grad():
            for inputs in batches:
                output = self._loss_output(self.model, self._prepare_inputs(inputs), epoch=0)
                loss += float(output.loss) * output.num_targets
                for name, value in {**output.sums, "targets": output.num_targets}.items():
                    sums[name] = sums.get(name, 0.0) + value
        self.model.train()
        metrics = {"loss": loss / max(sums.get("targets", 0.0), 1.0), **averages(sums)}
        return {f"{prefix}_{k}": round(v, 5) for k, v in metrics.items()}

    def say_first_loss(self) -> None:
        """One line on the loss before the first step, over a few examples."""
        source: Any = self.eval_dataset if self.eval_dataset is not None else self.train_dataset
        if isinstance(source, ExampleStream):
            few = Examples(source.peek(FIRST_EXAMPLES))
        else:
            few = Examples([source[i] for i in range(min(FIRST_EXAMPLES, len(source)))])
        metrics = self._held_out_metrics(few, "eval")
        vocab_size = self.decoder().config.vocab_size
        renamed = {k.replace("eval_", "first_"): v for k, v in metrics.items()}
        self.first = renamed | {"first_uniform_loss": round(math.log(vocab_size), 5)}
        self.log(dict(self.first))
        if self.is_world_process_zero():
            print(first_line(metrics, vocab_size), file=sys.stderr)
        if self.run_config.eval_samples and self.eval_dataset is not None:
            self._show_samples(source)

    def restore(self, checkpoint: Path) -> None:
        """Go on from what a checkpoint had used and seen."""
        saved = json.loads((checkpoint / COMPLETE_FILE).read_text())
        self.budget.restore(saved["budget"])
        self.watch.restore(saved["watch"])
        self.run_log.keep_until(step_of(checkpoint))
        self.best.resume(step_of(checkpoint))


def averages(sums: dict[str, float]) -> dict[str, float]:
    """Every `x` with an `x_count` as their quotient; counts and lone sums are left out."""
    return {
        name: round(value / sums[f"{name}_count"], 4)
        for name, value in sums.items()
        if sums.get(f"{name}_count", 0) > 0
    }


class NothingLeft(Exception):
    """A resumed run is at its end already; its state and weights are loaded."""


class _RunCallback(TrainerCallback):
    def __init__(self, trainer: DecoderTrainer):
        self.trainer = trainer
        self.saved_at = time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step and self.trainer.budget.used_up(state.global_step):
            raise NothingLeft  # the library would make one more step

    def on_step_end(self, args, state, control, **kwargs):
        trainer, every = self.trainer, self.trainer.run_config.save_minutes
        trainer.budget.agree(lambda seconds: of_the_first(seconds, args.device))
        used_up = trainer.budget.used_up(state.global_step)
        trainer.interrupted = any_of_them(trainer.interrupted, args.device)
        if trainer.interrupted or used_up:
            control.should_training_stop = True
            control.should_save = bool(every or trainer.run_config.save_steps)
        if every and of_the_first(time.monotonic() - self.saved_at, args.device) >= 60 * every:
            control.should_save = True
        return control

    def on_save(self, args, state, control, **kwargs):
        """Complete a checkpoint: what is written last says that it is whole."""
        self.saved_at = time.monotonic()
        self.trainer.accelerator.wait_for_everyone()
        if state.is_world_process_zero:
            saved = {"budget": self.trainer.budget.used(), "watch": self.trainer.watch.state()}
            self.trainer.best.checkpointed(write=True)
            complete(Path(args.output_dir) / f"checkpoint-{state.global_step}", saved)
            config = self.trainer.run_config
            rotate(out_folder(config), config.save_total_limit, state.global_step)
        else:
            self.trainer.best.checkpointed(write=False)
        return control
