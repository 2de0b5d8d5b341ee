"""`polydecode demo`: a real model converted, trained, measured and compared, in one command."""

from collections.abc import Sequence

from jsonargparse import Namespace

from polydecode.cli.output import Result
from polydecode.cli.parser import Parser, options_of
from polydecode.demo.settings import DemoConfig


def make_parser(argv: Sequence[str]) -> Parser:
    summary = (
        "Convert, train and measure SmolLM2-135M: an autoregressive control and DMTD on the same data, in one table."
    )
    parser = Parser("demo", summary)
    parser.add_options(DemoConfig)
    return parser


def run(values: Namespace) -> Result:
    options = options_of(DemoConfig, values)
    from polydecode.demo.run import run as run_demo

    result = run_demo(options)
    return Result("", result)
