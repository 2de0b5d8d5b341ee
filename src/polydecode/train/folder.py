"""The output folder of a run: whether it may be used, that one run at a time uses it, and what a dead run left in it."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polydecode.auto.folders import PARTIAL, first_line, is_disk_full
from polydecode.config import TrainConfig
from polydecode.errors import UserError
from polydecode.train.distributed import is_first_process
from polydecode.train.resume import COMPLETE_FILE, LOG_FILE, RUN_FILE, last_checkpoint

FINISHED = ".finished"
"""Where the result is made, to be moved file by file into the folder around it."""
_LOCK_FILE = ".lock"
_OF_A_RUN = (RUN_FILE, f".{RUN_FILE}", LOG_FILE, "checkpoints", "logs", "samples.jsonl")


def out_folder(config: TrainConfig) -> Path:
    """Where the run writes."""
    return Path(config.out).expanduser()


def check_out(config: TrainConfig) -> None:
    """Raise `UserError` for a place that cannot become a folder, and for one that holds something when not resuming."""
    out = out_folder(config)
    try:
        nearest = next(p for p in (out, *out.absolute().parents) if p.exists() or p.is_symlink())
    except (OSError, ValueError) as error:
        raise UserError(f"output {config.out!r} cannot be a folder: {first_line(error)}") from None
    if not nearest.is_dir():
        raise UserError(f"output {config.out!r} cannot be a folder: {str(nearest)!r} is none")
    if not config.resume and not may_start(out):
        raise UserError(f"output folder {str(out)!r} is not empty; choose another or give --resume")


def may_start(out: Path) -> bool:
    """Whether a new run may use this folder: it is not there, or empty, or of a run that was cut off before it kept anything."""
    if not out.exists():
        return True
    if any(f.name not in (*_OF_A_RUN, _LOCK_FILE) and not _is_unfinished(f) for f in out.iterdir()):
        return False
    return not any((out / "checkpoints").glob(f"*/{COMPLETE_FILE}"))


def _is_unfinished(file: Path) -> bool:
    return file.name == FINISHED or file.name.startswith(f".{FINISHED}{PARTIAL}")


@contextmanager
def alone_in(out: Path, fresh: bool) -> Iterator[None]:
    """Keep other runs out of the folder, and remove what a dead one left half-written, or with `fresh` anything it left. The
    first process does it for all. Raises `UserError` when another run is there or the folder cannot be made."""
    if not is_first_process():
        yield
        return
    lock_file = out / _LOCK_FILE
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = lock_file.open("a")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write to {str(out)!r}: {first_line(error)}") from None
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: a killed run's data workers would hold it on
        except OSError:
            raise UserError(f"another run is training into {str(out)!r}") from None
        if fresh and not may_start(out):
            raise UserError(f"output folder {str(out)!r} is not empty any more; choose another or give --resume")
        for file in out.iterdir():
            if _is_unfinished(file) or (fresh and file.name in _OF_A_RUN):
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        try:
            yield
        finally:
            lock_file.unlink(missing_ok=True)
            if fresh and not any(out.iterdir()):
                out.rmdir()


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Tell a full disk in one line that names the last whole checkpoint."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        try:
            kept = f"the last whole checkpoint is {last_checkpoint(out)}"
        except UserError:
            kept = "no checkpoint is kept"
        raise UserError(f"no room left to write to {str(out)!r}; {kept}") from error
