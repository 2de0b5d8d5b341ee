"""What ends a run that goes wrong, before its update reaches the weights."""

import math
import sys
from collections import deque
from statistics import median
from typing import Any

from polydecode.errors import UserError

_WINDOW = 50
_LEAST = 20
LOOKBACK = 40
"""Steps before a rise of the loss is noticed in which it may have begun; a checkpoint from before is always kept."""
_SPIKES_IN_A_ROW = 5


class Diverged(UserError):
    """The run cannot be saved by going on: its loss or gradient is not finite, or has left what it was. `good_until`: the last
    step before it went wrong."""

    def __init__(self, message: str, good_until: int):
        super().__init__(message)
        self.good_until = good_until


class Watch:
    """Looks at every step's loss and gradient norm (before clipping) ahead of the update.

    A norm above `spike_factor` times the median of the last 50 leaves that update out, five in a row end the run; so does a loss
    (average of about 20 steps) of more than twice its lowest plus 1, and anything that is not finite. `spike_factor` 0
    leaves only the last. Nothing is judged in the first 20 steps. What must not rise is `judged`: the cross-entropy per
    token, where the loss itself is weighted and noisy.
    """

    def __init__(self, spike_factor: float):
        self.spike_factor = spike_factor
        self.norms: deque[float] = deque(maxlen=_WINDOW)
        self.spikes = 0
        self.steps = 0
        self.mean = self.lowest = math.inf

    def take_update(self, step: int, loss: float, norm: float, judged: float) -> bool:
        """Whether this step's update should be made. Raises `Diverged`."""
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise Diverged(f"step {step}: the loss is {loss:g} and its gradient norm {norm:g}", step - 2)
        if not self.spike_factor:
            return True
        self._follow(step, judged)
        if len(self.norms) >= _LEAST and norm > self.spike_factor * median(self.norms):
            self.spikes += 1
            usual = median(self.norms)
            if self.spikes >= _SPIKES_IN_A_ROW:
                raise Diverged(
                    f"step {step}: gradient norm {norm:.3g}, {self.spikes} steps in a row far above the usual {usual:.3g}",
                    step - 1 - _SPIKES_IN_A_ROW,
                )
            print(
                f"polydecode: warning: step {step}: gradient norm {norm:.3g}, usual is {usual:.3g}; this update is left out",
                file=sys.stderr,
            )
            return False
        self.spikes = 0
        self.norms.append(norm)
        return True

    def _follow(self, step: int, judged: float) -> None:
        self.steps += 1
        share = max(1 / self.steps, 1 / _LEAST)
        self.mean = judged if self.steps == 1 else (1 - share) * self.mean + share * judged
        if self.steps >= _LEAST:
            self.lowest = min(self.lowest, self.mean)
            if self.mean > 2 * self.lowest + 1:
                raise Diverged(
                    f"step {step}: the loss has risen to {self.mean:.3g} from {self.lowest:.3g}", step - LOOKBACK
                )

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to judge alike."""
        return {
            "norms": list(self.norms),
            "spikes": self.spikes,
            "steps": self.steps,
            "mean": self.mean,
            "lowest": self.lowest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.norms = deque(state["norms"], maxlen=_WINDOW)
        self.spikes, self.steps = state["spikes"], state["steps"]
        self.mean, self.lowest = state["mean"], state["lowest"]
