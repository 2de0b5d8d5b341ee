"""Data that is too large to tokenise first: an endless stream of examples with an exact, small state.

The documents of a source are read in chunks of `shuffle_buffer`; each chunk is shuffled by (seed, source, pass, chunk) and given
out, then the next one is read; the order of files changes from pass to pass. The state is therefore a place in a file and how
many of the chunk were given out, without any generator: a resume seeks there and reads one chunk again, tokenising nothing
that was consumed.

There is one order of draws for a run, whatever the number of ranks and workers: each walks through all raw documents and
tokenises its own. A pass that ends is followed by the next one.

With packing the draws are taken `PACK_WINDOW` at a time and packed into rows by (seed, draw); ranks and workers share the rows.
What a row holds is known only when all documents of its window are tokenised, so each of them tokenises all. A row says
where it stands (its window's first draw, its number in it), and the state is that place.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from polydecode.config import DataConfig
from polydecode.data.examples import Example
from polydecode.data.files import START, Position
from polydecode.data.mixture import permutation
from polydecode.data.packing import pack
from polydecode.data.sources import Document, Shard, Source, is_held_out, mapping_of, read_documents
from polydecode.data.token_cache import examples_of
from polydecode.errors import UserError
from polydecode.ops.sampling import mix_seed

CHUNK_BYTES = 256 * 2**20
"""A chunk ends early when its documents' text reaches this size."""
PACK_WINDOW = 1024
"""Documents that are packed into rows together."""
PASSES, SHARDS, ROWS = 2**10, 2**21, 2**32
"""An example's id is (pass mod PASSES, shard, row) in one 63-bit number, row the lowest."""


def stream_id(passed: int, shard: int, row: int) -> int:
    """The id of an example in a stream: its place in the data, and the pass, so that its noise differs in the next one."""
    return (passed % PASSES * SHARDS + shard) * ROWS + row


@dataclass
class LanePlace:
    """Where a lane stands: the chunk it reads (pass, file in that pass's order, position in it) and how many it gave of it."""

    passed: int = 0
    shard: int = 0
    at: Position = START
    chunk: int = 0
    given: int = 0
    drawn: int = 0


class _Lane:
    """The endless documents of one source (or of all, when no weights are given)."""

    def __init__(self, numbered: Sequence[tuple[int, Shard]], seed: int, config: DataConfig, place: LanePlace):
        self.numbered, self.seed, self.place = numbered, seed, place
        self.mapping, self.config = mapping_of(config), config

    def draws(self) -> Iterator[tuple[Document, int]]:
        """(document, example id) without end; `place` is always the place after the last one given out."""
        while True:
            place = self.place
            rows, empty = self._rest_of_pass(place), place.chunk == 0
            while True:
                chunk, end = self._chunk(rows)
                if not chunk:
                    break
                empty = False
                order = permutation(len(chunk), self.seed, place.passed, place.chunk)
                while place.given < len(chunk):
                    document, number = chunk[int(order[place.given])]
                    place.given, place.drawn = place.given + 1, place.drawn + 1
                    yield document, stream_id(place.passed, number, document.number)
                place.shard, place.at = end
                place.chunk, place.given = place.chunk + 1, 0
            if empty:
                raise UserError("the data has no training documents; lower eval_fraction or give more data")
            place.passed, place.shard, place.at, place.chunk = place.passed + 1, 0, START, 0

    def _rest_of_pass(self, place: LanePlace) -> Iterator[tuple[Document, int, tuple[int, Position]]]:
        """(document, shard number, place after it) of what is left of the pass, held-out documents left out."""
        order = permutation(len(self.numbered), self.seed, place.passed, -1)
        fraction = 0.0 if self.config.eval_data else self.config.eval_fraction
        start = place.at
        for index in range(place.shard, len(order)):
            number, shard = self.numbered[int(order[index])]
            for document in read_documents(shard, self.mapping, start):
                if not is_held_out(document.content_hash, fraction):
                    yield document, number, (index, document.after)
            start = START

    def _chunk(self, rows: Iterator[Any]) -> tuple[list[tuple[Document, int]], tuple[int, Position]]:
        chunk: list[tuple[Document, int]] = []
        size, end = 0, (0, START)
        while len(chunk) < self.config.shuffle_buffer and size < CHUNK_BYTES:
            following = next(rows, None)
            if following is None:
                break
            document, number, end = following
            chunk.append((document, number))
            size += document.size
        return chunk, end


