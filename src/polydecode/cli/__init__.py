"""The command line: the first word picks a command, and only that command's file and its imports are loaded.

A command is a file here with `make_parser(argv)` and `run(values) -> Result`. Results go to stdout, progress to stderr. A
fault of the input is one line on stderr and exit code 2; an interrupt is exit code 130.
"""

import errno
import os
import sys
import time
from importlib import import_module

from polydecode.errors import UserError, unknown_name

COMMANDS = {
    "demo": "see a real model converted, trained and measured, in one command",
    "convert": "turn a pretrained model into one that decodes several tokens per forward",
    "doctor": "examine a source, data and settings before training, and say what to mend",
    "data": "show what training would see of your data",
    "distill": "let a source model answer prompts, as training data in its own words",
    "train": "train a converted checkpoint on your data",
    "generate": "generate text from a prompt, streaming to the terminal",
    "benchmark": "time a checkpoint against its own one-token-per-forward decoding",
    "embed": "turn texts into vectors",
    "inspect": "show what a model is made of and what each split would cost",
    "methods": "list the decoding methods and their settings",
    "export": "write a checkpoint back as a plain model of its source architecture",
}
_STORAGE_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (a failed examination, or a bug), 2 (bad input), 130 (interrupted)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(str(error))
    except SystemExit as stop:  # argparse after --help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print("\npolydecode: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            raise
        return _fail(f"{error.strerror}: {error.filename}" if error.filename else str(error))


def help_text() -> str:
    """The text of `polydecode --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: polydecode [--verbose] COMMAND ...",
            "",
            "Several tokens per forward pass from a pretrained language model.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  --verbose  show the warnings and progress bars of the libraries underneath",
            "  --version  show the version and exit",
            "  --help     show this message and exit",
            "",
            "`polydecode COMMAND --help` explains a command.",
        ]
    )


def _dispatch(words: list[str]) -> int:
    verbose = "--verbose" in words[:1]
    words = words[1:] if verbose else words
    if not words:
        print(help_text(), file=sys.stderr)
        return 2
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if name == "--version":
        from polydecode import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    return _run(name, rest, verbose)


def _run(name: str, argv: list[str], verbose: bool) -> int:
    from polydecode.cli.output import emit, quiet

    with quiet(verbose or "--verbose" in argv):
        command = import_module(f"polydecode.cli.{name}")
        values = command.make_parser(argv).read(argv)
        result = command.run(values)
        emit(result, values["json"])
    return result.code


def _fail(message: str) -> int:
    if (
        os.environ.get("RANK", "0") != "0"
    ):  # the first process mostly says the same, and its launcher then ends this one
        time.sleep(10)
    print(f"polydecode: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
