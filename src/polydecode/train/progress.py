"""What a person sees of a run: on stderr, and in a file that grows with it."""

import json
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm
from transformers import TrainerCallback

from polydecode.train.budget import Budget
from polydecode.train.distributed import is_first_process


class ProgressReport(TrainerCallback):
    """Progress on stderr: a bar on a terminal, and a line with the loss per phase, speed and time left at each log."""

    def __init__(self, budget: Budget):
        self.budget = budget
        self.bar: tqdm | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and sys.stderr.isatty():
            self.bar = tqdm(
                total=100, unit="%", file=sys.stderr, disable=False, bar_format="{l_bar}{bar}| {elapsed}<{remaining}"
            )

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(round(100 * self.budget.progress(state.global_step), 2) - self.bar.n)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs or not ("loss" in logs or "eval_loss" in logs):
            return
        line = self._line(state.global_step, logs)
        if self.bar is not None:
            self.bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def _line(self, step: int, logs: dict[str, float]) -> str:
        prefix = "eval_" if "eval_loss" in logs else ""
        parts = [f"step {step}", f"{'held-out ' if prefix else ''}loss {logs[prefix + 'loss']:.4f}"]
        told = {f"{prefix}cross_entropy", "source_kl"}
        parts += [f"{k.removeprefix(prefix)} {v:.3f}" for k, v in logs.items() if "accuracy" in k or k in told]
        if not prefix:
            parts.append(f"grad {logs.get('grad_norm', 0.0):.2f}  lr {logs['learning_rate']:.1e}")
            parts.append(f"{logs['tokens_per_s']:.0f} tokens/s  {self._time_left(step)} left")
        return "  ".join(parts)

    def _time_left(self, step: int) -> str:
        used = max(self.budget.progress(step), 1e-9)
        seconds = int((time.monotonic() - self.budget.started) * (1 - used) / used)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class RunLog(TrainerCallback):
    """Every line of the log as JSON, with its step, as it comes: the file of a killed run ends where the run did."""

    def __init__(self, file: Path):
        self.file = file
        self.started = False

    def keep_until(self, step: int) -> None:
        """A run goes on from `step`: the first process drops what is there of later steps."""
        self.started = True
        if not is_first_process() or not self.file.is_file():
            return
        lines = [line for line in self.file.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        aside = self.file.with_suffix(".part")
        aside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.replace(aside, self.file)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a" if self.started else "w", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        self.started = True


def _step_of(line: str) -> float:
    """The step of a line; beyond all for one that was cut off in the writing."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
