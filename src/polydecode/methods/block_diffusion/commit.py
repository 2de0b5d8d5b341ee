"""Which tokens of a block one forward commits.

Every masked position has a proposed token and a score in [0, 1], from probabilities before temperature, so that sampling
hotter does not change what counts as sure. Of equal scores the leftmost goes first.

Legend: N masked positions of one row or of several, V vocabulary.
"""

import math

import torch
from torch import Tensor

from polydecode.ops.sampling import mix_seed


def scores(logits_NV: Tensor, token_N: Tensor, selector: str) -> list[float]:
    """The score of each proposed token: its probability ("confidence"), that probability minus the best other one's
    ("margin"), or 1 - H / ln V for the distribution's entropy H ("entropy")."""
    wide_NV = logits_NV.float()
    total_N = wide_NV.logsumexp(-1)
    if selector == "entropy":
        p_NV = (wide_NV - total_N[:, None]).exp()
        mean_N = torch.where(p_NV > 0, p_NV * wide_NV, 0.0).sum(-1)
        return (1 - (total_N - mean_N) / math.log(logits_NV.shape[-1])).clamp(0, 1).tolist()
    p_N = (wide_NV.gather(1, token_N[:, None])[:, 0] - total_N).exp()
    if selector == "confidence":
        return p_N.tolist()
    best_N2, index_N2 = wide_NV.topk(2, -1)
    other_N = torch.where(index_N2[:, 0] == token_N, best_N2[:, 1], best_N2[:, 0])
    return (p_N - (other_N - total_N).exp()).clamp_min(0).tolist()


def random_scores(seed: int, forward: int, positions: list[int]) -> list[float]:
    """Uniform scores that depend on the row's seed, the forward within the block and the position alone."""
    return [mix_seed(seed, forward, position) / 2**63 for position in positions]


def chosen(score_N: list[float], threshold: float | None, steps_left: int | None) -> list[int]:
    """Which of the masked positions of a row to commit, as indices into `score_N`; at least one.

    `steps_left`: forwards left for this block, which share its masked positions evenly; None commits by `threshold`: all
    scores that reach it, or the best alone; None or above 1, the best alone.
    """
    order = sorted(range(len(score_N)), key=lambda i: (-score_N[i], i))
    if steps_left is not None:
        count = math.ceil(len(order) / max(steps_left, 1))
    elif threshold is None or threshold > 1:
        count = 1
    else:
        count = max(sum(score >= threshold for score in score_N), 1)
    return order[:count]
