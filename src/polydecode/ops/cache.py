"""A key/value cache addressed by position: the one place that speaks the cache protocol of transformers' layers.

Slot s of a row holds the keys and values of the token at position s of that row, in every layer. Layers may lag: a layer
that has not yet seen position s simply has not written slot s, and no query reads beyond what its layer has written. So
one cache serves rows of unequal length, layers of unequal progress and rows in different phases, and every slot is
written once. One spare slot at the end is the bin: rows that must compute something to fill a rectangle write there, and
nothing reads it.

transformers' layers call `cache.update(keys, values, layer_index)`; where to write and how far to read is said before the
layers run, with `plan`.

Legend: B rows, R rows taking part, T tokens written per row, H key/value heads, S slots, K width of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_SMALLEST_CAPACITY = 64


@dataclass(frozen=True)
class Plan:
    """Where the next `update` writes and how far it reads.

    `start`: first slot when every row writes the same contiguous slots, else None and `slots_RT` says it per row.
    `rows_R`: the rows taking part, None for all. `read`: keys 0..read-1 are returned.
    """

    read: int
    start: int | None = None
    slots_RT: Tensor | None = None
    rows_R: Tensor | None = None


class KVCache:
    """Keys and values (B, H, S + 1, K) per layer, grown by doubling; the last slot is the bin."""

    def __init__(self, num_layers: int, num_rows: int):
        self.num_rows = num_rows
        self.capacity = 0
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self._plan: Plan | None = None

    @property
    def bin_slot(self) -> int:
        """The slot for writes nobody reads."""
        return self.capacity

    def reserve(self, num_slots: int) -> None:
        """Make room for `num_slots` positions per row, keeping what is written."""
        if num_slots > self.capacity:
            self._resize(max(num_slots, 2 * self.capacity, _SMALLEST_CAPACITY))

    def _resize(self, capacity: int) -> None:
        for store in (self.keys, self.values):
            for i, old in enumerate(store):
                if old is not None:
                    new = old.new_zeros(old.shape[0], old.shape[1], capacity + 1, old.shape[3])
                    new[:, :, : self.capacity] = old[:, :, : self.capacity]
                    store[i] = new
        self.capacity = capacity

    def plan(self, plan: Plan) -> None:
        """Say where the following `update` calls write and how far they read."""
        assert plan.read <= self.capacity, "reserve() room before planning a read"
        self._plan = plan

    def update(self, keys_RHTK: Tensor, values_RHTK: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Write the new keys and values and return all that the queries may read: (R, H, read, K) each."""
        return self._write(self.keys, keys_RHTK, layer), self._write(self.values, values_RHTK, layer)

    def _write(self, store: list[Tensor | None], new_RHTK: Tensor, layer: int) -> Tensor:
        plan = self._plan
        assert plan is not None, "plan() comes before the layers run"
        full = store[layer]
        if full is None:
            _, heads, _, width = new_RHTK.shape
            full = store[layer] = new_RHTK.new_zeros(self.num_rows, heads, self.capacity + 1, width)
        if plan.start is not None and plan.rows_R is None:
            full[:, :, plan.start : plan.start + new_RHTK.shape[2]] = new_RHTK
        else:
            rows_R = plan.rows_R if plan.rows_R is not None else torch.arange(self.num_rows, device=full.device)
            slots_RT = plan.slots_RT
            if slots_RT is None:
                assert plan.start is not None
                slots_RT = torch.arange(plan.start, plan.start + new_RHTK.shape[2], device=full.device).expand(
                    len(rows_R), -1
                )
            full[rows_R[:, None], :, slots_RT] = new_RHTK.transpose(1, 2)
        read = full[:, :, : plan.read]
        return read if plan.rows_R is None else read[plan.rows_R]

    def select_rows(self, rows: Tensor) -> None:
        """Keep only `rows`, in that order."""
        self.num_rows = len(rows)
        for store in (self.keys, self.values):
            for i, old in enumerate(store):
                if old is not None:
                    store[i] = old[rows]

    def join(self, other: "KVCache") -> None:
        """Append the rows of `other`."""
        capacity = max(self.capacity, other.capacity)
        for cache in (self, other):
            if cache.capacity < capacity:
                cache._resize(capacity)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                assert (a is None) == (b is None), "rows can join only when both caches have been filled"
                if a is not None and b is not None:
                    mine[i] = torch.cat([a, b])
        self.num_rows += other.num_rows

    def num_bytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(t.numel() * t.element_size() for store in (self.keys, self.values) for t in store if t is not None)


@dataclass(frozen=True)
class Append:
    """One pass that appends tokens to some rows: the cache plan, the queries' positions and the keys' positions.

    `dense`: a single query per row that reads every key, so no mask is needed.
    """

    plan: Plan
    position_ids_RT: Tensor
    key_positions_1K: Tensor
    dense: bool


def append(cache: KVCache, starts: list[int], stops: list[int], rows: list[int], device: torch.device | str) -> Append:
    """Plan a pass in which row r of `rows` writes slots starts[r] .. stops[r]-1 (host integers, one per taking part).

    Rows that write fewer tokens than the longest are filled on the left: the filler repeats the row's first position,
    writes to the bin and is read by nobody. The last query of every row is its last real token.
    """
    read = max(stops)
    cache.reserve(read)
    width = max(stop - start for start, stop in zip(starts, stops, strict=True))
    uniform = len(set(starts)) == 1 and len(set(stops)) == 1
    everyone = rows == list(range(cache.num_rows))
    rows_R = None if everyone else torch.tensor(rows, device=device)
    key_positions_1K = torch.arange(read, device=device)[None]
    if uniform:
        position_ids_RT = torch.arange(starts[0], stops[0], device=device)[None].expand(len(rows), -1)
        plan = Plan(read, start=starts[0], rows_R=rows_R)
        return Append(plan, position_ids_RT, key_positions_1K, dense=width == 1)
    start_R, stop_R = torch.tensor(starts, device=device), torch.tensor(stops, device=device)
    slots_RT = stop_R[:, None] - width + torch.arange(width, device=device)
    filler_RT = slots_RT < start_R[:, None]
    position_ids_RT = torch.maximum(slots_RT, start_R[:, None])
    slots_RT = torch.where(filler_RT, cache.bin_slot, slots_RT)
    return Append(Plan(read, slots_RT=slots_RT, rows_R=rows_R), position_ids_RT, key_positions_1K, dense=False)


def prompt_plan(cache: KVCache, length_B: Tensor, width: int) -> Plan:
    """The plan of a pass over left-aligned prompts of `width` columns: padding writes to the bin."""
    cache.reserve(width)
    if bool((length_B == width).all()):
        return Plan(width, start=0)
    column_T = torch.arange(width, device=length_B.device)
    slots_BT = torch.where(column_T < length_B[:, None], column_T, cache.bin_slot)
    return Plan(width, slots_RT=slots_BT)
