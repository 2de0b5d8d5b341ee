"""Cross-entropy mixed with the divergence from a source model's next-token distribution, in chunks of tokens.

A source's distribution p over V tokens is kept as its k most likely tokens and one bucket for all others, so it needs k + 1
numbers per token and not V. The divergence is the exact Kullback-Leibler divergence between the two distributions so
coarsened, over the source's k tokens S and the bucket:

    KL_k(p || q) = sum over i in S of p_i (log p_i - log q_i)  +  P (log P - log Q),   P = 1 - sum_S p_i,  Q = 1 - sum_S q_i

It is never above the full divergence (log-sum inequality: lumping loses information), 0 only where q agrees on S, and equals
the full one at k = V (and k = V - 1). Both distributions are softmax(logits / temperature); the trained loss is

    (1 - weight) * cross-entropy  +  weight * temperature^2 * KL_k

where temperature^2 keeps the gradient's size (Hinton et al., arXiv 1503.02531). P and Q come from sums over the other logits,
not from 1 - sum, which rounding would leave nothing of.

Legend: B rows, T tokens, N tokens with a target, n tokens of a chunk, D width, V vocabulary, K = k + 1 numbers per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polydecode.ops.losses import chunk_size, token_cross_entropy

Head = Callable[[Tensor], Tensor]


@dataclass
class SourceRows:
    """What the source says of N targets: `ids_Nk`, `log_probs_NK` (the bucket's last), and `known_N`: whether it says
    anything. A target without it keeps its plain cross-entropy."""

    ids_Nk: Tensor
    log_probs_NK: Tensor
    known_N: Tensor
    weight: float
    temperature: float


@dataclass
class SourceDistribution:
    """What the source says of each token of a batch, given the clean tokens before it in its document.

    `ids_BTk`, `log_probs_BTK` (the bucket's last) and `known_BT` belong to the token at their own place, which they predict.
    """

    ids_BTk: Tensor
    log_probs_BTK: Tensor
    known_BT: Tensor
    weight: float
    temperature: float

    def rows(self, row_N: Tensor, column_N: Tensor) -> SourceRows:
        """The entries of N tokens."""
        at = (row_N.to(self.known_BT.device), column_N.to(self.known_BT.device))
        return SourceRows(self.ids_BTk[at], self.log_probs_BTK[at], self.known_BT[at], self.weight, self.temperature)

    def rows_where(self, chosen_BT: Tensor) -> SourceRows:
        """The entries of the chosen tokens, in row order."""
        return self.rows(*chosen_BT.nonzero(as_tuple=True))


class TokenLosses(NamedTuple):
    """Per target: `loss_N` with gradient, `hit_N`: was the target the most likely token, `cross_entropy_N` without gradient,
    and with a source `kl_N` of the targets it knows, without gradient."""

    loss_N: Tensor
    hit_N: Tensor
    cross_entropy_N: Tensor
    kl_N: Tensor | None = None

    def sums(self) -> dict[str, float]:
        """Cross-entropy and divergence apart, for the log; empty without a source, where the loss says it all."""
        if self.kl_N is None:
            return {}
        return {
            "cross_entropy": float(self.cross_entropy_N.sum()),
            "cross_entropy_count": float(len(self.cross_entropy_N)),
            "source_kl": float(self.kl_N.sum()),
            "source_kl_count": float(len(self.kl_N)),
        }


def token_losses(hidden_ND: Tensor, target_N: Tensor, source: SourceRows | None, head: Head) -> TokenLosses:
    """Losses of N targets: plain cross-entropy, or mixed with the divergence from `source`.

    `head` maps (n, D) normalised hidden states to (n, V) logits, of which one chunk exists at a time. Without a source this is
    `token_cross_entropy`, bit for bit.
    """
    if source is None or not len(target_N):
        loss_N, hit_N = token_cross_entropy(hidden_ND, target_N, head)
        return TokenLosses(loss_N, hit_N, loss_N.detach(), None if source is None else loss_N.detach())
    parts = []
    for chunk in _chunks(len(target_N), head, hidden_ND):
        arguments = (source.ids_Nk[chunk], source.log_probs_NK[chunk], source.temperature)
        parts.append(checkpoint(_chunk, hidden_ND[chunk], target_N[chunk], head, *arguments, use_reentrant=False))
    entropy_N, kl_N, hit_N = (torch.cat(values) for values in zip(*parts, strict=True))
    mixed_N = (1 - source.weight) * entropy_N + source.weight * source.temperature**2 * kl_N
    loss_N = torch.where(source.known_N, mixed_N, entropy_N)
    return TokenLosses(loss_N, hit_N, entropy_N.detach(), kl_N.detach()[source.known_N])


def _chunks(num_tokens: int, head: Head, hidden_ND: Tensor) -> list[slice]:
    with torch.no_grad():
        vocab_size = head(hidden_ND[:0]).shape[-1]
    size = chunk_size(vocab_size)
    return [
        slice(start, start + size) for start in range(0, max(num_tokens, 1), size)
    ]  # an empty one when there are none


def _chunk(
    hidden_nD: Tensor, target_n: Tensor, head: Head, ids_nk: Tensor, log_probs_nK: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits_nV = _at_least_float32(head(hidden_nD))
    entropy_n = F.cross_entropy(logits_nV, target_n, reduction="none")
    kl_n = coarse_kl(log_probs_nK, coarsened(logits_nV, ids_nk, temperature))
    return entropy_n, kl_n, logits_nV.detach().argmax(-1) == target_n


def coarsened(logits_nV: Tensor, ids_nk: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `ids_nk`, and of all other tokens together (-inf where there are none): (n, k + 1)."""
    scaled_nV = _at_least_float32(logits_nV) / temperature
    total_n1 = scaled_nV.logsumexp(-1, keepdim=True)
    chosen_nk = scaled_nV.gather(-1, ids_nk)
    if ids_nk.shape[-1] == scaled_nV.shape[-1]:
        others_n1 = torch.full_like(total_n1, -torch.inf)
    else:
        others_n1 = scaled_nV.scatter(-1, ids_nk, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([chosen_nk, others_n1], -1) - total_n1


def coarse_kl(log_p_nK: Tensor, log_q_nK: Tensor) -> Tensor:
    """KL(p || q) (n,) of log-probabilities; where p is 0 a bucket adds nothing."""
    counts_nK = log_p_nK > -torch.inf
    log_ratio_nK = log_p_nK.masked_fill(~counts_nK, 0.0) - log_q_nK.masked_fill(~counts_nK, 0.0)
    return (log_p_nK.exp() * log_ratio_nK).sum(-1)


@torch.no_grad()
def most_likely(hidden_ND: Tensor, head: Head, top_k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """(ids (N, k), log-probabilities (N, k + 1) with the bucket last) of a source's logits, k at most the vocabulary."""
    ids, log_probs = [], []
    for chunk in _chunks(len(hidden_ND), head, hidden_ND):
        logits_nV = _at_least_float32(head(hidden_ND[chunk]))
        ids.append(logits_nV.topk(min(top_k, logits_nV.shape[-1]), -1).indices)
        log_probs.append(coarsened(logits_nV, ids[-1], temperature))
    return torch.cat(ids), torch.cat(log_probs)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
