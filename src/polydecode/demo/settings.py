"""The demo's settings; imports nothing heavy, so that `--help` is quick."""

from dataclasses import dataclass


@dataclass
class DemoConfig:
    """Convert, train and measure SmolLM2-135M: the autoregressive control, DMTD and block diffusion, in one table.

    Attributes:
        out: folder for the trained checkpoints, the data, the table and the picture.
        budget: minutes of live training in all; the control's share decides how many tokens each gets.
        adapters: folder with the trained adapters `control`, `dmtd` and `block_diffusion` to start from.
        from_scratch: start from the pretrained model instead of the adapters.
        eval_items: held-out items to answer.
        timed_items: held-out items answered one by one against the clock.
        repeats: timed rounds.
    """

    out: str = "demo_out"
    budget: float = 5.0
    adapters: str = "demo/adapters"
    from_scratch: bool = False
    eval_items: int = 150
    timed_items: int = 12
    repeats: int = 3
