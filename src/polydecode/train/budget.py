"""How much of a run is used: steps, tokens and minutes, whichever is furthest, and the learning rate that follows."""

import math
import time
from collections.abc import Callable

from polydecode.config import TrainConfig


class Budget:
    """How much of the run is used: steps, tokens and minutes, and the learning-rate factor that follows from it."""

    def __init__(self, config: TrainConfig, total_steps: int):
        self.config, self.total_steps = config, total_steps
        self.tokens = 0
        self.started = time.monotonic()
        self.seconds: float | None = None
        """Seconds used at the last step, as agreed between processes; None while there is none."""

    def agree(self, told: Callable[[float], float]) -> None:
        """Fix the time used to what all processes agree on: the schedule follows it, and they must step alike."""
        if self.config.max_minutes:
            self.seconds = told(time.monotonic() - self.started)

    def progress(self, step: int) -> float:
        """Share of the budget used after `step` steps, 0 to 1: the furthest of steps, tokens and minutes."""
        shares = [step / max(self.total_steps, 1)]
        if self.config.max_tokens:
            shares.append(self.tokens / self.config.max_tokens)
        if self.config.max_minutes:
            seconds = time.monotonic() - self.started if self.seconds is None else self.seconds
            shares.append(seconds / 60 / self.config.max_minutes)
        return min(max(shares), 1.0)

    def factor(self, step: int) -> float:
        """Learning-rate factor: linear warm-up, then the schedule down to `min_learning_rate` at the end of the budget."""
        config, progress = self.config, self.progress(step)
        if progress < config.warmup_ratio:
            return max(progress / config.warmup_ratio, 1e-3)
        rest = (progress - config.warmup_ratio) / max(1 - config.warmup_ratio, 1e-9)
        if config.schedule == "constant":
            return 1.0
        if config.schedule == "cosine":
            above = 0.5 * (1 + math.cos(math.pi * rest))
        elif config.schedule == "linear":
            above = 1 - rest
        else:
            above = min((1 - progress) / max(config.decay_ratio, 1e-9), 1.0)
        lowest = config.min_learning_rate / config.learning_rate
        return lowest + (1 - lowest) * above

    def used(self) -> dict[str, float]:
        """Tokens and seconds used, to be kept beside a checkpoint."""
        return {"tokens": self.tokens, "seconds": time.monotonic() - self.started}

    def restore(self, used: dict[str, float]) -> None:
        """Go on from what a checkpoint had used."""
        self.tokens, self.started = int(used["tokens"]), time.monotonic() - used["seconds"]

    def used_up(self, step: int) -> bool:
        """Whether the run should end."""
        return self.progress(step) >= 1.0
