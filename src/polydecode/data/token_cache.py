"""Examples on disk: a source is tokenised once, kept in the cache folder, and read through a memory map.

One Arrow file per source, under a hash of everything that decides its content: the data, the tokenizer, the settings, the
code that makes examples of records. It is written aside and renamed; one process writes, the others wait for it; beside it
stands a seal with its size and checksum, and a file that does not match its seal is made anew.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
import tokenizers
import transformers
from filelock import FileLock
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from polydecode.config import DataConfig
from polydecode.data.encode import encode_pieces
from polydecode.data.examples import Example
from polydecode.data.lazy import LazyExamples
from polydecode.data.sources import Document, Source, mapping_of
from polydecode.errors import UserError
from polydecode.paths import cache_folder

FORMAT_VERSION = 1
ROWS = 512
"""Examples per record batch of the file; all but the last hold exactly so many."""
CHECKED_BYTES = 2 * 2**30
"""Files up to this size are checked against their checksum when they are opened, longer ones by their size alone."""
NOT_IN_KEY = (
    "data eval_data data_weights packing eval_fraction max_eval_examples streaming shuffle_buffer data_workers no_cache"
).split()
"""Settings that change which examples are drawn, not what they are; every other field of `DataConfig` is in the key."""

_ARROW_TYPES = {
    list[int]: pa.large_list(pa.int32()),
    list[bool]: pa.large_list(pa.bool_()),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.large_string(),
    bool: pa.bool_(),
}
_FIELDS = {name: _ARROW_TYPES[kind] for name, kind in get_type_hints(Example).items() if name != "example_id"}
_SCHEMA = pa.schema(list(_FIELDS.items()))


class CachedExamples(LazyExamples):
    """Examples of a token file, read one by one through a memory map; `example_id` counts from `first_id`."""

    def __init__(self, path: Path, first_id: int = 0, folder: Any = None):
        self.path, self.first_id = path, first_id
        self._folder = folder  # a temporary folder lives as long as its examples
        self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = self._reader.num_record_batches
        self._length = (batches - 1) * ROWS + self._reader.get_batch(batches - 1).num_rows if batches else 0

    def __len__(self) -> int:
        return self._length

    def at(self, i: int) -> Example:
        row = self._reader.get_batch(i // ROWS).slice(i % ROWS, 1)
        return Example(**{n: row.column(n)[0].as_py() for n in _FIELDS}, example_id=self.first_id + i)

    def __reduce__(self) -> Any:
        return CachedExamples, (self.path, self.first_id, self._folder)

    def content_hashes(self) -> np.ndarray:
        """The content hash of every example, (N,) int64."""
        return self._column(lambda batch: batch.column("content_hash").to_numpy(zero_copy_only=False))

    def lengths(self) -> np.ndarray:
        """The tokens of every example, (N,) int64."""
        return self._column(lambda batch: np.diff(batch.column("input_ids").offsets.to_numpy()))

    def _column(self, read: Any) -> np.ndarray:
        batches = (self._reader.get_batch(b) for b in range(self._reader.num_record_batches))
        return np.concatenate([np.empty(0, np.int64), *(read(batch).astype(np.int64) for batch in batches)])


def tokenised(
    source: Source, tokenizer: PreTrainedTokenizerBase, config: DataConfig, first_id: int = 0
) -> CachedExamples:
    """The examples of `source`, from the cache if they are there, else made, several processes at once (`data_workers`).

    Raises `UserError` naming file and line for what cannot be an example, and when the cache cannot be written.
    """
    try:
        if config.no_cache:
            folder = tempfile.TemporaryDirectory(prefix="polydecode-tokens-")
            path = Path(folder.name) / "tokens.arrow"
            _write(source, tokenizer, config, path)
            return CachedExamples(path, first_id, folder)
        path = cache_folder() / "tokens" / f"{cache_key(source, tokenizer, config)}.arrow"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _is_whole(path):
            with FileLock(path.with_suffix(".lock")):
                if not _is_whole(path):  # another process may have made it meanwhile
                    _make(source, tokenizer, config, path)
        return CachedExamples(path, first_id)
    except OSError as error:
        where = "temporary folder" if config.no_cache else f"token cache {str(cache_folder() / 'tokens')!r}"
        advice = "set TMPDIR" if config.no_cache else "set POLYDECODE_CACHE to another folder, or give --no-cache"
        raise UserError(f"the {where} cannot be written: {error.strerror or error}; {advice}") from None


def cache_key(source: Source, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str:
    """A hash of all that decides the examples of `source`."""
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(DataConfig) if f.name not in NOT_IN_KEY}
    digest = hashlib.sha256()
    for part in (
        str((FORMAT_VERSION, str(_SCHEMA), transformers.__version__, tokenizers.__version__)),
        json.dumps(settings | {"columns": sorted(mapping_of(config).items())}, sort_keys=True, default=str),
        tokenizer_fingerprint(tokenizer),
        *(file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))),
        *(shard.fingerprint() for shard in source.shards),
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the tokenizer's files, chat template included, wherever it was loaded from."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
            content = file.read_bytes()
            if file.name == "tokenizer_config.json":
                settings = json.loads(content)
                for origin in ("is_local", "local_files_only", "name_or_path"):
                    settings.pop(origin, None)
                content = json.dumps(settings, sort_keys=True).encode()
            digest.update(file.name.encode() + b"\0" + content)
    return digest.hexdigest()


def examples_of(document: Document, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[Example]:
    """The document's example, or its pieces; `UserError` naming its place for a document that cannot be one."""
    try:
        examples = encode_pieces(document.record, tokenizer, config)
    except UserError as error:
        raise UserError(f"{document.place}: {error}") from None
    for example in examples:
        example.content_hash = document.content_hash
    return examples