class _Cursor:
    """The one order of draws: which lane is next, and each lane's place."""

    def __init__(self, lanes: Sequence[_Lane], weights: Sequence[float]):
        self.lanes, self.weights = lanes, weights
        self._draws = [lane.draws() for lane in lanes]

    @property
    def drawn(self) -> int:
        return sum(lane.place.drawn for lane in self.lanes)

    def __next__(self) -> tuple[Document, int]:
        """The next draw, of the lane that is furthest behind its share."""
        total = self.drawn + 1
        behind = [w * total - lane.place.drawn for w, lane in zip(self.weights, self.lanes, strict=True)]
        return next(self._draws[behind.index(max(behind))])


class PackedRow(list[Example]):
    """Examples packed into one row, the `number`-th of the window that begins with draw `window`."""

    def __init__(self, examples: Sequence[Example], window: int, number: int):
        super().__init__(examples)
        self.window, self.number = window, number


class ExampleStream(IterableDataset):
    """An endless stream of examples, or with packing of rows of them; iterating goes on where `state_dict()` says it stands.

    `files` is a hash of the names and sizes of its files. `shard` tells it the batch, rank and number of ranks; dataloader
    workers are found by themselves. Raises `UserError` naming file and line for a document that cannot be an example.
    """

    def __init__(self, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, config: DataConfig, seed: int):
        self.sources, self.tokenizer, self.config, self.seed = sources, tokenizer, config, seed
        self.batch_size, self.rank, self.world_size = 1, 0, 1
        numbered = list(enumerate(shard for source in sources for shard in source.shards))
        if len(numbered) >= SHARDS:
            raise UserError(f"the data has {len(numbered)} files; a stream takes fewer than {SHARDS}: join some")
        if config.data_weights:
            bounds = [0]
            for source in sources:
                bounds.append(bounds[-1] + len(source.shards))
            self._lanes = [numbered[low:high] for low, high in pairwise(bounds)]
            self._weights = [w / sum(config.data_weights) for w in config.data_weights]
        else:
            self._lanes, self._weights = [numbered], [1.0]
        self._places = [LanePlace() for _ in self._lanes]
        self.files = hashlib.sha256("\n".join(shard.identity() for _, shard in numbered).encode()).hexdigest()[:16]
        self._cursor: _Cursor | None = None
        self._saved: list[LanePlace] = []
        """The last state that was walked to, from which the next one is not as far."""
        self._rows_given = 0
        """Rows of the window at `_places` that were given out before."""

    def shard(self, batch_size: int, rank: int, world_size: int) -> None:
        """Give this rank its part: of each `batch_size * world_size` draws in a row, the rank-th `batch_size`."""
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        index, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        cursor = self._open(self._now())
        if worker is None:
            self._cursor = cursor
        group = self.batch_size * self.world_size
        for given, make in enumerate(self._packed(cursor) if self.config.packing else self._unpacked(cursor)):
            batch, in_batch = divmod(given, group)
            if batch % workers == index and in_batch // self.batch_size == self.rank:
                yield make()

    def _unpacked(self, cursor: _Cursor) -> Iterator[Callable[[], Example]]:
        while True:
            yield partial(self._first_example, *next(cursor))

    def _packed(self, cursor: _Cursor) -> Iterator[Callable[[], PackedRow]]:
        passed_over = self._rows_given
        while True:
            window = cursor.drawn
            examples = [example for _ in range(PACK_WINDOW) for example in self._examples(*next(cursor))]
            rows = pack([len(e.input_ids) for e in examples], self.config.max_length, mix_seed(self.seed, window))
            for number, row in enumerate(rows):
                if number >= passed_over:
                    yield partial(PackedRow, [examples[i] for i in row], window, number)
            passed_over = 0

    def _first_example(self, document: Document, example_id: int) -> Example:
        return self._examples(document, example_id)[0]

    def _examples(self, document: Document, example_id: int) -> list[Example]:
        examples = examples_of(document, self.tokenizer, self.config)
        for piece, example in enumerate(examples):
            example.example_id = mix_seed(example_id, piece) >> 1 if piece else example_id
        return examples

    def peek(self, count: int) -> list[Any]:
        """The next `count` examples (or rows) of this rank, which stay to be drawn."""
        return list(islice(copy.copy(self), count))

    @property
    def drawn(self) -> int:
        """Draws of all ranks together up to where the stream stands."""
        return _drawn(self._now())

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of pass `epoch` of the data; where the stream has come as far already, nothing changes."""
        if all(place.passed < epoch for place in self._now()):
            self._places = [LanePlace(passed=epoch, drawn=place.drawn) for place in self._now()]
            self._cursor, self._saved, self._rows_given = None, [], 0

    def state_dict(self, drawn: int | None = None, rows: int = 0) -> dict[str, Any]:
        """Where the stream stands after `drawn` draws of all ranks together (None: after the last one in this process) and, with
        packing, `rows` rows of the window that begins there.

        With dataloader workers, which read ahead, and with packing, `drawn` must be given: raw documents are then passed over up
        to it.
        """
        places = self._now()
        if drawn is not None and _drawn(places) != drawn:
            known = [p for p in (self._places, self._saved, places) if p and _drawn(p) <= drawn]
            if not known:
                raise ValueError(f"the stream began at draw {_drawn(self._places)}, so it has no state at {drawn}")
            cursor = self._open(max(known, key=_drawn))
            while cursor.drawn < drawn:
                next(cursor)
            places = self._saved = copy.deepcopy([lane.place for lane in cursor.lanes])
        return {
            "data": self._identity(),
            "drawn": _drawn(places),
            "rows": rows,
            "lanes": [dataclasses.asdict(place) for place in places],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a state that `state_dict` gave; `UserError` if it is of other data or settings."""
        mine = self._identity()
        for name, value in mine.items():
            was = state["data"].get(name)
            if was != value:
                told = "the data files are others" if name == "files" else f"{name} was {was!r}, now it is {value!r}"
                raise UserError(f"cannot resume the stream: {told}; give what it began with")
        self._places = [LanePlace(**{**place, "at": tuple(place["at"])}) for place in state["lanes"]]
        self._rows_given = state.get("rows", 0)
        self._cursor, self._saved = None, []

    def _now(self) -> list[LanePlace]:
        return self._places if self._cursor is None else [lane.place for lane in self._cursor.lanes]

    def _open(self, places: Sequence[LanePlace]) -> _Cursor:
        lanes = [
            _Lane(shards, mix_seed(self.seed, i), self.config, copy.copy(place))
            for i, (shards, place) in enumerate(zip(self._lanes, places, strict=True))
        ]
        return _Cursor(lanes, self._weights)

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a state to mean the same draws."""
        config = self.config
        return {
            "files": self.files,
            "columns": mapping_of(config),
            "data_weights": list(config.data_weights),
            "eval_fraction": 0.0 if config.eval_data else config.eval_fraction,
            "shuffle_buffer": config.shuffle_buffer,
            "seed": self.seed,
            "packing": config.packing,
            "long_text": config.long_text,
        }


def _drawn(places: Sequence[LanePlace]) -> int:
    return sum(place.drawn for place in places)
