"""Where the heads of the cycles are in a training row.

The phase of a token is its distance from the head of its cycle: 0 at heads, 1 .. cycle_length-1 at the others. With
`prompt_gate="full"` an answer's cycles count from the last token before it, which is a head, and prompt tokens are no part
of any cycle (PROMPT). Text without a prompt counts from a random offset per document. With "cyclic" everything counts from
the start of the document. Phases are counted per document, so padding and packing never shift them.

For a prompt of 3 tokens, an answer of 5 and cycle length 3, gate "full" (P is PROMPT)::

    token   p p p a a a a a
    phase   P P P 1 2 0 1 2        the last p acts as head: it yields the first answer token

Legend: B rows, T tokens, N documents.
"""

import torch
from torch import Tensor

from polydecode.methods.batch import Batch
from polydecode.ops.sampling import RowGenerators

PROMPT = -1


def phases(batch: Batch, cycle_length_N: Tensor, prompt_gate: str, generator: RowGenerators | None) -> Tensor:
    """Phase (B, T) of every token, PROMPT for prompt tokens under "full".

    `cycle_length_N` has one entry per document (per row, where rows are not packed). `generator` draws the offset of
    documents without a prompt; None means offset 0.
    """
    position_BT = batch.position_ids()
    number_BT = batch.document_numbers()
    cycle_BT = cycle_length_N[number_BT]
    if prompt_gate == "cyclic":
        return position_BT % cycle_BT
    index_T = torch.arange(position_BT.shape[1], device=position_BT.device)
    is_prompt_BT = batch.is_prompt.bool()
    document_start_BT = index_T - position_BT
    after_prompt_BT = torch.zeros_like(is_prompt_BT)
    after_prompt_BT[:, 1:] = is_prompt_BT[:, :-1]
    answer_start_BT = ~is_prompt_BT & (after_prompt_BT | (position_BT == 0))
    run_start_BT = torch.where(answer_start_BT, index_T, 0).cummax(1).values
    from_prompt_BT = run_start_BT > document_start_BT
    offset_BT = _offsets(batch, cycle_length_N, generator)[number_BT]
    since_head_BT = torch.where(from_prompt_BT, index_T - (run_start_BT - 1), index_T - run_start_BT - offset_BT)
    return torch.where(is_prompt_BT, PROMPT, since_head_BT % cycle_BT)


def _offsets(batch: Batch, cycle_length_N: Tensor, generator: RowGenerators | None) -> Tensor:
    """An offset (N,) in [0, cycle_length) for each document, drawn for those that do not open with a prompt."""
    offset_N = torch.zeros_like(cycle_length_N)
    if generator is None:
        return offset_N
    number_BT = batch.document_numbers()
    for i in range(len(offset_N)):
        row, column = (number_BT == i).nonzero()[0].tolist()
        if not bool(batch.is_prompt[row, column]):
            offset_N[i] = torch.randint(0, int(cycle_length_N[i]), (1,), generator=generator.row(i))[0]
    return offset_N
