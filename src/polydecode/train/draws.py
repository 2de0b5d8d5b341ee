"""What a run draws: a mixture's examples of each epoch; a stream's dataloader, and its state beside every checkpoint."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback

from polydecode.data import ExampleStream, Mixture
from polydecode.errors import UserError
from polydecode.train.distributed import of_the_last

STREAM_FILE = "stream.json"
ENDLESS = 10**9
"""Steps of a run that tokens or minutes bound."""


class EpochDraws(TrainerCallback):
    """Tells a mixture which epoch begins: accelerate does not, when it skips the first batches of a resumed epoch."""

    def __init__(self, mixture: Mixture):
        self.mixture = mixture

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.mixture.set_epoch(int((state.epoch or 0) + 1e-6))


class StreamState(TrainerCallback):
    """Writes where the stream stands beside each checkpoint; `per_step` is the examples of a step on all ranks.

    Rows that a stream has packed hold any number of examples; there `read` (window, number) is the place of the last row of this
    rank's last batch, and the place of the last rank's counts.
    """

    def __init__(self, stream: ExampleStream, per_step: int):
        self.stream, self.per_step = stream, per_step
        self.drawn = 0
        self.read = (0, -1)

    def on_train_begin(self, args, state, control, **kwargs):
        self.drawn = self.stream.drawn

    def on_step_end(self, args, state, control, **kwargs):
        self.drawn += self.per_step

    def on_save(self, args, state, control, **kwargs):
        place = {"drawn": self.drawn}
        if self.stream.config.packing:
            window, number = of_the_last(self.read, args.device)
            place = {"drawn": int(window), "rows": int(number) + 1}
        if state.is_world_process_zero:
            file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STREAM_FILE
            aside = file.with_suffix(".part")
            aside.write_text(json.dumps(self.stream.state_dict(**place)))
            os.replace(aside, file)


def restore_stream(training: Any, checkpoint: Path) -> None:
    """Go on where the checkpoint's stream stood; `UserError` if it has none, is of other data, or nothing streams now."""
    file = checkpoint / STREAM_FILE
    if not isinstance(training, ExampleStream):
        if file.exists():
            raise UserError(f"checkpoint {str(checkpoint)!r} is of a streamed run; give --streaming to resume it")
        return
    if not file.is_file():
        raise UserError(
            f"checkpoint {str(checkpoint)!r} has no {STREAM_FILE}: it is of a run without --streaming, or not whole"
        )
    training.load_state_dict(json.loads(file.read_text()))


def stream_loader(stream: ExampleStream, collator: Any, batch_size: int, pin_memory: bool) -> DataLoader:
    """Batches of this rank's share of the stream, collated by `data_workers` processes (0: this one)."""
    return _StreamLoader(
        stream,
        batch_size=batch_size,
        collate_fn=collator,
        num_workers=stream.config.data_workers,
        worker_init_fn=_leave_interrupts_to_the_trainer,
        pin_memory=pin_memory,
    )


class _StreamLoader(DataLoader):
    """A dataloader that keeps a worker's `UserError` in one line instead of a traceback in its text."""

    def __iter__(self) -> Any:
        try:
            yield from super().__iter__()
        except UserError as error:
            told = str(error).strip().splitlines()[-1]
            raise UserError(told.removeprefix(f"{UserError.__module__}.{UserError.__name__}: ")) from None


def _leave_interrupts_to_the_trainer(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
