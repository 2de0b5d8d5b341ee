"""Text embeddings: the mean of the last hidden states, with the method's own attention.

An autoregressive model reads causally, a block-diffusion model on both sides, which is the comparison of Efficient-DLM's table 4.

Legend: N texts, B texts of a batch, T tokens, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polydecode.data import pad_token_id
from polydecode.errors import UserError
from polydecode.methods.base import ParallelDecoder
from polydecode.methods.batch import Batch


@dataclass
class EmbedOutput:
    """`embeddings` (N, D) float32 on the CPU, in the order of the texts. `num_tokens`: read per text. `num_truncated`: texts
    that were cut."""

    embeddings: Tensor
    num_tokens: list[int]
    num_truncated: int


def text_fault(text: str) -> str | None:
    """What keeps `text` from being embedded, as words after its place; None for a good text."""
    if not text.strip():
        return "is empty"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not Unicode text (half of a surrogate pair)"
    return None


@torch.inference_mode()
def embed_texts(
    model: ParallelDecoder,
    tokenizer: Any,
    texts: Sequence[str],
    batch_size: int = 16,
    max_length: int = 0,
    normalize: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> EmbedOutput:
    """The embeddings of `texts`; a text's does not depend on the others.

    `max_length`: tokens read of a text at most; 0 means the model's context. `normalize`: to length 1. `progress` is told how
    many are done. Raises `UserError` for no texts, an empty text, a length beyond the context, or a vector that is not finite.
    """
    context = model.config.max_position_embeddings
    if not 0 <= max_length <= context:
        raise UserError(
            f"max_length is {max_length}; it must be from 1 to the model's context of {context}, or 0 for it"
        )
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; it must be 1 or more")
    if not texts:
        raise UserError("there are no texts to embed")
    longest = max_length or context
    whole = []
    for number, text in enumerate(texts, 1):
        fault = text_fault(text)
        whole.append([] if fault else tokenizer(text)["input_ids"])
        if not whole[-1]:
            raise UserError(f"text {number} {fault or 'has no tokens'}")
    rows = [ids[:longest] for ids in whole]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    out_ND = torch.empty(len(rows), model.config.hidden_size)
    pad = pad_token_id(tokenizer)
    model.eval()
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        width = len(rows[chosen[-1]])
        ids_BT = torch.tensor([rows[i] + [pad] * (width - len(rows[i])) for i in chosen], device=model.device)
        lengths_B1 = torch.tensor([[len(rows[i])] for i in chosen], device=model.device)
        mask_BT = (torch.arange(width, device=model.device) < lengths_B1).long()
        embedded_BD = model.embed(Batch(ids_BT, mask_BT, mask_BT.bool(), torch.zeros_like(mask_BT).bool()))
        out_ND[chosen] = embedded_BD.float().cpu()
        progress(start + len(chosen))
    broken = (~out_ND.isfinite().all(1)).nonzero()[:, 0].tolist()
    if broken:
        raise UserError(
            f"the vector of text {broken[0] + 1} is not finite in {model.dtype}; use float32 or other weights"
        )
    if normalize:
        out_ND = torch.nn.functional.normalize(out_ND, dim=1)
    cut = sum(len(ids) > longest for ids in whole)
    return EmbedOutput(out_ND, [len(row) for row in rows], cut)
