"""The demo's settings; imports nothing heavy, so that `--help` is quick."""

from dataclasses import dataclass


@dataclass
class DemoConfig:
    """Convert, train and measure SmolLM2-135M with both the autoregressive control and DMTD, and print one table.

    Attributes:
        out: folder for the trained checkpoints, the data, the table and the picture.
        budget: minutes of live training in all; the control's share decides how many tokens both get.
        adapters: folder with the trained adapters `control` and `dmtd` to start from.
        from_scratch: start from the pretrained model instead of the adapters.
        eval_items: held-out items to answer.
        new_tokens: tokens per timed run.
        repeats: timed runs per way of decoding.
    """

    out: str = "demo_out"
    budget: float = 5.0
    adapters: str = "demo/adapters"
    from_scratch: bool = False
    eval_items: int = 150
    new_tokens: int = 96
    repeats: int = 3
