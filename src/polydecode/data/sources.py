"""What `--data` names: files, folders, globs and hub data sets, as documents that know where they stand.

A source is one `--data` value; its shards are files (sorted by path) or shards of a hub data set. A document is a record
under the names that count (`data.columns`), with its place for errors and a hash of its content.
"""

import difflib
import glob
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from polydecode.config import DataConfig
from polydecode.data.columns import TARGETS, Columns, choose_columns, parse_columns
from polydecode.data.files import KINDS, START, Position, Row, kind_of, no_records, read_rows
from polydecode.data.hub import hub_name, open_hub
from polydecode.errors import UserError

HASHED_WHOLE_BYTES = 16 * 2**20
"""Files up to this size are told apart by their content; longer ones by size, time of change and both ends."""
_END_BYTES = 2**20


class Shard(Protocol):
    """A part of a source that is read in one piece."""

    name: str

    def rows(self, start: Position = START) -> Iterator[Row]:
        """The rows from `start` on."""
        ...

    def fingerprint(self) -> str:
        """What tells this data from other data, by its content where that is not too long to read."""
        ...

    def identity(self) -> str:
        """What tells this data from other data at a glance: name and size."""
        ...


class FileShard:
    """One data file."""

    def __init__(self, path: Path):
        self.path, self.name = path, str(path)

    def rows(self, start: Position = START) -> Iterator[Row]:
        """The rows from `start` on."""
        return read_rows(self.path, start)

    def fingerprint(self) -> str:
        """A hash of the content; of a big file its path, size, time of change and a hash of both ends."""
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                if size <= HASHED_WHOLE_BYTES:
                    return f"{self.path.suffix} {hashlib.sha256(file.read()).hexdigest()}"
                ends = hashlib.sha256(file.read(_END_BYTES))
                file.seek(size - _END_BYTES)
                ends.update(file.read())
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
        return f"{self.path.resolve()} {size} {self.path.stat().st_mtime_ns} {ends.hexdigest()}"

    def identity(self) -> str:
        """The file's name and size."""
        return f"{self.path.name} {self.path.stat().st_size}"


@dataclass(frozen=True)
class Document:
    """A record under the names that count, where it stands, its own number in the shard, and where reading goes on after it."""

    record: dict[str, Any]
    place: str
    number: int
    content_hash: int
    size: int
    after: Position


@dataclass(frozen=True)
class Source:
    """One `--data` value and its shards."""

    name: str
    shards: Sequence[Shard]

    def documents(self, mapping: dict[str, str]) -> Iterator[Document]:
        """All documents in order; an empty shard beside others is passed over, an empty source is refused."""
        found = False
        for shard in self.shards:
            for document in read_documents(shard, mapping):
                found = True
                yield document
        if not found:
            raise UserError(no_records(self.name))


def open_sources(names: Iterable[str | Path], streaming: bool = False) -> list[Source]:
    """The sources that `names` name. Raises `UserError` for what is no file, folder, glob or data set."""
    return [Source(str(name), _shards(str(name), streaming)) for name in names]


def _shards(name: str, streaming: bool) -> Sequence[Shard]:
    path = Path(name).expanduser()
    if path.is_dir():
        files = _files_of(path)
        if not files:
            raise UserError(f"data folder {name!r} holds no data files ({', '.join(KINDS)})")
        return [FileShard(file) for file in files]
    if path.exists():
        if kind_of(path) is None:
            raise UserError(f"data file {name!r} is of no known kind ({', '.join(KINDS)}, or one of them with .gz)")
        return [FileShard(path)]
    if any(mark in name for mark in "*?["):
        found = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
        files = [f for p in found for f in (_files_of(p) if p.is_dir() else [p] if kind_of(p) else [])]
        if not files:
            raise UserError(f"no data file matches {name!r} ({', '.join(KINDS)})")
        return [FileShard(file) for file in dict.fromkeys(files)]
    hub = hub_name(name)
    if hub is None or kind_of(name) or Path(hub.path).parent.is_dir():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise UserError(f"no data file {name!r} (a file, a folder, a glob, or a hub data set as owner/name){hint}")
    return open_hub(hub, streaming)


def _files_of(folder: Path) -> list[Path]:
    """Data files below `folder`, sorted by path; hidden ones and those in hidden folders are left out."""
    found = (p for p in folder.rglob("*") if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    return sorted(p for p in found if kind_of(p) and p.is_file())


def read_documents(shard: Shard, mapping: dict[str, str], start: Position = START) -> Iterator[Document]:
    """The documents of a shard from `start` on; the first row of the shard decides its columns, wherever reading starts."""
    columns: Columns | None = None
    if start != START:
        first = next(shard.rows(), None)
        columns = None if first is None else choose_columns(mapping, first.record, f"{shard.name}:{first.number}")
    for row in shard.rows(start):
        place = f"{shard.name}:{row.number}"
        columns = columns or choose_columns(mapping, row.record, place)
        document = columns.record(row.record, place)
        content = _content(document, place)
        digest = hashlib.sha256(content).digest()
        content_hash = int.from_bytes(digest[:8], "big") >> 1
        yield Document(document, place, row.own_number, content_hash, len(content), row.after)


def report_columns(sources: Iterable[Source], mapping: dict[str, str]) -> None:
    """Say on stderr which columns were chosen by their common names, once for each choice; refuse an empty file."""
    told: dict[str, str] = {}
    for source in sources:
        for shard in source.shards[:8]:
            first = next(shard.rows(), None)
            if first is None and len(source.shards) == 1:
                raise UserError(no_records(source.name))
            if first is not None:
                note = choose_columns(mapping, first.record, f"{shard.name}:{first.number}").told()
                if note is not None:
                    told.setdefault(note, shard.name)
    for note, name in told.items() if os.environ.get("RANK", "0") == "0" else ():
        print(f"{name}: {note}", file=sys.stderr)


def is_held_out(content_hash: int, fraction: float) -> bool:
    """Whether a document belongs to the held-out part: its hash (63 bits) falls below the fraction."""
    return content_hash / 2**63 < fraction


def mapping_of(config: DataConfig) -> dict[str, str]:
    """The column mapping of the settings."""
    return parse_columns(config.columns)


def _content(record: dict[str, Any], place: str) -> bytes:
    """The document's content as bytes, without columns that are not read, so that exact duplicates are equal."""
    try:
        kept = {k: v for k, v in record.items() if k in TARGETS}
        return json.dumps(kept, ensure_ascii=False, sort_keys=True, default=str).encode()
    except (ValueError, TypeError, UnicodeEncodeError) as error:
        raise UserError(f"{place}: cannot be read: {str(error).splitlines()[0]}") from None
