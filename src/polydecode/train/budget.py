"""How much of a run is used: steps, tokens and minutes, whichever is furthest, and the learning rate that follows."""

import json
import math
import time
from pathlib import Path

from polydecode.config import TrainConfig

_BUDGET_FILE = "budget.json"


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
