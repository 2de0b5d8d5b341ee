"""`polydecode convert SOURCE OUT --method NAME [its settings]`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jsonargparse import Namespace

from polydecode.cli.method_flags import add_settings
from polydecode.cli.output import Result
from polydecode.cli.parser import Parser, flag, options_of, peek
from polydecode.methods import get_method, method_names


@dataclass
class ConvertOptions:
    """What to convert, and where to.

    Attributes:
        source: hub id, local Hugging Face folder, .gguf file, polydecode checkpoint, or smollm2-135m.
        out: folder to write; must be new or empty unless --overwrite.
        method: decoding method; see `polydecode methods`.
        overwrite: replace what is in OUT.
    """

    source: str
    out: str
    method: str
    overwrite: bool = False


def make_parser(argv: Sequence[str]) -> Parser:
    method = peek(argv, "method", "convert")
    command = "convert" if method is None else f"convert --method {method}"
    summary = "Turn a pretrained model into one that decodes several tokens per forward, after a self-check."
    parser = Parser(command, summary, positionals=("source", "out"))
    parser.add_options(ConvertOptions)
    for name in method_names() if method is None else [method]:
        add_settings(parser, name)
    return parser


def run(values: Namespace) -> Result:
    from polydecode.auto import read_config, resolve_source
    from polydecode.convert import convert_to_folder, tokenizer_or_none

    options = options_of(ConvertOptions, values)
    config_class, _ = get_method(options.method)
    settings = {name: values[name] for name in config_class.SETTINGS}
    folder = convert_to_folder(options.source, options.out, options.method, settings, overwrite=options.overwrite)
    config = read_config(resolve_source(folder))
    written = config.settings()
    told = ", ".join(f"{flag(name)} {value}" for name, value in written.items() if value is not None)
    text = f"wrote {folder} ({options.method}{': ' + told if told else ''})"
    rows = read_config(resolve_source(options.source)).vocab_size
    token_ids = {name: value for name, value in written.items() if name.endswith("token_id") and value is not None}
    tokenizer = tokenizer_or_none(folder) if token_ids else None
    kinds = {name: _kind_of_row(token_id, rows, tokenizer) for name, token_id in token_ids.items()}
    text += "".join(f"\n{flag(name)} {written[name]} is {kind}" for name, kind in kinds.items())
    report = {
        "checkpoint": str(folder),
        "method": options.method,
        "settings": written,
        "token_rows": kinds,
        "added_rows": config.vocab_size - rows,
    }
    return Result(text, report)


def _kind_of_row(token_id: int, rows: int, tokenizer: Any) -> str:
    """What the vocabulary's row `token_id` was in a source of that many `rows`."""
    if token_id >= rows:
        return "a new row of the vocabulary"
    if tokenizer is None:
        return "a row of the vocabulary"
    tokens = [token for token, number in tokenizer.get_vocab().items() if number == token_id]
    return f"the tokenizer's {tokens[0]!r}" if tokens else "a row that the tokenizer leaves free"
