"""Attention patterns as predicates of query and key, and the one place that turns them into a mask.

A predicate takes index tensors that broadcast to (B, Q, K) and answers True where the query may read the key. The same
predicate serves SDPA (boolean mask) and eager attention (additive mask): a boolean mask handed to eager attention is
added to the scores and silently gives wrong logits, so `materialise` owns that conversion.

Legend: B rows, Q queries, K keys.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from polydecode.errors import UserError

Predicate = Callable[[Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor) -> Tensor:
    """A token reads itself and what came before.

    For 4 tokens (rows are queries)::

        1 0 0 0
        1 1 0 0
        1 1 1 0
        1 1 1 1
    """
    return k <= q


def sliding_window(window: int) -> Predicate:
    """A token reads at most the last `window` tokens, itself included; causal.

    For 4 tokens and window 2::

        1 0 0 0
        1 1 0 0
        0 1 1 0
        0 0 1 1
    """
    return lambda q, k: (k <= q) & (q - k < window)


def same_document(allowed: Predicate, document_q: Tensor, document_k: Tensor) -> Predicate:
    """`allowed`, but never across documents packed into one row; document ids broadcast like the indices.

    For documents 0 0 1 1 and `causal`::

        1 0 0 0
        1 1 0 0
        0 0 1 0
        0 0 1 1
    """
    return lambda q, k: allowed(q, k) & (document_q == document_k)


def materialise(allowed_BQK: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    """The mask (B, 1, Q, K) that the attention `implementation` expects: boolean for SDPA, additive for eager.

    The additive mask holds 0 and the most negative finite value of `dtype`, never -inf, so a sum of two masks stays
    finite and a row that may read nothing averages instead of giving NaN.
    """
    mask_B1QK = allowed_BQK[:, None]
    if implementation == "sdpa":
        return mask_B1QK
    if implementation == "eager":
        additive_B1QK = torch.zeros(mask_B1QK.shape, dtype=dtype, device=mask_B1QK.device)
        return additive_B1QK.masked_fill_(~mask_B1QK, torch.finfo(dtype).min)
    raise UserError(
        f"attention implementation {implementation!r} is not supported here (allowed: eager, sdpa); "
        "load the model with attn_implementation='sdpa'"
    )
