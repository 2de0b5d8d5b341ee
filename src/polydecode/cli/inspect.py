"""`polydecode inspect SOURCE_OR_CHECKPOINT`: what a model is made of and what each split would cost."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from polydecode.cli.output import Result, table
from polydecode.cli.parser import Parser

if TYPE_CHECKING:
    from polydecode.inspection import Inspection

BLOCKS = {
    "forwards_per_token": "predicted forwards per token (layers only)",
    "forwards_per_token_with_head": "predicted forwards per token (head counted)",
    "speedup": "predicted speed-up over one token per forward (layers only)",
    "speedup_with_head": "predicted speed-up over one token per forward (head counted)",
}


@dataclass
class InspectOptions:
    """What to inspect.

    Attributes:
        source: hub id, local Hugging Face folder, .gguf file, polydecode checkpoint, or smollm2-135m.
    """

    source: str


def make_parser(argv: Sequence[str]) -> Parser:
    summary = "Show what a model is made of and what each method predicts for it, without loading its weights."
    parser = Parser("inspect", summary, positionals=("source",))
    parser.add_options(InspectOptions)
    return parser


def run(values: Namespace) -> Result:
    from polydecode.inspection import inspect_source

    found = inspect_source(values.source)
    blocks = [table(["", ""], _facts(found)).lstrip()]
    for method, rows in found.costs.items():
        blocks += [f"{method}: {title}\n{_pivot(rows, name)}" for name, title in BLOCKS.items()]
    return Result("\n\n".join(blocks), asdict(found))


def _facts(found: "Inspection") -> list[list[str]]:
    method = found.method or "none (a plain model)"
    settings = ", ".join(f"{name}={value}" for name, value in found.settings.items() if value is not None)
    tied = "tied to the embeddings" if found.head_is_tied else "its own matrix"
    facts = {
        "source": found.source,
        "method": f"{method} ({settings})" if settings else method,
        "architecture": found.architecture,
        "layers": f"{found.num_layers} of width {found.hidden_size}",
        "parameters": f"{found.parameters:,}",
        "per forward": f"{found.layer_parameters:,} in layers, {found.head_parameters:,} in the head ({found.head_share:.1%})",
        "head": tied,
        "context length": str(found.context_length),
        "vocabulary": str(found.vocab_size),
        "chat template": ("yes" if found.chat_template else "no") if found.tokenizer else "no tokenizer",
    }
    if found.pad_is_eos:
        facts["note"] = "pad and eos are one token: padding is told by the attention mask alone"
    return [[name, value] for name, value in facts.items()]


def _pivot(rows: list[dict[str, Any]], name: str) -> str:
    """A line per group of settings, a column per choice of options."""
    columns = list(dict.fromkeys(_words(row["options"]) for row in rows))
    lines: dict[str, dict[str, float]] = {}
    for row in rows:
        lines.setdefault(_words(row["settings"]), {})[_words(row["options"])] = row[name]
    shown = [[label, *(f"{values[c]:.2f}" if c in values else "-" for c in columns)] for label, values in lines.items()]
    names = {c.rsplit("=", 1)[0] for c in columns}
    if len(names) == 1:  # one option: its name once, its values as columns
        return table([f"by {names.pop()}", *(c.rsplit("=", 1)[1] for c in columns)], shown)
    return table(["", *columns], shown)


def _words(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
