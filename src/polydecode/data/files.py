"""Records from files."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from polydecode.config import DataConfig
from polydecode.data.encode import encode
from polydecode.data.examples import Example
from polydecode.errors import UserError


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, record) of every non-empty line.

    Raises `UserError` naming file and line for what is no JSON object or no UTF-8, and for a file without records.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no data file {str(path)!r}")
    found = False
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            try:
                record = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not UTF-8 (byte {error.start} of the line)") from None
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}:{number}: a line must be a JSON object, this is a {type(record).__name__}")
            found = True
            yield number, record
    if not found:
        raise UserError(f"data file {str(path)!r} has no records")


def load_examples(paths: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[Example]:
    """All examples of `paths` in order, numbered from 0. Raises `UserError` naming file and line."""
    examples: list[Example] = []
    for path in paths:
        for number, record in read_jsonl(path):
            try:
                example = encode(record, tokenizer, config)
            except UserError as error:
                raise UserError(f"{path}:{number}: {error}") from None
            example.example_id = len(examples)
            examples.append(example)
    return examples
