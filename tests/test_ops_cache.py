"""The position-addressed cache against a dictionary."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polydecode.ops.cache import KVCache, Plan, append, prompt_plan

HEADS, WIDTH = 2, 3


def entry(row: int, slot: int, name: int = 0) -> torch.Tensor:
    """Keys (H, K) that say which row and slot they belong to."""
    return (
        torch.arange(HEADS * WIDTH, dtype=torch.float64).view(HEADS, WIDTH) / 10 + 1000 * (row + 1) + slot + 1e6 * name
    )


def poison_bin(cache: KVCache) -> None:
    """Make reading the bin visible."""
    for store in (cache.keys, cache.values):
        for full in store:
            if full is not None:
                full[:, :, cache.bin_slot] = float("nan")


def write(cache: KVCache, pass_, rows: list[int], names: dict, layer: int = 0):
    """Run one planned update with entries named after (row, position); fillers get NaN."""
    cache.plan(pass_.plan)
    positions = pass_.position_ids_RT
    new = torch.stack([torch.stack([entry(names[r], int(p)) for p in positions[i]], 1) for i, r in enumerate(rows)])
    if pass_.plan.slots_RT is not None:
        new[(pass_.plan.slots_RT == cache.bin_slot)[:, None].expand(-1, HEADS, -1)] = float("nan")
    keys, values = cache.update(new, -new, layer)
    return keys, values


@st.composite
def histories(draw):
    """Several passes: each appends 1-6 tokens to some of the rows."""
    num_rows = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 70), min_size=num_rows, max_size=num_rows))
    rows = st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=num_rows, unique=True).map(sorted)
    some = rows.flatmap(lambda rs: st.tuples(st.just(rs), st.tuples(*[st.integers(1, 6)] * len(rs))))
    passes = draw(st.lists(some, max_size=5))
    return lengths, passes


@given(histories())
def test_the_cache_holds_what_was_written_where_it_was_written(history):
    """Bugs: rows swapped, growth past 64 slots losing entries, fillers overwriting real slots, the bin being read."""
    lengths, passes = history
    num_rows, names = len(lengths), dict(enumerate(range(len(lengths))))
    cache, device = KVCache(1, num_rows), "cpu"
    everyone = list(range(num_rows))
    write(cache, append(cache, [0] * num_rows, lengths, everyone, device), everyone, names)
    for rows, counts in passes:
        poison_bin(cache)
        starts = [lengths[r] for r in rows]
        stops = [s + c for s, c in zip(starts, counts, strict=True)]
        pass_ = append(cache, starts, stops, rows, device)
        positions = pass_.position_ids_RT
        assert positions[:, -1].tolist() == [s - 1 for s in stops], "the last query is the last real token"
        assert pass_.dense == (set(counts) == {1} and len(set(starts)) == 1)
        assert pass_.key_positions_1K.tolist() == [list(range(max(stops)))]
        if pass_.plan.slots_RT is not None:
            for slots_T, start, stop in zip(pass_.plan.slots_RT.tolist(), starts, stops, strict=True):
                assert [slot for slot in slots_T if slot != cache.bin_slot] == list(range(start, stop)), "once each"
        keys, values = write(cache, pass_, rows, names)
        assert keys.shape == (len(rows), HEADS, max(stops), WIDTH)
        assert keys.isfinite().all(), "the bin was read"
        for r, stop in zip(rows, stops, strict=True):
            lengths[r] = stop
        for i, r in enumerate(rows):
            expected = torch.stack([entry(r, slot) for slot in range(lengths[r])], 1)
            assert torch.equal(keys[i, :, : lengths[r]], expected)
            assert torch.equal(values[i, :, : lengths[r]], -expected)


def filled(rows: list[int], lengths: list[int], layers: int = 2) -> KVCache:
    cache = KVCache(layers, len(rows))
    pass_ = append(cache, [0] * len(rows), lengths, list(range(len(rows))), "cpu")
    for layer in range(layers):
        write(cache, pass_, list(range(len(rows))), dict(enumerate(rows)), layer)
    return cache


@given(
    st.lists(st.integers(1, 130), min_size=1, max_size=3),
    st.lists(st.integers(1, 130), min_size=1, max_size=3),
    st.data(),
)
def test_rows_of_two_caches_join_and_are_selected(first, second, data):
    """Bug found here: caches of capacities 64 and 71 grew to 128 and 71 and could not be joined."""
    mine, theirs = filled(list(range(len(first))), first), filled(list(range(10, 10 + len(second))), second)
    mine.join(theirs)
    lengths, names = first + second, [*range(len(first)), *range(10, 10 + len(second))]
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=5))
    mine.select_rows(torch.tensor(chosen))
    assert mine.num_rows == len(chosen)
    for layer in range(2):
        assert mine.keys[layer].shape == (len(chosen), HEADS, mine.capacity + 1, WIDTH)
        for b, old in enumerate(chosen):
            expected = torch.stack([entry(names[old], slot) for slot in range(lengths[old])], 1)
            assert torch.equal(mine.keys[layer][b, :, : lengths[old]], expected)
            assert torch.equal(mine.values[layer][b, :, : lengths[old]], -expected)


def test_layers_may_lag():
    """Bug: one length for the whole cache; thinking layers stand at the last head while decoding layers go on."""
    cache = filled([0], [5])
    for position in (5, 6):
        write(cache, append(cache, [position], [position + 1], [0], "cpu"), [0], {0: 0}, layer=1)
    keys, _ = write(cache, append(cache, [5], [7], [0], "cpu"), [0], {0: 0}, layer=0)
    assert torch.equal(keys[0], torch.stack([entry(0, slot) for slot in range(7)], 1))


def test_prompt_padding_goes_to_the_bin():
    """Bug: padding written to the slots that the row's first answers will take."""
    for lengths in ([3, 5], [5, 5], [1, 2]):
        cache = KVCache(1, 2)
        length_B = torch.tensor(lengths)
        cache.plan(prompt_plan(cache, length_B, 5))
        new = torch.stack([torch.stack([entry(r, p) for p in range(5)], 1) for r in range(2)])
        keys, _ = cache.update(new, new, 0)
        for row, length in enumerate(lengths):
            assert torch.equal(keys[row, :, :length], new[row, :, :length])
            assert (keys[row, :, length:] == 0).all()


def test_growth_is_by_doubling_and_counted():
    """Bug: a copy of the whole cache at every token, or bytes reported without the values."""
    cache = KVCache(1, 2)
    assert cache.num_bytes() == 0
    sizes = []
    for slots in range(1, 300):
        cache.reserve(slots)
        sizes.append(cache.capacity)
    assert sorted(set(sizes)) == [64, 128, 256, 512]
    cache.plan(Plan(1, start=0))
    cache.update(torch.zeros(2, HEADS, 1, WIDTH), torch.zeros(2, HEADS, 1, WIDTH), 0)
    assert cache.num_bytes() == 2 * 2 * HEADS * 513 * WIDTH * 4


def test_broken_invariants_are_told():
    """Bug: an update without a plan, or a read past what is reserved, returning garbage."""
    cache, new = KVCache(1, 1), torch.zeros(1, HEADS, 1, WIDTH)
    with pytest.raises(AssertionError, match="plan"):
        cache.update(new, new, 0)
    with pytest.raises(AssertionError, match="reserve"):
        cache.plan(Plan(5, start=4))
