"""`polydecode doctor SOURCE [--data FILE] [--method NAME ...]`: what to mend before training."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from jsonargparse import Namespace

from polydecode.cli.method_flags import add_settings
from polydecode.cli.output import Result
from polydecode.cli.parser import Parser, options_of, peek
from polydecode.config import TrainConfig
from polydecode.methods import get_method
from polydecode.methods.batch import Finding

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass
class DoctorOptions:
    """What to examine.

    Attributes:
        source: hub id, local Hugging Face folder, .gguf file, polydecode checkpoint, or smollm2-135m.
        method: the method it shall be converted to, whose settings may follow; a checkpoint has its own.
        no_measure: load no weights and run nothing; look at the config, the tokenizer and the data alone.
    """

    source: str
    method: str = ""
    no_measure: bool = False


def make_parser(argv: Sequence[str]) -> Parser:
    summary = "Examine a source, data and settings before training. Exit code: 0 nothing fails, 1 something does, 2 bad input."
    method = peek(argv, "method", "doctor")
    parser = Parser("doctor" if method is None else f"doctor --method {method}", summary, positionals=("source",))
    parser.add_options(DoctorOptions)
    parser.add_options(TrainConfig, skip=("checkpoint", "out", "resume"))
    if method is not None:
        add_settings(parser, method)
    return parser


def run(values: Namespace) -> Result:
    from polydecode.doctor import examine

    options = options_of(DoctorOptions, values)
    skipped = ("checkpoint", "out", "resume")
    config = TrainConfig(
        checkpoint=options.source,
        **{name: values[name] for name in TrainConfig.__dataclass_fields__ if name not in skipped},
    )
    settings = {name: values[name] for name in get_method(options.method)[0].SETTINGS} if options.method else None
    found = examine(config, options.method or None, settings, measure=not options.no_measure)
    data = {"failed": found.failed, "findings": [asdict(f) for f in found.findings], **found.numbers}
    return Result(_text(found.findings), data, code=1 if found.failed else 0)


def _text(findings: Sequence[Finding]) -> str:
    """A line per finding and one per mend; coloured on a terminal."""
    width = max(len(f.name) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{_coloured(f.level)}  {f.name:{width}}  {f.says}")
        if f.mend:
            lines.append(f"{'':4}  {'':{width}}  mend: {f.mend}")
    return "\n".join(lines)


def _coloured(level: str) -> str:
    if not sys.stdout.isatty():
        return f"{level:4}"
    from rich.console import Console

    console = Console(force_terminal=True)
    with console.capture() as capture:
        console.print(f"{level:4}", style=COLOURS[level], end="")
    return capture.get()
