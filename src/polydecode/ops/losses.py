"""Token cross-entropy that never holds the logits of all tokens at once.

The logits of a batch (tokens x vocabulary) are the largest tensor of a small model's training step. Here they exist for
one chunk of tokens at a time, in the forward and again, recomputed, in the backward.

Legend: N tokens with a target, D width, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 512


def token_cross_entropy(
    hidden_ND: Tensor, target_N: Tensor, head: Callable[[Tensor], Tensor], chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
    """(-log p(target), was the target the most likely token) per token: (N,) with gradient, bool (N,).

    `head` maps (n, D) normalised hidden states to (n, V) logits, of which at most `chunk_tokens` x V exist at a time. The
    loss is at least float32.
    """
    losses, hits = [], []
    for start in range(0, len(target_N), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        loss_n, hit_n = checkpoint(_chunk_loss, hidden_ND[chunk], target_N[chunk], head, use_reentrant=False)
        losses.append(loss_n)
        hits.append(hit_n)
    if not losses:
        nothing_N = hidden_ND.sum() * 0 + _at_least_float32(hidden_ND.new_zeros(0))
        return nothing_N, torch.zeros(0, dtype=torch.bool, device=hidden_ND.device)
    return torch.cat(losses), torch.cat(hits)


def _chunk_loss(hidden_nD: Tensor, target_n: Tensor, head: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    logits_nV = _at_least_float32(head(hidden_nD))
    return F.cross_entropy(logits_nV, target_n, reduction="none"), logits_nV.detach().argmax(-1) == target_n


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mean_or_zero(values_N: Tensor) -> Tensor:
    """The mean, or a zero that still carries a gradient when there is nothing to average."""
    return values_N.sum() / max(len(values_N), 1)
