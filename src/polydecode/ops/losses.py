"""Token cross-entropy that never holds the logits of all tokens at once.

The logits of a batch (tokens x vocabulary) are the largest tensor of a small model's training step. Here they exist for
one chunk of tokens at a time. A chunk has as many tokens as fit in `CHUNK_BYTES`, so that a large vocabulary does not make
large temporaries. A head that is not trained needs the gradient of its input alone, which is known as soon as a chunk's
loss is, so its logits are made once; for a trained head they are made again in the backward.

Legend: N tokens with a target, n tokens of a chunk, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 512
"""Most tokens of a chunk; more do not make the products faster."""
CHUNK_BYTES = 40 * 2**20
"""Most bytes of a chunk's logits in float32; some three such tensors exist at once (logits, log-probabilities, gradient)."""


def token_cross_entropy(
    hidden_ND: Tensor, target_N: Tensor, head: Callable[[Tensor], Tensor], chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """(-log p(target), was the target the most likely token) per token: (N,) with gradient, bool (N,).

    `head` maps (n, D) normalised hidden states to (n, V) logits, of which at most `chunk_tokens` x V exist at a time (None:
    by `chunk_size`). The loss is at least float32.
    """
    if not len(target_N):
        through_head = head(
            hidden_ND[:0]
        ).sum()  # so that every parameter has a gradient, as distributed training wants
        nothing_N = (hidden_ND.sum() + through_head) * 0 + _at_least_float32(hidden_ND.new_zeros(0))
        return nothing_N, torch.zeros(0, dtype=torch.bool, device=hidden_ND.device)
    with torch.enable_grad():
        nothing_0V = head(hidden_ND[:0].detach())
    size = chunk_tokens or chunk_size(nothing_0V.shape[-1])
    if not nothing_0V.requires_grad:
        return _FrozenHeadLoss.apply(hidden_ND, target_N, head, size)
    parts = []
    for start in range(0, len(target_N), size):
        chunk = slice(start, start + size)
        parts.append(checkpoint(_chunk_loss, hidden_ND[chunk], target_N[chunk], head, use_reentrant=False))
    losses, hits = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(hits)


def chunk_size(vocab_size: int) -> int:
    """Tokens whose float32 logits fit in CHUNK_BYTES: 1 to CHUNK_TOKENS."""
    return max(1, min(CHUNK_TOKENS, CHUNK_BYTES // (4 * vocab_size)))


class _FrozenHeadLoss(torch.autograd.Function):
    """The loss through a head without trained parameters, with its gradient (N, D) made in the same pass."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, target_N: Tensor, head: Callable, size: int) -> tuple[Tensor, Tensor]:
        wants_grad = ctx.needs_input_grad[0]
        losses, hits = [], []
        gradient_ND = torch.empty_like(hidden_ND) if wants_grad else None
        for start in range(0, len(target_N), size):
            chunk = slice(start, start + size)
            hidden_nD = hidden_ND[chunk].detach().requires_grad_(wants_grad)
            with torch.set_grad_enabled(wants_grad):
                loss_n, hit_n = _chunk_loss(hidden_nD, target_N[chunk], head)
                if gradient_ND is not None:
                    gradient_ND[chunk] = torch.autograd.grad(loss_n.sum(), hidden_nD)[0]
            losses.append(loss_n.detach())
            hits.append(hit_n)
        if gradient_ND is not None:
            ctx.save_for_backward(gradient_ND)
        hit_N = torch.cat(hits)
        ctx.mark_non_differentiable(hit_N)
        return torch.cat(losses), hit_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_ND,) = ctx.saved_tensors
        return (gradient_ND * gradients[0][:, None]).to(gradient_ND.dtype), None, None, None


def _chunk_loss(hidden_nD: Tensor, target_n: Tensor, head: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    logits_nV = _at_least_float32(head(hidden_nD))
    return F.cross_entropy(logits_nV, target_n, reduction="none"), logits_nV.detach().argmax(-1) == target_n


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mean_or_zero(values_N: Tensor) -> Tensor:
    """The mean, or a zero that still carries a gradient when there is nothing to average."""
    return values_N.sum() / max(len(values_N), 1)
