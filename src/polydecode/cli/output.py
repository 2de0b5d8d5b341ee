"""What a command prints: text for people, or one JSON object; and silence for the libraries underneath."""

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from polydecode.errors import UserNotice

_NUMERIC = re.compile(r"-|-?\d[\d.,:-]*")


@dataclass
class Result:
    """A command's result: `text` to read and the same as `data`; empty text when it has been streamed already. `code`: the exit
    code, 0 unless the command's answer is a no."""

    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    code: int = 0


def emit(result: Result, as_json: bool) -> None:
    """Print `result` to stdout, as one line of JSON or as text; of several processes (torchrun) only the first does."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(result.data, ensure_ascii=False))
    elif result.text:
        print(result.text)


def log(message: str) -> None:
    """One line of progress to stderr."""
    print(message, file=sys.stderr, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns: text to the left, numbers to the right; readable when piped.

    >>> print(table(["name", "n"], [["a", 1], ["bcd", 22]]))
    name   n
    a      1
    bcd   22
    """
    cells = [[str(c) for c in columns], *[[_cell(v) for v in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    right = [bool(rows) and all(_NUMERIC.fullmatch(row[i]) for row in cells[1:]) for i in range(len(columns))]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)) for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


@contextmanager
def quiet(verbose: bool) -> Iterator[None]:
    """Silence Python warnings and the logs and bars of transformers and its hub client, unless `verbose`."""
    if verbose:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars that are not the library's own, such as that of GGUF files
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    if "transformers" in sys.modules:  # imported before, so the variables come too late
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if os.environ.get("RANK", "0") == "0":
            warnings.simplefilter("default", UserNotice)
        warnings.showwarning = lambda message, *_: log(f"polydecode: note: {message}")
        yield
