"""Rows of data files: jsonl, json, csv, tsv, txt (each also with .gz) and parquet.

A row has its line or row from 1, its columns, and the position at which reading goes on after it.
Reading starts at any such position, by seeking where the format allows it. Every fault of a file is one `UserError` that
names the file and the line or row. Nothing but one row (one file for txt and for a json list, one row group's batch for
parquet) is held in memory.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from polydecode.errors import UserError

MAX_ROW_BYTES = 64 * 2**20
"""Longest line, csv row or txt file that is read; a longer one is a damaged file more often than a document."""
MAX_LIST_BYTES = 2**30
"""Longest .json file that is one list: it is parsed whole, so a larger one belongs into a .jsonl file."""

Position = tuple[int, int]
"""(where to seek: bytes, list items or parquet rows; lines or rows before it)."""
START: Position = (0, 0)


class Row(NamedTuple):
    """One record of a file, its line or row from 1, where reading goes on after it, and its item if a line may hold several."""

    number: int
    record: dict[str, Any]
    after: Position
    item: int | None = None

    @property
    def own_number(self) -> int:
        """A number that no other record of the file has."""
        return self.number if self.item is None else self.item


def kind_of(path: str | Path) -> str | None:
    """The format by the name's ending ("jsonl", "json", "csv", "tsv", "parquet", "txt"), None for an unknown one."""
    suffixes = [s.lower() for s in Path(path).suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
        return None if suffixes[-1:] == [".parquet"] else KINDS.get(suffixes[-1]) if suffixes else None
    return KINDS.get(suffixes[-1]) if suffixes else None


def read_rows(path: str | Path, start: Position = START) -> Iterator[Row]:
    """The rows of a data file from `start` on, the format told by its name."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no data file {str(path)!r}")
    kind = kind_of(path)
    if kind is None:
        raise UserError(f"data file {str(path)!r} is of no known kind ({', '.join(KINDS)}, or one of them with .gz)")
    if kind == "json":
        return _json_list(path, start) if _begins_list(path) else _json_lines(path, start)
    return _READERS[kind](path, start)


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, record) of every non-empty line.

    Raises `UserError` naming file and line for what is no JSON object or no UTF-8, and for a file without records.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no data file {str(path)!r}")
    found = False
    for row in _json_lines(path, START):
        found = True
        yield row.number, row.record
    if not found:
        raise UserError(no_records(path))


def no_records(path: str | Path) -> str:
    """What is said of a data file without rows."""
    return f"data file {str(path)!r} has no records"


def open_binary(path: Path) -> BinaryIO:
    """The file's bytes, unpacked if its name ends in .gz."""
    try:
        return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _lines(file: BinaryIO, path: Path, start: Position) -> Iterator[tuple[int, int, bytes]]:
    """(line number, offset after it, bytes) of each line; lines end at newline bytes only, never at U+2028."""
    offset, number = start
    try:
        file.seek(offset)
        while raw := file.readline(MAX_ROW_BYTES + 1):
            number, offset = number + 1, offset + len(raw)
            if len(raw) > MAX_ROW_BYTES:
                raise UserError(f"{path}:{number}: the line is longer than {MAX_ROW_BYTES} bytes")
            yield number, offset, raw
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}:{number + 1}: cannot be read: {error}") from None


def _decoded(raw: bytes, place: str, first: bool) -> str:
    try:
        return raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 (byte {error.start} of the line)") from None


def _parsed(parse: Callable[[], Any], place: str, hint: str = "", whole: Path | None = None) -> dict[str, Any]:
    """The JSON object that `parse` gives; `UserError` at `place` for anything else.

    `whole`: the file, when its whole text was parsed, so that the error knows the line.
    """
    try:
        record = parse()
    except json.JSONDecodeError as error:
        place = place if whole is None else f"{whole}:{error.lineno}"
        raise UserError(f"{place}: not valid JSON: {error.msg} at column {error.colno}{hint}") from None
    except RecursionError:
        raise UserError(f"{place}: not readable JSON: nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{place}: not readable JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(record, dict):
        what = "a line" if whole is None else "an item"
        raise UserError(f"{place}: {what} must be a JSON object, this is a {type(record).__name__}")
    return record


def _check_surrogates(record: dict[str, Any], place: str) -> None:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: half of a surrogate pair (\\ud800 to \\udfff) is no text") from None


_JSON_HINT = " (a .json file is one list of objects, or one object per line)"


def _json_lines(path: Path, start: Position) -> Iterator[Row]:
    hint = _JSON_HINT if kind_of(path) == "json" else ""
    with open_binary(path) as file:
        for number, offset, raw in _lines(file, path, start):
            text = _decoded(raw, f"{path}:{number}", first=number == 1)
            if not text.strip():
                continue
            record = _parsed(lambda text=text: json.loads(text), f"{path}:{number}", hint)  # type: ignore[misc]
            if b"\\ud" in raw or b"\\uD" in raw:
                _check_surrogates(record, f"{path}:{number}")
            yield Row(number, record, (offset, number))


def _begins_list(path: Path) -> bool:
    with open_binary(path) as file:
        try:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path}: cannot be read: {error}") from None


