"""`polydecode train CHECKPOINT OUT --data FILE [...]`: its flags are the fields of `TrainConfig`."""

from collections.abc import Sequence

from jsonargparse import Namespace

from polydecode.cli.output import Result
from polydecode.cli.parser import Parser, options_of
from polydecode.config import TrainConfig


def make_parser(argv: Sequence[str]) -> Parser:
    summary = "Train a converted checkpoint on your data. Ctrl-C ends the run early and still writes the checkpoint."
    parser = Parser("train", summary, positionals=("checkpoint", "out"))
    parser.add_options(TrainConfig)
    return parser


def run(values: Namespace) -> Result:
    config = options_of(TrainConfig, values)
    config.check()
    from polydecode.train import train

    metrics = train(config)
    lines = [f"wrote {config.out}", *(f"  {name}: {value}" for name, value in metrics.items())]
    return Result("\n".join(lines), {"checkpoint": config.out, **metrics})
