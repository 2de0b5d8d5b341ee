"""Sequences of examples that are read when they are asked for: joined, chosen, split."""

import bisect
import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from polydecode.config import DataConfig
from polydecode.data.examples import Example
from polydecode.errors import UserError


class LazyExamples(Sequence[Example]):
    """A sequence whose `at` reads one example; a slice is a list."""

    @abstractmethod
    def at(self, i: int) -> Example:
        """Example i, 0 to length - 1."""

    @abstractmethod
    def content_hashes(self) -> np.ndarray:
        """The content hash of every example, (N,) int64."""

    @abstractmethod
    def lengths(self) -> np.ndarray:
        """The tokens of every example, (N,) int64."""

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self.at(k) for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        return self.at(int(i) % len(self))


class Joined(LazyExamples):
    """Several sequences one after another."""

    def __init__(self, parts: Sequence[LazyExamples]):
        self.parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def at(self, i: int) -> Example:
        part = bisect.bisect_right(self._ends, i)
        return self.parts[part][i - (self._ends[part - 1] if part else 0)]

    def content_hashes(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int64), *(part.content_hashes() for part in self.parts)])

    def lengths(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int64), *(part.lengths() for part in self.parts)])


class Chosen(LazyExamples):
    """Those examples of a sequence whose numbers are in `indices`, in that order."""

    def __init__(self, examples: Sequence[Example], indices: np.ndarray):
        self.examples, self.indices = examples, indices

    def __len__(self) -> int:
        return len(self.indices)

    def at(self, i: int) -> Example:
        return self.examples[int(self.indices[i])]

    def content_hashes(self) -> np.ndarray:
        return content_hashes(self.examples)[self.indices]

    def lengths(self) -> np.ndarray:
        return lengths(self.examples)[self.indices]


def content_hashes(examples: Sequence[Example]) -> np.ndarray:
    """The content hash of every example, (N,) int64; of one that came from no file, a hash of its token ids."""
    if isinstance(examples, LazyExamples):
        return examples.content_hashes()
    return np.array([e.content_hash if e.content_hash >= 0 else _hash_of_ids(e) for e in examples], dtype=np.int64)


def lengths(examples: Sequence[Example]) -> np.ndarray:
    """The tokens of every example, (N,) int64, without reading what is on disk one by one."""
    if isinstance(examples, LazyExamples):
        return examples.lengths()
    return np.array([len(e.input_ids) for e in examples], dtype=np.int64)


def _hash_of_ids(example: Example) -> int:
    return int.from_bytes(hashlib.sha256(str(example.input_ids).encode()).digest()[:8], "big") >> 1


def split_held_out(examples: Sequence[Example], config: DataConfig) -> tuple[Chosen, Chosen]:
    """(training, held-out): held out are those whose content hashes below `eval_fraction`, wherever they stand.

    Exact duplicates fall on the same side. Of more than `max_eval_examples` those with the lowest hashes are kept, and the
    rest is used by neither side.
    """
    hashes = content_hashes(examples)
    below = hashes / 2**63 < config.eval_fraction
    train, held_out = np.flatnonzero(~below), np.flatnonzero(below)
    if not len(train):
        raise UserError("all examples are held out; lower eval_fraction or give more data")
    lowest = np.sort(held_out[np.argsort(hashes[held_out], kind="stable")[: config.max_eval_examples]])
    return Chosen(examples, train), Chosen(examples, lowest)
