"""`polydecode data CHECKPOINT --data FILE [...]`: what a training run would see of the data."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from polydecode.cli.output import Result, table
from polydecode.cli.parser import Parser, options_of
from polydecode.config import DataConfig
from polydecode.errors import UserError, UserNotice

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
    from polydecode.data.encode import pieces
    from polydecode.data.report import data_report

    tokenizer = load_tokenizer(options.checkpoint)
    record_thinking(tokenizer, options.enable_thinking)
    examples = load_examples(options.data, tokenizer, replace(options, max_length=UNBOUNDED, long_text="cut"))[:]
    if options.long_text == "split":
        examples = [piece for example in examples for piece in pieces(example, options.max_length)]
    report = data_report(examples, options.max_length, options.batch_size, options.seed, tokenizer.eos_token_id)
    step = max(len(examples) // max(options.samples, 1), 1)
    samples = [example_text(e, tokenizer, options) for e in examples[::step][: options.samples]]
    bars = [_bars(report)] if len(report.histogram) > 1 else []
    text = "\n\n".join([table(["", ""], _facts(report)).lstrip(), *bars, *samples])
    _warn(report)
    data = asdict(report) | {
        "trained_share": report.trained_share,
        "histogram": [{"from": a, "to": b, "documents": n} for a, b, n in report.histogram],
    }
    return Result(text, data)


def _warn(report: "DataReport") -> None:
    """Say on stderr what a reader of the table might pass over."""
    dropped = 1 - report.tokens_kept / max(report.tokens, 1)
    if dropped >= 0.01:
        warnings.warn(
            f"{dropped:.0%} of the tokens are beyond --max-length {report.max_length:,} and are not trained on: raise it, or "
            "give --long-text split where they are text",
            UserNotice,
            stacklevel=2,
        )


def _facts(report: "DataReport") -> list[list[str]]:
    answers, dropped = report.answer_lengths, report.tokens - report.tokens_kept
    rows = f"{report.rows_packed:,} row{'s' if report.rows_packed != 1 else ''} of at most {report.max_length:,}"
    facts = [
        ["documents", f"{report.documents:,}"],
        ["tokens", f"{report.tokens:,}"],
        ["trained", f"{report.trained_tokens:,} ({report.trained_share:.1%})"],
        ["answers", f"{answers['count']:,}, median {answers['median']:,} tokens, shortest {answers['shortest']:,}"],
        ["length", f"median {report.median_length:,}, longest {report.longest:,}"],
        ["padding", f"{report.padding:.1%} of batches of {report.batch_size}"],
        ["padding, packed", f"{report.padding_packed:.1%} of batches of {report.batch_size} ({rows})"],
    ]
    if report.cut:
        facts.append(
            ["cut", f"{report.cut:,} documents at --max-length {report.max_length:,}: {dropped:,} tokens dropped"]
        )
    if report.refused:
        facts.append(
            ["refused", f"{report.refused:,} documents whose prompt alone reaches --max-length {report.max_length:,}"]
        )
    return facts


def _bars(report: "DataReport") -> str:
    most = max(n for *_, n in report.histogram)
    spans = [(f"{a:,} to {b:,}" if a < b else f"{a:,}", n) for a, b, n in report.histogram]
    return table(["tokens", "documents", ""], [[span, f"{n:,}", "#" * -(-n * BAR // most)] for span, n in spans])


def example_text(example: Any, tokenizer: Any, options: DataOptions) -> str:
    """A document as text with its special tokens, what is trained in green on a terminal and in [[ ]] elsewhere."""
    from polydecode.data.report import trained_runs

    runs, left = [], min(options.sample_tokens, options.max_length)
    for ids, trained in trained_runs(example):
        if left <= 0:
            break
        runs.append((tokenizer.decode(ids[:left]), trained))
        left -= len(ids)
    title = f"document {example.example_id}"
    is_cut = left < 0 and options.max_length <= options.sample_tokens
    rest = "" if left >= 0 else f" ... (cut at --max-length {options.max_length})" if is_cut else " ..."
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
