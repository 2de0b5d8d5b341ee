"""Packing: whole examples side by side in rows of at most `max_length` tokens, so that little is padding.

Documents of a row stay apart: positions, attention, cycles and blocks start anew at each, and each draws its own noise.
"""

import random
from collections.abc import Sequence

from torch.utils.data import Dataset

from polydecode.data.examples import Example, Examples
from polydecode.data.lazy import lengths

_WINDOW = 4096


def pack(lengths: Sequence[int], max_length: int, seed: int) -> list[list[int]]:
    """Rows of indices into `lengths`, each index once, each row at most `max_length` in sum (a longer one stands alone).

    Best fit, longest first, within windows of 4096 of an order shuffled by `seed`.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    rows: list[list[int]] = []
    for start in range(0, len(order), _WINDOW):
        rows += _pack_window(sorted(order[start : start + _WINDOW], key=lambda i: -lengths[i]), lengths, max_length)
    random.Random(seed + 1).shuffle(rows)
    return rows


def _pack_window(longest_first: Sequence[int], lengths: Sequence[int], max_length: int) -> list[list[int]]:
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(max_length + 1)]
    """Numbers of the rows with exactly so many tokens of room."""
    for i in longest_first:
        room = next((r for r in range(lengths[i], max_length + 1) if with_room[r]), None)
        if room is None:
            rows.append([i])
            left = max(max_length - lengths[i], 0)
            with_room[left].append(len(rows) - 1)
        else:
            number = with_room[room].pop()
            rows[number].append(i)
            with_room[room - lengths[i]].append(number)
    return rows


class PackedExamples(Dataset):
    """Examples packed into rows; an item is a row, a list of examples."""

    def __init__(self, examples: Examples, max_length: int, seed: int):
        self.examples = examples
        self.rows = pack(lengths(examples.examples).tolist(), max_length, seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> list[Example]:
        return [self.examples[j] for j in self.rows[i]]
