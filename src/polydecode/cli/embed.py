"""`polydecode embed CHECKPOINT [--input FILE] [--output FILE]`: a vector for each text."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from polydecode.cli.device import DecodingOptions, open_model
from polydecode.cli.output import Result, log
from polydecode.cli.parser import Parser, options_of
from polydecode.errors import UserError

INPUT_ENDINGS = (".jsonl", ".txt")
OUTPUT_ENDINGS = (".npy", ".jsonl")
PROGRESS_S = 5.0
"""Seconds between two lines of progress."""


@dataclass
class EmbedOptions(DecodingOptions):
    """What to embed, and where to put the vectors.

    Attributes:
        checkpoint: a polydecode checkpoint, or any source; an AR model reads causally, block diffusion on both sides.
        input: jsonl with one record per text, or .txt with one text per line; - is text lines from stdin.
        output: .npy (a float32 matrix) or .jsonl (one record per text); without it, jsonl on stdout.
        field: name of the text in a jsonl record.
        batch_size: texts read at once.
        max_length: tokens read of a text at most; 0 means the model's context.
        normalize: scale every vector to length 1.
    """

    checkpoint: str
    input: str = "-"
    output: str = ""
    field: str = "text"
    batch_size: int = 16
    max_length: int = 0
    normalize: bool = False


def make_parser(argv: Sequence[str]) -> Parser:
    summary = "Embed texts: the mean of the last hidden states, with the attention of the checkpoint's method."
    parser = Parser("embed", summary, positionals=("checkpoint",))
    parser.add_options(EmbedOptions)
    return parser


def run(values: Namespace) -> Result:
    options = options_of(EmbedOptions, values)
    _check(options)
    records = _records(options)
    from polydecode.auto import load_tokenizer
    from polydecode.embed import embed_texts

    model, tokenizer = open_model(options.checkpoint, options), load_tokenizer(options.checkpoint)
    started = time.monotonic()
    out = embed_texts(
        model,
        tokenizer,
        [record["text"] for record in records],
        options.batch_size,
        options.max_length,
        options.normalize,
        progress=_progress(len(records)),
    )
    seconds = time.monotonic() - started
    if out.num_truncated:
        log(f"{out.num_truncated} of {len(records)} texts were cut at {max(out.num_tokens)} tokens")
    summary: dict[str, Any] = {
        "texts": len(records),
        "width": out.embeddings.shape[1],
        "tokens": sum(out.num_tokens),
        "truncated": out.num_truncated,
        "seconds": round(seconds, 2),
        "method": model.config.method,
    }
    told = f"{len(records)} vectors of {out.embeddings.shape[1]}, {seconds:.1f} s"
    if not options.output:
        log(told)
        return Result("\n".join(_lines(records, out.embeddings)), summary | {"embeddings": out.embeddings.tolist()})
    _write(Path(options.output), records, out.embeddings)
    return Result(f"wrote {options.output}: {told}", summary | {"output": options.output})


def _check(options: EmbedOptions) -> None:
    """Refuse files that cannot be read or written, before anything is computed."""
    source, target = Path(options.input), Path(options.output)
    if options.input != "-" and source.suffix not in INPUT_ENDINGS:
        raise UserError(f"input is {options.input!r}; it must end in {' or '.join(INPUT_ENDINGS)}, or be - for stdin")
    if options.field != "text" and source.suffix != ".jsonl":
        log(f"note: --field has no effect on lines of text from {_place(options.input)}")
    if not options.output:
        return
    if target.suffix not in OUTPUT_ENDINGS:
        raise UserError(f"output is {options.output!r}; it must end in {' or '.join(OUTPUT_ENDINGS)}")
    if os.path.isdir(target):
        raise UserError(f"output {options.output!r} is a folder; give the name of a file")
    if not os.path.isdir(target.parent):
        raise UserError(f"no folder {str(target.parent)!r}")
    if os.path.exists(target) and os.path.exists(source) and target.samefile(source):
        raise UserError(f"output {options.output!r} is the input; the vectors would replace the texts")


def _progress(total: int) -> Callable[[int], None]:
    """Tells how many of `total` texts are done, every few seconds."""
    told = time.monotonic()

    def progress(done: int) -> None:
        nonlocal told
        if time.monotonic() - told >= PROGRESS_S:
            told = time.monotonic()
            log(f"{done} of {total} texts")

    return progress


def _records(options: EmbedOptions) -> list[dict[str, Any]]:
    """The texts as records with `text`, and `id` where there is one."""
    from polydecode.data import read_jsonl
    from polydecode.embed import text_fault

    records = []
    if Path(options.input).suffix == ".jsonl":
        for number, record in read_jsonl(options.input):
            text = record.get(options.field)
            fault = text_fault(text) if isinstance(text, str) else "must be a non-empty string"
            if fault:
                raise UserError(f"{options.input}:{number}: {options.field} {fault}")
            records.append({"text": text} | ({"id": record["id"]} if "id" in record else {}))
        return records
    for number, line in enumerate(_text_lines(options.input), 1):
        if text_fault(line):
            raise UserError(f"{_place(options.input)}:{number}: the line {text_fault(line)}")
        records.append({"text": line})
    if not records:
        raise UserError(f"there are no texts in {_place(options.input)}")
    return records


def _text_lines(path: str) -> list[str]:
    """The lines of a UTF-8 file or of stdin. Only a newline ends one: str.splitlines would cut at U+2028 and its like too."""
    if path == "-" and sys.stdin.isatty():
        log("reading texts from the terminal, one per line; end them with Ctrl-D")
    try:
        text = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"cannot read {_place(path)}: {told}") from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _place(path: str) -> str:
    return "stdin" if path == "-" else path


def _lines(records: list[dict[str, Any]], embeddings: Any) -> list[str]:
    rows = zip(records, embeddings.tolist(), strict=True)
    return [json.dumps(({"id": r["id"]} if "id" in r else {}) | {"embedding": row}) for r, row in rows]


def _write(path: Path, records: list[dict[str, Any]], embeddings: Any) -> None:
    """The file, whole or not at all; `UserError` where it cannot be written, and what was there before stays."""
    part = path.with_name(f".embed-{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            if path.suffix == ".npy":
                from numpy.lib import format as npy

                matrix = embeddings.numpy()
                npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(matrix))
                file.write(matrix.data)  # numpy.save would not tell why a write failed
            else:
                file.writelines(f"{line}\n".encode() for line in _lines(records, embeddings))
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
