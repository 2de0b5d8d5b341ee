"""Write docs/cli.md from every command's --help; with `--check`, exit 1 when the file is stale."""

import os
import sys
from importlib import import_module
from pathlib import Path

os.environ["COLUMNS"] = "100"  # the width of the help texts, whatever the terminal

from polydecode.cli import COMMANDS, help_text
from polydecode.cli.output import quiet

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"


def make_page() -> str:
    """The page as text."""
    parts = [
        "# The command line",
        "",
        "Made from `--help` by `python scripts/make_cli_docs.py`; do not edit.",
        "",
        *_block(help_text()),
    ]
    for name, summary in COMMANDS.items():
        command = import_module(f"polydecode.cli.{name}")
        parts += ["", f"## polydecode {name}", "", f"{summary[0].upper()}{summary[1:]}.", ""]
        parts += _block(command.make_parser([]).format_help())
    return "\n".join(parts) + "\n"


def _block(text: str) -> list[str]:
    return ["```text", *(line.rstrip() for line in text.strip().splitlines()), "```"]


def main(arguments: list[str]) -> int:
    with quiet(verbose=False):
        page = make_page()
    if "--check" in arguments:
        fresh = PAGE.is_file() and PAGE.read_text() == page
        print("docs/cli.md is up to date" if fresh else "docs/cli.md is stale: run python scripts/make_cli_docs.py")
        return 0 if fresh else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
