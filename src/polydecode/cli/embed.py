"""`polydecode embed CHECKPOINT [--input FILE] [--output FILE]`: a vector for each text."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from polydecode.cli.device import DecodingOptions, open_model
from polydecode.cli.output import Result, log
from polydecode.cli.parser import Parser, options_of
from polydecode.errors import UserError

ENDINGS = (".npy", ".jsonl")


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
    if options.output and Path(options.output).suffix not in ENDINGS:
        raise UserError(f"output is {options.output!r}; it must end in {' or '.join(ENDINGS)}")
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
        progress=lambda done: log(f"{done} of {len(records)} texts") if sys.stderr.isatty() else None,
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
    if not options.output:
        return Result("\n".join(_lines(records, out.embeddings)), summary | {"embeddings": out.embeddings.tolist()})
    _write(Path(options.output), records, out.embeddings)
    text = f"wrote {options.output}: {len(records)} vectors of {out.embeddings.shape[1]}, {seconds:.1f} s"
    return Result(text, summary | {"output": options.output})


def _records(options: EmbedOptions) -> list[dict[str, Any]]:
    """The texts as records with `text`, and `id` where there is one."""
    if options.input != "-" and Path(options.input).suffix == ".jsonl":
        from polydecode.data import read_jsonl

        records = []
        for number, record in read_jsonl(options.input):
            text = record.get(options.field)
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"{options.input}:{number}: {options.field} must be a non-empty string")
            records.append({"text": text} | ({"id": record["id"]} if "id" in record else {}))
        return records
    lines = _text(options.input).splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise UserError(f"{options.input}:{number}: the line is empty")
    if not lines:
        raise UserError(f"there are no texts in {options.input!r}")
    return [{"text": line} for line in lines]


def _text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path!r}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None


def _lines(records: list[dict[str, Any]], embeddings: Any) -> list[str]:
    rows = zip(records, embeddings.tolist(), strict=True)
    return [json.dumps(({"id": r["id"]} if "id" in r else {}) | {"embedding": row}) for r, row in rows]


def _write(path: Path, records: list[dict[str, Any]], embeddings: Any) -> None:
    """The file, whole or not at all."""
    if not path.parent.is_dir():
        raise UserError(f"no folder {str(path.parent)!r}")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            if path.suffix == ".npy":
                import numpy

                numpy.save(file, embeddings.numpy())
            else:
                file.write("".join(line + "\n" for line in _lines(records, embeddings)).encode())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