def _seal(path: Path) -> Path:
    return path.with_suffix(".seal")


def _checksum(path: Path) -> dict[str, int]:
    """Size and, up to `CHECKED_BYTES`, CRC-32 of a file."""
    size, crc = path.stat().st_size, 0
    if size <= CHECKED_BYTES:
        with path.open("rb") as file:
            while piece := file.read(2**22):
                crc = zlib.crc32(piece, crc)
    return {"bytes": size, "crc32": crc}


def _is_whole(path: Path) -> bool:
    try:
        return json.loads(_seal(path).read_text()) == _checksum(path)
    except (OSError, ValueError):
        return False


def _make(source: Source, tokenizer: PreTrainedTokenizerBase, config: DataConfig, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as folder:
        aside = Path(folder) / path.name
        _write(source, tokenizer, config, aside)
        seal = aside.with_suffix(".seal")
        seal.write_text(json.dumps(_checksum(aside)))
        os.replace(aside, path)
        os.replace(seal, _seal(path))
    for left in path.parent.glob(".making-*"):  # of killed processes: nobody writes for days
        if left.is_dir() and left.stat().st_mtime < path.stat().st_mtime - 7 * 86400:
            shutil.rmtree(left, ignore_errors=True)


def _write(source: Source, tokenizer: PreTrainedTokenizerBase, config: DataConfig, path: Path) -> None:
    bar = tqdm(
        desc=f"tokenising {source.name}",
        unit=" records",
        delay=2,
        mininterval=0.5 if sys.stderr.isatty() else 10,
        file=sys.stderr,
        leave=False,
        disable=False,
    )
    groups = _groups(source.documents(mapping_of(config)))
    with bar, pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        for batch in _of_rows(_encoded(groups, tokenizer, config)):
            writer.write_batch(batch)
            bar.update(batch.num_rows)


def _of_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of ROWS: documents in pieces make more."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(b.num_rows for b in waiting) >= ROWS:
            *whole, rest = _rechunked(waiting)
            yield from whole
            if rest.num_rows == ROWS:
                yield rest
            waiting = [rest] if rest.num_rows < ROWS else []
    yield from _rechunked(waiting)


def _rechunked(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if not batches:
        return []
    return pa.Table.from_batches(batches).combine_chunks().to_batches(max_chunksize=ROWS)


def _groups(documents: Iterator[Document]) -> Iterator[list[Document]]:
    while group := list(islice(documents, ROWS)):
        yield group


def _encoded(
    groups: Iterator[list[Document]], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Iterator[pa.RecordBatch]:
    """The record batches in order, made here or by `data_workers` processes."""
    if not config.data_workers:
        yield from (_encode_group(group, tokenizer, config) for group in groups)
        return
    workers = ProcessPoolExecutor(config.data_workers, get_context("spawn"), _start_worker, (tokenizer, config))
    waiting: deque[Future] = deque()
    try:
        for group in groups:
            waiting.append(workers.submit(_encode_in_worker, group))
            if len(waiting) > 2 * config.data_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        why = "out of memory, or a script without `if __name__ == '__main__':`"
        raise UserError(f"a tokenising process died ({why}); lower data_workers") from None
    finally:
        workers.shutdown(cancel_futures=True)


_worker: tuple[PreTrainedTokenizerBase, DataConfig]


def _start_worker(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
    global _worker
    _worker = tokenizer, config


def _encode_in_worker(group: list[Document]) -> pa.RecordBatch:
    return _encode_group(group, *_worker)


def _encode_group(group: list[Document], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> pa.RecordBatch:
    examples = [example for document in group for example in examples_of(document, tokenizer, config)]
    columns = {n: pa.array([getattr(e, n) for e in examples], kind) for n, kind in _FIELDS.items()}
    return pa.record_batch(columns, schema=_SCHEMA)
