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
    """(-log p(target), was the target the most likely token) per token: float32 (N,) with gradient, bool (N,).

    `head` maps (n, D) normalised hidden states to (n, V) logits. At most `chunk_tokens` x V logits exist at a time.
    """
    losses, hits = [], []
    for start in range(0, len(target_N), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        loss_n, hit_n = checkpoint(_chunk_loss, hidden_ND[chunk], target_N[chunk], head, use_reentrant=False)
        losses.append(loss_n)
        hits.append(hit_n)
    if not losses:
        return hidden_ND.sum() * 0 + hidden_ND.new_zeros(0).float(), torch.zeros(0, dtype=torch.bool)
    return torch.cat(losses), torch.cat(hits)


def _chunk_loss(hidden_nD: Tensor, target_n: Tensor, head: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    logits_nV = head(hidden_nD).float()
    return F.cross_entropy(logits_nV, target_n, reduction="none"), logits_nV.detach().argmax(-1) == target_n


def mean_or_zero(values_N: Tensor) -> Tensor:
    """The mean, or a zero that still carries a gradient when there is nothing to average."""
    return values_N.sum() / max(len(values_N), 1)
