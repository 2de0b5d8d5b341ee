"""Draws belong to their row, follow the softmax, and survive every setting."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from polydecode.errors import UserError
from polydecode.ops.sampling import RowGenerators, check_sampling, draw, is_sampling, mix_seed, warpers

V = 11


def test_draws_do_not_depend_on_the_batch():
    """Bugs (known faults 20, 40): one generator for the batch, so a row's tokens change with its neighbours; only row 0 drawn."""
    scores = torch.randn(6, V)
    seeds = list(range(10, 16))
    together = RowGenerators(seeds)
    drawn = torch.stack([draw(scores, together) for _ in range(20)], 1)
    for split in ([[0], [1], [2], [3], [4], [5]], [[5, 0, 3], [1, 2, 4]]):
        for rows in split:
            part = RowGenerators([seeds[b] for b in rows])
            assert torch.equal(torch.stack([draw(scores[rows], part) for _ in range(20)], 1), drawn[rows])
    assert len({tuple(row.tolist()) for row in drawn}) == 6


def test_selected_rows_go_on_where_they_are():
    """Bug: a generator started again when rows leave, so the same noise is used twice."""
    scores = torch.zeros(3, V)
    whole, part = RowGenerators([1, 2, 3]), RowGenerators([1, 2, 3])
    expected = torch.stack([draw(scores, whole) for _ in range(12)], 1)
    first = torch.stack([draw(scores, part) for _ in range(5)], 1)
    part = part.select([2, 0])
    rest = torch.stack([draw(scores[:2], part) for _ in range(7)], 1)
    assert len(part) == 2
    assert torch.equal(torch.cat([first[[2, 0]], rest], 1), expected[[2, 0]])


def test_integers_are_uniform_and_per_row():
    """Bug: the last value never drawn, or rows sharing a generator."""
    counts = torch.zeros(3)
    for seed in range(600):
        a, b = RowGenerators([seed, seed + 1]).integers([3, 1])
        assert b == 0
        counts[a] += 1
        assert RowGenerators([7, seed]).integers([3, 3])[1] == a
    assert counts.min() > 150


def test_draws_follow_the_softmax():
    """Bug: Gumbel noise of the wrong scale, a clamp that cuts the tail, temperature applied twice."""
    scores, n = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0]), 4000
    generators = RowGenerators(range(n))
    counts = torch.bincount(draw(scores.expand(n, -1), generators), minlength=5).double()
    expected = n * scores.double().softmax(-1)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 18.5, "4 degrees of freedom: exceeded once in 1000 seeds"


def test_impossible_tokens_are_never_drawn():
    """Bug: -inf plus infinite noise, or uniform 0 giving log(0), chooses a token that processors ruled out."""
    scores = torch.full((2000, V), -math.inf)
    scores[:, 4] = -50.0
    assert (draw(scores, RowGenerators(range(2000))) == 4).all()


def test_greedy_is_the_argmax():
    """Bug: noise at temperature 0."""
    scores = torch.randn(5, V)
    assert torch.equal(draw(scores, None), scores.argmax(-1))


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
def test_seeds_are_mixed_not_added(parts):
    """Bug: seed + epoch + example collides for (0, 1) and (1, 0)."""
    seed = mix_seed(*parts)
    assert 0 <= seed < 2**63
    assert mix_seed(*parts) == seed
    assert mix_seed(*parts, 0) != seed
    if parts != parts[::-1]:
        assert mix_seed(*parts[::-1]) != seed


def test_seeds_are_distinct():
    """Bug: two examples with the same noise."""
    grid = [mix_seed(*p) for p in itertools.product(range(20), repeat=3)]
    grid += [mix_seed(*p) for p in itertools.product(range(20), repeat=2)]
    assert len(set(grid)) == len(grid)
    low_bits = torch.tensor([s & 1 for s in grid]).double().mean()
    assert 0.47 < low_bits < 0.53
    torch.Generator().manual_seed(max(grid))


def test_every_setting_gives_a_choice():
    """Bug (known fault 38): division by zero at temperature 0, NaN at 1e-8, an empty set at top_p 0, top_k beyond V."""
    scores = torch.cat([torch.randn(3, V) * 20, torch.zeros(1, V)])
    for temperature, top_p, top_k, min_p in itertools.product(
        (0, 1e-8, 1.0, 2.0), (0, 0.5, 1), (0, 1, V + 100), (None, 0.0, 0.3)
    ):
        config = GenerationConfig(do_sample=True, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        check_sampling(config)
        warped = warpers(config)(None, scores.clone())
        assert not warped.isnan().any()
        assert (warped > -math.inf).any(-1).all()
        chosen = draw(warped, RowGenerators(range(4)) if is_sampling(config) else None)
        assert ((chosen >= 0) & (chosen < V)).all()
        if temperature in (0, 1e-8) or top_p == 0 or top_k == 1:
            assert torch.equal(chosen[:3], scores[:3].argmax(-1))


def test_greedy_settings_have_no_warpers():
    """Bug: top-k of a greedy call changing what logits processors and callers see."""
    for config in (GenerationConfig(do_sample=False, top_k=50), GenerationConfig(do_sample=True, temperature=0)):
        assert not is_sampling(config)
        assert len(warpers(config)) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("top_p", 1.5), ("top_p", -0.1), ("top_k", -1), ("min_p", 2.0), ("temperature", math.nan)],
)
def test_settings_out_of_range_are_refused(name, value):
    """Bug (known fault 51): an out-of-range value reaching the kernel."""
    config = GenerationConfig(do_sample=True)
    setattr(config, name, value)
    with pytest.raises(UserError, match=name):
        check_sampling(config)
