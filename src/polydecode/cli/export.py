"""`polydecode export CHECKPOINT --base OUT`."""

from collections.abc import Sequence
from dataclasses import dataclass

from jsonargparse import Namespace

from polydecode.cli.output import Result
from polydecode.cli.parser import Parser, options_of


@dataclass
class ExportOptions:
    """What to write back, and where to.

    Attributes:
        checkpoint: a polydecode checkpoint.
        base: folder to write the plain model to, for vLLM, llama.cpp, PEFT and others; must be new or empty.
    """

    checkpoint: str
    base: str


def make_parser(argv: Sequence[str]) -> Parser:
    summary = "Write the weights back as a plain checkpoint of the source architecture."
    parser = Parser("export", summary, positionals=("checkpoint",))
    parser.add_options(ExportOptions)
    return parser


def run(values: Namespace) -> Result:
    from polydecode.convert import export_base

    options = options_of(ExportOptions, values)
    export_base(options.checkpoint, options.base)
    return Result(f"wrote {options.base}", {"base": options.base})
