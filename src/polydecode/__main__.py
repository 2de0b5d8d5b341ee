"""`python -m polydecode` and the console script."""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

from polydecode.cli import main


def program() -> NoReturn:
    """Run one command and end the process with its exit code."""
    code = 1  # of an exception
    if os.environ.get("WORLD_SIZE", "1") != "1":
        atexit.register(lambda: _end(code))  # the first to register is the last to run
    code = main()
    sys.exit(code)


def _end(code: int) -> None:
    """End without taking the interpreter apart: torch's gloo threads may hold a tensor of the last exchange, and one that lets go
    of it meanwhile kills a process whose work is done (SIGABRT, after which the launcher ends the others)."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    program()
