"""Write a folder whole or not at all, and tell a failed file operation in one line."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polydecode.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PARTIAL = ".partial-"


def first_line(error: BaseException) -> str:
    """The first line with text of an error's message, or the error's name when it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def told(action: str) -> Iterator[None]:
    """Turn whatever a library raises inside into a `UserError` of one line: "cannot `action`: ..."."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"cannot {action}: {first_line(error)}") from error


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means that the disk is full or a file may not grow; libraries tell it only in words."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    return any(words in str(error) for words in _DISK_FULL)


_DISK_FULL = (
    "No space left on device",
    "os error 28",  # safetensors, tokenizers
    "os error 27",
    "PytorchStreamWriter failed writing",  # torch.save
    "unexpected pos",
)


def check_free(out: str | os.PathLike, overwrite: bool = False) -> Path:
    """`out` as a path that may be written: it does not exist, or is an empty folder, or `overwrite` and is a folder.

    Raises `UserError` otherwise.
    """
    path = Path(out).expanduser()
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(f"{str(out)!r} is not a folder; give a folder that does not exist yet")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise UserError(f"folder {str(out)!r} is not empty; give a folder that does not exist yet, or empty it")
    return path


@contextmanager
def whole_folder(out: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling of `out` to write into; it takes the name `out` when the block ends well.

    If the block fails in whatever way (an error, a full disk, Ctrl-C), the sibling is removed and `out` is as it was.
    Raises `UserError` when `out` is taken (see `check_free`) or the file system refuses.
    """
    path = check_free(out, overwrite)
    made = _make_parents(path)
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}{PARTIAL}", dir=path.parent))
    except OSError as error:
        raise UserError(f"cannot write to {str(path.parent)!r}: {error.strerror or first_line(error)}") from error
    done = False
    try:
        yield temporary
        _usual_modes(temporary)
        _take_name(temporary, path, overwrite)
        done = True
    except Exception as error:
        if is_disk_full(error):
            raise UserError(f"disk full while writing {str(out)!r}; nothing was kept") from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"cannot write {str(out)!r}: {error.strerror}") from error
        raise
    finally:
        if not done:
            shutil.rmtree(temporary, ignore_errors=True)
            _remove_empty(made)


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Save a tokenizer without the notes that transformers keeps of how it was loaded, which change with every save."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only", "name_or_path", "_commit_hash"):
        content.pop(name, None)
    write_json(file, content)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON object with sorted names."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _make_parents(path: Path) -> list[Path]:
    """Create the missing parents of `path`; which ones, deepest first."""
    missing = [parent for parent in path.absolute().parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_empty(missing)
        raise UserError(f"cannot make folder {str(path.parent)!r}: {error.strerror or first_line(error)}") from error
    return missing


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _take_name(temporary: Path, path: Path, overwrite: bool) -> None:
    """Give the finished folder its name, moving an old one out of the way first."""
    if path.is_dir() and any(path.iterdir()):
        check_free(path, overwrite)
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}{PARTIAL}", dir=path.parent))
        os.rename(path, old / "old")
        os.rename(temporary, path)
        shutil.rmtree(old, ignore_errors=True)
        return
    if path.is_dir():
        path.rmdir()
    os.rename(temporary, path)


def _usual_modes(folder: Path) -> None:
    """Give the folder and its files the modes that new ones have: mkdtemp and safetensors shut out other users."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
