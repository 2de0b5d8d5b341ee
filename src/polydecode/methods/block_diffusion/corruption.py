"""Which tokens are masked in training: exact counts per block, late positions first at low noise.

A block of n tokens with noise level t masks exactly k = round(t * n) of them, drawn without replacement by Gumbel-top-k from
the weights w_i = exp(beta * (1 - t) * i), beta = ln 2 / (half_life_ratio * n), i the place inside the block (Efficient-DLM,
section 3.2). At t near 1 that is uniform; at t near 0 the weight doubles every half_life_ratio * n places.

Legend: N tokens of one example, in order; J blocks.
"""

import math

import torch
from torch import Tensor


def corrupt(
    block_N: Tensor,
    may_mask_N: Tensor,
    half_life_ratio: float | None,
    min_level: float,
    draws: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """(is_masked bool (draws, N), noise level float32 (draws, N)) of one example.

    `block_N` (N,) rises along the example and tells which tokens form a block; `may_mask_N` bool, the others stay. Of a
    block's n maskable tokens exactly round(t * n) are masked, halves rounded up. Levels are uniform in [min_level, 1] and
    float32, so that the weight 1/t is finite whatever the training dtype; several draws of a block are spread evenly (each is
    still uniform). `half_life_ratio` None masks uniformly, 0 the last places.
    """
    _, block_N, length_J = torch.unique_consecutive(block_N, return_inverse=True, return_counts=True)
    length_J = torch.zeros_like(length_J).index_add_(0, block_N, may_mask_N.long())
    level_1J = torch.rand(1, len(length_J), generator=generator, dtype=torch.float32)
    uniform_DN = torch.rand(draws, len(block_N), generator=generator, dtype=torch.float64)
    spread_D1 = torch.arange(draws, dtype=torch.float32)[:, None] / draws
    level_DJ = min_level + (1 - min_level) * ((level_1J + spread_D1) % 1)
    count_DJ = torch.minimum((level_DJ.double() * length_J + 0.5).floor().long(), length_J)

    place_N = places(block_N, may_mask_N)
    if half_life_ratio == 0:
        score_DN = place_N.double().expand(draws, -1).clone()
    else:
        score_DN = -torch.log(-torch.log(uniform_DN.clamp_(1e-300, 1 - 1e-16)))
        if half_life_ratio is not None:
            beta_N = math.log(2) / (half_life_ratio * length_J[block_N].clamp_min(1))
            score_DN = score_DN + beta_N * (1 - level_DJ[:, block_N]) * place_N
    score_DN.masked_fill_(~may_mask_N, -math.inf)
    rank_DN = _rank_in_block(score_DN, block_N)
    return rank_DN < count_DJ[:, block_N], level_DJ[:, block_N]


def places(block_N: Tensor, counted_N: Tensor) -> Tensor:
    """The number (N,) of counted tokens before each token in its block; `block_N` counts from 0 without gaps."""
    before_N = counted_N.long().cumsum(0) - counted_N.long()
    starts_N = torch.ones_like(block_N, dtype=torch.bool)
    starts_N[1:] = block_N[1:] != block_N[:-1]
    return before_N - before_N[starts_N][block_N]


def _rank_in_block(score_DN: Tensor, block_N: Tensor) -> Tensor:
    """The rank (D, N) of each score among its block's, the highest 0; ties in order."""
    by_score_DN = score_DN.argsort(dim=1, descending=True, stable=True)
    by_block_DN = by_score_DN.gather(1, block_N[by_score_DN].argsort(dim=1, stable=True))
    rank_N = places(block_N, torch.ones_like(block_N, dtype=torch.bool))
    return torch.empty_like(by_block_DN).scatter_(1, by_block_DN, rank_N.expand_as(by_block_DN))
