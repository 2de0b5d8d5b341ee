"""Examples and their batches: token rows that know what is prompt and what is trained.

Legend: B rows, T tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from polydecode.config import DataConfig
from polydecode.errors import UserError


@dataclass
class Example:
    """One document: token ids, which of them are prompt, which are targets; `example_id` is its place in the data."""

    input_ids: list[int]
    is_prompt: list[bool]
    loss_mask: list[bool]
    example_id: int = 0


class Examples(Dataset):
    """A list of examples as a dataset."""

    def __init__(self, examples: Sequence[Example]):
        self.examples = list(examples)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> Example:
        return self.examples[i]


def split_held_out(examples: Sequence[Example], config: DataConfig) -> tuple[list[Example], list[Example]]:
    """(training, held-out): held out are those whose content hashes below `eval_fraction`, wherever they stand."""
    train: list[Example] = []
    held_out: list[Example] = []
    for example in examples:
        digest = hashlib.sha256(str(example.input_ids).encode()).digest()
        below = int.from_bytes(digest[:8], "big") / 2**64 < config.eval_fraction
        (held_out if below else train).append(example)
    if not train:
        raise UserError("all examples are held out; lower eval_fraction or give more data")
    return train, held_out[: config.max_eval_examples]


class Collator:
    """Examples, or packed rows of them, to right-padded tensors (B, T), by the names of `Batch`."""

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Example] | Sequence[list[Example]]) -> dict[str, Tensor]:
        packed = [row if isinstance(row, list) else [row] for row in rows]
        width = max(sum(len(e.input_ids) for e in row) for row in packed)

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
        return tensors | {"document_ids": pad(documents, most), "example_ids": ids_BM}


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token id to fill rows with; what is padding is told by the attention mask, never by this id."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0
