"""Examples and their batches: token rows that know what is prompt and what is trained.

Legend: B rows, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase


@dataclass
class Example:
    """One document: token ids, which of them are prompt, which are targets; `example_id` is its place in the data.

    `content_hash`: 63 bits of a hash of the document, which put it into the training or the held-out part; -1 when it came
    from no file.
    """

    input_ids: list[int]
    is_prompt: list[bool]
    loss_mask: list[bool]
    example_id: int = 0
    content_hash: int = -1


class Examples(Dataset):
    """A sequence of examples as a dataset; they are read when they are asked for."""

    def __init__(self, examples: Sequence[Example]):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> Example:
        return self.examples[i]


STREAM_PLACE = "stream_place"
"""Beside the tensors of a batch of packed rows from a stream: (window, number) of its last row."""


class Collator:
    """Examples, or packed rows of them, to right-padded tensors (B, T), by the names of `Batch`."""

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Example] | Sequence[list[Example]]) -> dict[str, Tensor]:
        packed = [row if isinstance(row, list) else [row] for row in rows]
        width = max(1, *(sum(len(e.input_ids) for e in row) for row in packed))

        def pad(values: list[list], value: int, to: int = width) -> Tensor:
            return torch.tensor([[int(x) for x in row] + [value] * (to - len(row)) for row in values])

        def joined(name: str) -> list[list]:
            return [[x for e in row for x in getattr(e, name)] for row in packed]

        input_ids = joined("input_ids")
        tensors = {
            "input_ids": pad(input_ids, self.pad_token_id),
            "attention_mask": pad([[1] * len(ids) for ids in input_ids], 0),
            "is_prompt": pad(joined("is_prompt"), 0).bool(),
            "loss_mask": pad(joined("loss_mask"), 0).bool(),
        }
        most = max(map(len, packed))
        ids_BM = pad([[e.example_id for e in row] for row in packed], -1, most)
        if not isinstance(rows[0], list):
            return tensors | {"example_ids": ids_BM[:, 0]}
        documents = [[d for d, e in enumerate(row) for _ in e.input_ids] for row in packed]
        tensors |= {"document_ids": pad(documents, most), "example_ids": ids_BM}
        last: Any = rows[-1]
        if hasattr(last, "window"):
            tensors[STREAM_PLACE] = torch.tensor([last.window, last.number])
        return tensors


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token id to fill rows with; what is padding is told by the attention mask, never by this id."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0