def _json_list(path: Path, start: Position) -> Iterator[Row]:
    """The items of one list; a row's number is the line on which the item begins, its position counts items."""
    text = _whole_text(path, MAX_LIST_BYTES, "write it as .jsonl, one object per line")
    decoder, at = json.JSONDecoder(), text.index("[") + 1
    items, line, counted = 0, 1, 0

    def skip(i: int) -> int:
        while i < len(text) and text[i] in " \t\r\n":
            i += 1
        return i

    while True:
        at = skip(at)
        line, counted = line + text.count("\n", counted, at), at
        place = f"{path}:{line}"
        if text[at : at + 1] == "]" and (items == 0 or text[_last_mark(text, at)] != ","):
            break
        end = at

        def parse(at: int = at) -> Any:
            nonlocal end
            record, end = decoder.raw_decode(text, at)
            return record

        record = _parsed(parse, place, _JSON_HINT, path)
        if "\\ud" in text[at:end].lower():
            _check_surrogates(record, place)
        items += 1
        if items > start[0]:
            yield Row(line, record, (items, line), items)
        at = skip(end)
        if text[at : at + 1] not in (",", "]"):
            line += text.count("\n", counted, at)
            what = "the list is not closed" if at >= len(text) else "a comma or ] is missing after the item"
            raise UserError(f"{path}:{line}: not valid JSON: {what}")
        at += text[at] == ","
    if text[at + 1 :].strip():
        raise UserError(f"{path}:{line}: not valid JSON: more text after the end of the list")


def _last_mark(text: str, at: int) -> int:
    """Where the last character before `at` that is no white space stands."""
    at -= 1
    while text[at] in " \t\r\n":
        at -= 1
    return at


def _whole_text(path: Path, limit: int, advice: str) -> str:
    with open_binary(path) as file:
        try:
            raw = file.read(limit + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path}: cannot be read: {error}") from None
    if len(raw) > limit:
        raise UserError(f"{path}: longer than {limit} bytes; {advice}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 (byte {error.start} of the file)") from None


def _txt(path: Path, start: Position) -> Iterator[Row]:
    """The whole file as one document."""
    if start != START:
        return
    text = _whole_text(path, MAX_ROW_BYTES, "a .txt file is one document; cut it into several, or write .jsonl")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"{path}:{line}: a NUL byte, so this is no text")
    if text.strip():
        yield Row(1, {"text": text.replace("\r\n", "\n")}, (1, 1))


def _csv(path: Path, start: Position) -> Iterator[Row]:
    """Rows of a csv or tsv file with a header line; quotes as in RFC 4180, a row's number is the line it begins on."""
    with open_binary(path) as file:
        lines = _CsvLines(_lines(file, path, START), path)
        header = next(lines.rows(), [])
        _check_header(header, path)
        if start != START:
            lines = _CsvLines(_lines(file, path, start), path)
            lines.at = start
        for row in lines.rows():
            if not row:
                continue
            if len(row) != len(header):
                raise UserError(f"{path}:{lines.began}: {len(row)} fields, the header has {len(header)}")
            yield Row(lines.began, dict(zip(header, row, strict=True)), lines.at)


def _check_header(header: list[str], path: Path) -> None:
    for name in header:
        if not name.strip() or header.count(name) > 1:
            raise UserError(f"{path}:1: the header names a column {name!r} {'twice' if name.strip() else '(no name)'}")


class _CsvLines:
    """Text lines for the csv module, which takes as many as a row needs; tells where the last row began and ended."""

    def __init__(self, lines: Iterator[tuple[int, int, bytes]], path: Path):
        self.lines, self.path = lines, path
        self.at: Position = START
        self.began = 1
        self.taken = 0

    def __iter__(self) -> Iterator[str]:
        for number, offset, raw in self.lines:
            text = _decoded(raw, f"{self.path}:{number}", first=number == 1)
            if "\0" in text:
                raise UserError(f"{self.path}:{number}: a NUL byte, so this is no text")
            self.at, self.taken = (offset, number), self.taken + len(raw)
            if self.taken > MAX_ROW_BYTES:
                raise UserError(
                    f"{self.path}:{self.began}: the row is longer than {MAX_ROW_BYTES} bytes; an open quote?"
                )
            yield text

    def rows(self) -> Iterator[list[str]]:
        csv.field_size_limit(2 * MAX_ROW_BYTES)
        tab = kind_of(self.path) == "tsv"
        rows = csv.reader(self, delimiter="\t" if tab else ",", strict=True)
        while True:
            self.began, self.taken = self.at[1] + 1, 0
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                what = "a quote is never closed" if "end of data" in str(error) else str(error)
                raise UserError(f"{self.path}:{self.began}: not valid csv: {what}") from None
            yield row


def _parquet(path: Path, start: Position) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = start[0]
    try:
        with pq.ParquetFile(path) as table:
            before = 0
            for group in range(table.num_row_groups):
                size = table.metadata.row_group(group).num_rows
                if before + size > start[0]:
                    skip = max(start[0] - before, 0)
                    for batch in table.iter_batches(batch_size=256, row_groups=[group]):
                        rows, skip = batch.slice(skip), max(skip - batch.num_rows, 0)
                        for record in rows.to_pylist():
                            number += 1
                            yield Row(number, record, (number, number))
                before += size
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        told = " ".join(str(error).split())[:200]
        raise UserError(f"{path}:{number + 1}: not a readable parquet file: {told}") from None


KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "txt",
}
"""Endings of data files and their formats."""

_READERS: dict[str, Callable[[Path, Position], Iterator[Row]]] = {
    "jsonl": _json_lines,
    "csv": _csv,
    "tsv": _csv,
    "parquet": _parquet,
    "txt": _txt,
}
