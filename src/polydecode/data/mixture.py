"""Sources in given shares: which example an epoch draws where, by arithmetic alone."""

from collections.abc import Sequence

import numpy as np

from polydecode.data.examples import Example, Examples
from polydecode.data.lazy import Joined, LazyExamples
from polydecode.ops.sampling import mix_seed

REPEAT = 2**40
"""The r-th repeat of an example within an epoch has the id of its place plus r times this, so that its noise differs."""


class Mixture(Examples):
    """Examples of several sources in the shares that `weights` say; an epoch has as many as all sources together.

    Each source gives its share from an endless row of its own seeded permutations, and each epoch goes on where the last
    one ended: what is drawn seldom is covered over the epochs, what is drawn often is repeated evenly. The draws of an
    epoch depend on (seed, epoch) only.
    """

    def __init__(self, parts: Sequence[LazyExamples], weights: Sequence[float], seed: int):
        super().__init__(Joined(parts))
        self.parts, self.seed = parts, seed
        self.counts = shares(sum(len(part) for part in parts), weights)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw for this epoch; the training loop calls it when one begins."""
        drawn, repeats, first = [], [], 0
        for i, (part, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            places = _cycled(len(part), epoch * count, count, mix_seed(self.seed, i))
            drawn.append(places + first)
            repeats.append(_occurrence(places))
            first += len(part)
        self._places, self._repeats = np.concatenate(drawn), np.concatenate(repeats)

    def __getitem__(self, i: int) -> Example:
        example = self.examples[int(self._places[i])]
        example.example_id += int(self._repeats[i]) * REPEAT
        return example

    def __len__(self) -> int:
        return len(self._places)


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole parts in proportion to `weights`, by largest remainders.

    >>> shares(10, [2, 1])
    [7, 3]
    """
    exact = [total * w / sum(weights) for w in weights]
    whole = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def permutation(size: int, *seed: int) -> np.ndarray:
    """A permutation of 0 to size - 1, by a generator whose numbers NumPy promises never to change."""
    return np.random.RandomState(mix_seed(*seed) % 2**32).permutation(size)


def _cycled(size: int, start: int, count: int, seed: int) -> np.ndarray:
    """`count` places from `start` on in the endless row of permutations of `size` places."""
    pieces = [np.empty(0, np.int64)]
    while count > 0:
        cycle, at = divmod(start, size)
        piece = permutation(size, seed, cycle)[at : at + count]
        pieces.append(piece)
        start, count = start + len(piece), count - len(piece)
    return np.concatenate(pieces)


def _occurrence(places: np.ndarray) -> np.ndarray:
    """How many times each place came before in `places`."""
    order = np.argsort(places, kind="stable")
    sorted_places = places[order]
    firsts = np.flatnonzero(np.r_[True, sorted_places[1:] != sorted_places[:-1]]) if len(places) else np.empty(0, int)
    run_starts = np.repeat(firsts, np.diff(np.r_[firsts, len(places)]))
    result = np.empty(len(places), np.int64)
    result[order] = np.arange(len(places)) - run_starts
    return result
