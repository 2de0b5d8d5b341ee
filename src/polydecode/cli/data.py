"""`polydecode data CHECKPOINT --data FILE [...]`: what a training run would see of the data."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from polydecode.cli.output import Result, table
from polydecode.cli.parser import Parser, options_of
from polydecode.config import DataConfig
from polydecode.errors import UserError

if TYPE_CHECKING:
    from polydecode.data.report import DataReport

BAR = 40
UNBOUNDED = 1 << 40


@dataclass
class DataOptions(DataConfig):
    """What training would see of the data.

    Attributes:
        checkpoint: a converted checkpoint, or any source; its tokenizer and chat template are used.
        batch_size: rows per batch, for the share of padding.
        seed: seed of the order.
        samples: how many documents to show, with what is trained of them.
        sample_tokens: show at most this many tokens of each.
    """

    checkpoint: str = ""
    batch_size: int = 16
    seed: int = 42
    samples: int = 2
    sample_tokens: int = 400

    def check(self) -> None:
        super().check()
        for name, least in (("batch_size", 1), ("samples", 0), ("sample_tokens", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it must be {least} or more")


def make_parser(argv: Sequence[str]) -> Parser:
    summary = "Show what a training run would see of the data: counts, lengths, padding, and what is trained."
    parser = Parser("data", summary, positionals=("checkpoint",))
    parser.add_options(DataOptions, skip=SKIPPED)
    return parser


SKIPPED = ("eval_data", "eval_fraction", "max_eval_examples", "packing", "streaming", "shuffle_buffer", "data_weights")
"""Settings of the held-out part and of the order, and of what both ways are shown."""


def run(values: Namespace) -> Result:
    options = options_of(DataOptions, values, skip=SKIPPED)
    options.check()
    from dataclasses import replace

    from polydecode.auto import load_tokenizer
    from polydecode.data import load_examples, record_thinking
    from polydecode.data.report import data_report

    tokenizer = load_tokenizer(options.checkpoint)
    record_thinking(tokenizer, options.enable_thinking)
    examples = load_examples(options.data, tokenizer, replace(options, max_length=UNBOUNDED))[:]
    report = data_report(examples, options.max_length, options.batch_size, options.seed, tokenizer.eos_token_id)
    step = max(len(examples) // max(options.samples, 1), 1)
    samples = [example_text(e, tokenizer, options) for e in examples[::step][: options.samples]]
    text = "\n\n".join([table(["", ""], _facts(report)).lstrip(), _bars(report), *samples])
    data = asdict(report) | {
        "trained_share": report.trained_share,
        "histogram": [{"from": a, "to": b, "documents": n} for a, b, n in report.histogram],
    }
    return Result(text, data)


def _facts(report: "DataReport") -> list[list[str]]:
    share = f"{report.trained_share:.1%}"
    return [
        ["documents", f"{report.documents:,}"],
        ["tokens", f"{report.tokens:,}"],
        ["trained", f"{report.trained_tokens:,} ({share})"],
        ["answers", f"{report.answer_lengths['count']:,}, median {report.answer_lengths['median']:,} tokens, "
                    f"shortest {report.answer_lengths['shortest']:,}"],
        ["length", f"median {report.median_length:,}, longest {report.longest:,}"],
        [f"cut at {report.max_length:,}", f"{report.cut:,} ({report.tokens_kept:,} tokens are kept)"],
        ["refused", f"{report.refused:,} (the prompt alone reaches max_length)"],
        ["padding", f"{report.padding:.1%} in batches of {report.batch_size}"],
        ["padding, packed", f"{report.padding_packed:.1%} ({report.rows_packed:,} rows of at most {report.max_length:,})"],
    ]  # fmt: skip


def _bars(report: "DataReport") -> str:
    most = max(n for *_, n in report.histogram)
    rows = [[f"{a:,} to {b:,}", f"{n:,}", "#" * -(-n * BAR // most)] for a, b, n in report.histogram]
    return table(["tokens", "documents", ""], rows)


def example_text(example: Any, tokenizer: Any, options: DataOptions) -> str:
    """A document as text with its special tokens, what is trained in green on a terminal and in [[ ]] elsewhere."""
    from polydecode.data.report import trained_runs

    runs, left = [], options.sample_tokens
    for ids, trained in trained_runs(example):
        if left <= 0:
            break
        runs.append((tokenizer.decode(ids[:left]), trained))
        left -= len(ids)
    title = f"document {example.example_id}"
    rest = " ..." if left < 0 else ""
    if not sys.stdout.isatty():
        return f"{title}:\n" + "".join(f"[[{text}]]" if trained else text for text, trained in runs) + rest
    from rich.console import Console
    from rich.text import Text

    coloured = Text(f"{title}:\n", style="bold")
    for text, trained in runs:
        coloured.append(text, style="not bold green" if trained else "not bold dim")
    console = Console(force_terminal=True)
    with console.capture() as captured:
        console.print(coloured + Text(rest))
    return captured.get().rstrip("\n")
