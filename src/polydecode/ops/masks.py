"""Attention patterns as predicates of query and key, and the one place that turns them into a mask.

A predicate takes positions that broadcast to (B, Q, K) and answers True where the query may read the key. A `Pattern` takes
row, query and key numbers instead and looks up what it needs; it serves attention whose rule is not one of positions, and
FlexAttention. The same function serves SDPA (boolean mask), eager attention (additive mask) and FlexAttention (BlockMask): a
boolean mask handed to eager attention is added to the scores and silently gives wrong logits, so this file owns the
conversion.

Legend: B rows, Q queries, K keys.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polydecode.errors import UserError

TILE = 128
"""Queries and keys of a tile of FlexAttention's masks."""
GRID_PAIRS = 2**26
"""Most pairs of queries and keys that are looked at together when a block mask is made (several bytes each)."""

Predicate = Callable[[Tensor, Tensor], Tensor]
Pattern = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(row, query, key) numbers, as tensors that broadcast to (B, Q, K) or as single numbers -> may the query read the key."""


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


def two_sided_window(window: int) -> Predicate:
    """A token reads what is less than `window` tokens away, on either side; the window of a model that reads its block.

    For 4 tokens and window 2::

        1 1 0 0
        1 1 1 0
        0 1 1 1
        0 0 1 1
    """
    return lambda q, k: (q - k).abs() < window


def mask_of(
    pattern: Pattern, shape: tuple[int, int, int], implementation: str, dtype: torch.dtype, device: torch.device
) -> Any:
    """The mask of `pattern` over (B, Q, K) for an attention `implementation`: see `materialise`; for "flex_attention" a
    BlockMask, in the making of which at most GRID_PAIRS of the grid exist at a time."""
    if implementation == "flex_attention":
        return _block_mask(pattern, shape, device)
    b, q, k = (torch.arange(n, device=device) for n in shape)
    return materialise(pattern(b[:, None, None], q[:, None], k).expand(shape), implementation, dtype)


def _block_mask(pattern: Pattern, shape: tuple[int, int, int], device: torch.device) -> Any:
    """A BlockMask of 128 x 128 tiles: which tiles are read whole, and which in part, so that the kernel asks `pattern` in the
    latter alone. torch's `create_block_mask` holds the whole grid, or compiles anew for new lengths."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, queries, keys = shape
    across, down = -(-keys // TILE), -(-queries // TILE)
    b_B11, k_K = torch.arange(rows, device=device)[:, None, None], torch.arange(keys, device=device)
    step = TILE * max(1, GRID_PAIRS // (rows * across * TILE * TILE))
    counts = []
    for start in range(0, queries, step):
        q_Q1 = torch.arange(start, min(start + step, queries), device=device)[:, None]
        allowed_BQK = pattern(b_B11, q_Q1, k_K).expand(rows, len(q_Q1), keys)
        padded_BQK = F.pad(allowed_BQK, (0, across * TILE - keys, 0, -len(q_Q1) % TILE))
        counts.append(padded_BQK.view(rows, -1, TILE, across, TILE).sum((2, 4), dtype=torch.int32))
    count_B1QK = torch.cat(counts, 1)[:, None]
    assert count_B1QK.shape == (rows, 1, down, across)
    whole, some = count_B1QK == TILE * TILE, count_B1QK > 0
    partly = _tile_list(some & ~whole), _tile_list(whole)
    return BlockMask.from_kv_blocks(
        *partly[0],
        *partly[1],
        BLOCK_SIZE=TILE,
        mask_mod=lambda b, h, q, k: pattern(b, q, k),
        seq_lengths=(queries, keys),
    )


def _tile_list(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(how many tiles of each row are chosen, their numbers first and in order), as FlexAttention wants them."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


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
        f"attention implementation {implementation!r} is not supported here (allowed: eager, sdpa, flex_attention); "
        "load the model with attn_implementation='sdpa'"
    )
