"""The training row [noisy ; clean]: what each token is, and what it may read.

The clean half is the row as it is. The noisy half repeats its answer tokens, some of them masked, at the same positions (a
prompt is never masked, so nobody would read a noisy copy of it). Blocks count from an answer's first token, and from the
document's start for text without a prompt; block numbers rise along the row, so that packed documents and later answers
never share one. Each prompt is a block of its own. After an end token the noisy half goes on to the end of the block with
filling, which repeats the end token: in decoding a block is always whole, so the places behind the end must be known ones.

For an answer of 4 tokens, block size 2, no prompt (rows are queries, columns keys, noisy then clean)::

    1 1 0 0  0 0 0 0
    1 1 0 0  0 0 0 0
    0 0 1 1  1 1 0 0
    0 0 1 1  1 1 0 0
    0 0 0 0  1 1 0 0
    0 0 0 0  1 1 0 0
    0 0 0 0  1 1 1 1
    0 0 0 0  1 1 1 1

With attention to a noisy or bidirectional context there is one copy only: the noisy answers, and the prompts as they are.

Legend: B rows, T tokens of a row, A noisy tokens of a row, C context tokens, S = A + C.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from polydecode.methods.batch import Batch
from polydecode.ops.masks import Pattern

CONTEXT = -1
"""The `copy` of a token that is context as it is; noisy copies count from 0."""


@dataclass
class Places:
    """What each token of a pass is; all (B, S). `token`: its id, the true one. `block`, `place`: its block and its place
    inside. `column`: where it stands in its row. `document`: its number in the batch. `copy`: CONTEXT or the number of the noisy
    copy. `is_filling`: stands behind an end token."""

    token: Tensor
    block: Tensor
    place: Tensor
    column: Tensor
    position: Tensor
    document: Tensor
    copy: Tensor
    is_prompt: Tensor
    is_real: Tensor
    is_filling: Tensor
    is_target: Tensor

    def joined(self, other: "Places") -> "Places":
        """These tokens, then `other`'s, along the row."""
        return Places(**{f.name: torch.cat([getattr(self, f.name), getattr(other, f.name)], 1) for f in fields(self)})

    def to(self, device: torch.device) -> "Places":
        """The same on `device`."""
        return Places(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def read_batch(batch: Batch, block_size_N: Tensor) -> Places:
    """The places (B, T) of a batch's tokens as they are, on the CPU; a block size per document (per row, where rows are not
    packed)."""
    number_BT = batch.document_numbers().cpu()
    position_BT = batch.position_ids().cpu()
    is_prompt_BT = batch.is_prompt.bool().cpu()
    index_T = torch.arange(position_BT.shape[1])
    starts_run_BT = torch.ones_like(is_prompt_BT)
    starts_run_BT[:, 1:] = (is_prompt_BT[:, 1:] != is_prompt_BT[:, :-1]) | (position_BT[:, 1:] == 0)
    in_run_BT = index_T - torch.where(starts_run_BT, index_T, 0).cummax(1).values
    place_BT = torch.where(is_prompt_BT, in_run_BT, in_run_BT % block_size_N[number_BT])
    starts_block_BT = starts_run_BT | (~is_prompt_BT & (place_BT == 0))
    zeros_BT = torch.zeros_like(position_BT)
    return Places(
        token=batch.input_ids.cpu(),
        block=starts_block_BT.long().cumsum(1),
        place=place_BT,
        column=index_T.expand_as(position_BT),
        position=position_BT,
        document=number_BT,
        copy=zeros_BT + CONTEXT,
        is_prompt=is_prompt_BT,
        is_real=batch.attention_mask.bool().cpu(),
        is_filling=torch.zeros_like(is_prompt_BT),
        is_target=batch.loss_mask.bool().cpu() & ~is_prompt_BT,
    )


def noisy_half(clean: Places, block_size_N: Tensor, end_ids: set[int], context: int | None = None) -> Places:
    """One copy (B, A) of the answers, each continued with filling behind an end token (`end_ids`; empty: no filling) up to
    the end of its block, or of the model's `context`, where decoding ends a block too."""
    answer_BT = clean.is_real & ~clean.is_prompt
    rows_N, columns_N = answer_BT.nonzero(as_tuple=True)
    is_last_BT = torch.ones_like(answer_BT)
    is_last_BT[:, :-1] = ~answer_BT[:, 1:] | (clean.position[:, 1:] == 0)
    is_end_N = torch.isin(clean.token[rows_N, columns_N], torch.tensor(sorted(end_ids), dtype=torch.long))
    filled_N = is_last_BT[rows_N, columns_N] & is_end_N & clean.is_target[rows_N, columns_N]
    room_N = block_size_N[clean.document[rows_N, columns_N]] - 1 - clean.place[rows_N, columns_N]
    if context is not None:
        room_N = torch.minimum(room_N, (context - 1 - clean.position[rows_N, columns_N]).clamp_min(0))
    repeats_N = 1 + torch.where(filled_N, room_N, 0)
    offset_M = _count_up(repeats_N)
    rows_M, columns_M = rows_N.repeat_interleave(repeats_N), columns_N.repeat_interleave(repeats_N)
    slot_M = _count_up(torch.bincount(rows_M, minlength=len(answer_BT)))
    width = int(slot_M.max()) + 1 if len(slot_M) else 0

    def scattered(values_M: Tensor) -> Tensor:
        out_BA = torch.zeros(len(answer_BT), width, dtype=values_M.dtype)
        out_BA[rows_M, slot_M] = values_M
        return out_BA

    picked = {f.name: getattr(clean, f.name)[rows_M, columns_M] for f in fields(clean)}
    picked["place"] = picked["place"] + offset_M
    picked["position"] = picked["position"] + offset_M
    picked["is_filling"] = offset_M > 0
    picked["copy"] = torch.zeros_like(offset_M)
    return Places(**{name: scattered(values_M) for name, values_M in picked.items()})


def _count_up(lengths: Tensor) -> Tensor:
    """0..n-1 for each length n, one after the other."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)


def context_half(clean: Places, attention: str) -> Places:
    """The context (B, C) that is read as it is: everything for a clean context, else the prompts alone."""
    if attention == "clean_context":
        return clean
    kept_BT = clean.is_real & clean.is_prompt
    width = int(kept_BT.sum(1).max())
    order_BC = torch.argsort((~kept_BT).to(torch.int8), dim=1, stable=True)[:, :width]
    kept = Places(**{f.name: getattr(clean, f.name).gather(1, order_BC) for f in fields(clean)})
    return replace(kept, is_real=kept_BT.gather(1, order_BC))


def copies(noisy: Places, draws: int) -> Places:
    """`draws` copies of the noisy half, side by side (B, draws * A), numbered."""
    width = noisy.token.shape[1]
    number = torch.arange(draws).repeat_interleave(width).expand(len(noisy.token), -1)
    repeated = {f.name: getattr(noisy, f.name).repeat(1, draws) for f in fields(noisy)}
    return Places(**(repeated | {"copy": number}))


def predictors(noisy: Places, context: Places) -> Tensor:
    """For each noisy token (B, A) the index in [noisy ; context] of the token before it, -1 where there is none."""
    rows, width = noisy.token.shape
    length = int(max(noisy.column.max() if width else 0, context.column.max() if context.token.shape[1] else 0)) + 2
    where_BT = torch.full((rows, length), -1)
    row_BC = torch.arange(rows)[:, None].expand_as(context.token)
    real_BC = context.is_real
    index_BC = (width + torch.arange(context.token.shape[1])).expand_as(context.token)
    where_BT[row_BC[real_BC], context.column[real_BC]] = index_BC[real_BC]
    index_BA = torch.arange(width).expand_as(noisy.token)
    before_BA = where_BT.gather(1, (noisy.column - 1).clamp_min(0))
    inside_BA = (noisy.place > 0) | (before_BA < 0)
    before_BA = torch.where(inside_BA, index_BA - 1, before_BA)
    return before_BA.masked_fill(noisy.position == 0, -1)


def attention_pattern(places: Places, attention: str, prompt_attention: str) -> Pattern:
    """What each token of a pass may read.

    clean_context is M_BD | M_OBC | M_BC of the paper (figure 2d), noisy_context is block-causal over one copy (2c),
    bidirectional is all of the document (2b). Filling is for its own block and what stands before it: a later turn follows
    the end token. A token reads itself whatever else, so that padding reads something.
    """
    block, copy, document, position = places.block, places.copy, places.document, places.position
    is_prompt, is_real, is_filling = places.is_prompt, places.is_real, places.is_filling

    def allowed(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block_q, block_k = block[b, q], block[b, k]
        same_document = (document[b, q] == document[b, k]) & is_real[b, k] & is_real[b, q]
        same_document = same_document & (~is_filling[b, k] | (block_q <= block_k))
        if attention == "bidirectional":
            return same_document | (q == k)
        if attention == "noisy_context":
            pair = block_q >= block_k
        else:
            copy_q, copy_k = copy[b, q], copy[b, k]
            block_diagonal = (block_q == block_k) & (copy_q == copy_k)
            offset_block_causal = (copy_q != CONTEXT) & (copy_k == CONTEXT) & (block_q > block_k)
            block_causal = (copy_q == CONTEXT) & (copy_k == CONTEXT) & (block_q >= block_k)
            pair = block_diagonal | offset_block_causal | block_causal
        if prompt_attention == "causal":
            inside_prompt = is_prompt[b, q] & is_prompt[b, k] & (block_q == block_k)
            pair = pair & ~(inside_prompt & (position[b, k] > position[b, q]))
        return (pair & same_document) | (q == k)

    return allowed
