"""What goes into and comes out of a method's verbs: batches, losses, findings, steps, scores, and prompts moved to the left.

Legend: B rows, P prompt tokens, T tokens, K most tokens a step commits.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polydecode.errors import UserError
from polydecode.ops.distillation import SourceDistribution


@dataclass
class Batch:
    """Token rows with what a loss needs to know about them; every tensor is (B, T).

    `attention_mask`: real tokens, padding on the right. `is_prompt`: context that is given, not produced. `loss_mask`: the
    tokens that are targets. `document_ids`: which document of a packed row a token belongs to, padding to none of them (None:
    one per row); text without a prompt has `is_prompt` false everywhere. `example_ids`: the example of each row (B,), or of
    each document of packed rows (B, most documents), -1 where a row has fewer. `source`: what a source model
    says of the targets, to learn from beside them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    is_prompt: Tensor
    loss_mask: Tensor
    document_ids: Tensor | None = None
    example_ids: Tensor | None = None
    source: SourceDistribution | None = None

    def position_ids(self) -> Tensor:
        """Positions (B, T) counted from the start of each document."""
        index_T = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        if self.document_ids is None:
            return index_T[None].expand_as(self.input_ids)
        changed_BT = torch.ones_like(self.input_ids, dtype=torch.bool)
        changed_BT[:, 1:] = self.document_ids[:, 1:] != self.document_ids[:, :-1]
        starts_BT = torch.where(changed_BT, index_T, 0).cummax(1).values
        return index_T - starts_BT

    def document_numbers(self) -> Tensor:
        """The document (B, T) of each token, counted from 0 through the whole batch, row by row: the row number where rows are
        not packed. Padding has the number of what stands before it."""
        starts_BT = self.position_ids() == 0
        if self.document_ids is not None:  # a row of padding alone is a document too
            starts_BT[:, 1:] &= self.attention_mask[:, 1:].bool()
        return starts_BT.flatten().long().cumsum(0).view_as(starts_BT) - 1

    def num_documents(self) -> int:
        """How many documents there are: the rows, where they are not packed."""
        return int(self.document_numbers()[-1, -1]) + 1

    def predicted(self) -> Tensor:
        """Targets (B, T) that a token before them in their document can predict: not a document's first token."""
        return self.loss_mask.bool() & (self.position_ids() > 0)


@dataclass
class LossOutput:
    """`loss`: mean over the batch's `num_targets` targets, with gradient. `sums`: detached named sums for logging, where
    a name `x` is reported as sums["x"] / sums["x_count"] when there is such a count."""

    loss: Tensor
    num_targets: int
    sums: dict[str, float] = field(default_factory=dict)


@dataclass
class TrainingPass:
    """What a loss costs for one row: `tokens` that the layers read, `targets` that may be predicted at most, and whether the
    attention needs a mask beyond causality."""

    tokens: int
    targets: int
    has_mask: bool = False


@dataclass
class Finding:
    """Something to know before training. `level`: "ok", "warn" or "fail"; `mend`: what to do about it."""

    name: str
    level: str
    says: str
    mend: str = ""


@dataclass
class Step:
    """Tokens handed out by one step: `tokens` (B, K), of which the first `num_committed` (B,) of each row are real; a method
    that fills places out of order may have none for a row now and then. `forwards`: what the step cost, in forwards of the
    whole model. `drafts`: per row the tokens after those, as far as they are known, for a display; None where there are none.
    """

    tokens: Tensor
    num_committed: Tensor
    forwards: float
    drafts: list[list[int]] | None = None


@dataclass
class Score:
    """`log_likelihood` (B,): sum over each row's targets, natural log. `exact`: False for a stated estimate."""

    log_likelihood: Tensor
    num_targets: Tensor
    exact: bool


@dataclass
class Rows:
    """Prompt rows moved to the left: row b holds its `length_B[b]` real tokens first, then padding that is never read."""

    input_ids_BP: Tensor
    length_B: Tensor

    @property
    def equal(self) -> bool:
        """Whether all rows have the same length."""
        return bool((self.length_B == self.input_ids_BP.shape[1]).all())


def left_aligned(input_ids: Tensor, attention_mask: Tensor | None) -> Rows:
    """Rows with their real tokens first, whatever side the padding was on, so that slot = position in every row.

    Raises `UserError` for empty prompts and for shapes or values that are no mask.
    """
    if input_ids.dim() != 2 or input_ids.shape[1] == 0 or input_ids.shape[0] == 0:
        raise UserError(
            f"input_ids has shape {tuple(input_ids.shape)}; it must be (rows, tokens) with at least one token"
        )
    if attention_mask is None:
        return Rows(input_ids, input_ids.new_full((input_ids.shape[0],), input_ids.shape[1]))
    if attention_mask.shape != input_ids.shape:
        raise UserError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}; they must be equal"
        )
    real_BP = attention_mask.to(input_ids.device).bool()
    length_B = real_BP.sum(1)
    if not bool((length_B > 0).all()):
        raise UserError("a row of attention_mask is all zeros: every prompt needs at least one token")
    order_BP = torch.argsort((~real_BP).to(torch.int8), dim=1, stable=True)
    return Rows(input_ids.gather(1, order_BP)[:, : int(length_B.max())], length_B)


def per_row(name: str, value: Any, rows: int) -> list[Any]:
    """An option's `value` for each row: a list or tensor of as many entries, or the same for all. `UserError` otherwise."""
    values = value.tolist() if isinstance(value, Tensor) else value
    values = list(values) if isinstance(values, (list, tuple)) else [values] * rows
    if len(values) != rows:
        raise UserError(f"{name} has {len(values)} entries for {rows} rows; give one, or one per row")
    return values
