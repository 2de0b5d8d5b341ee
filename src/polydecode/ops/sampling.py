"""From logits to token ids, and random numbers that belong to a row.

Every row of a batch draws from its own generator, so what a row gets depends on its seed alone and never on its
neighbours, on the batch split, on workers or on ranks.

Legend: N logits, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from polydecode.errors import UserError

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1


def mix_seed(*parts: int) -> int:
    """One 63-bit seed from several integers (splitmix64 finaliser over each part), e.g. (seed, epoch, example)."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + _MIX) & ((1 << 64) - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
        state ^= state >> 31
    return state & _MASK


class RowGenerators:
    """One lazily made CPU generator per row; CPU so that a draw is the same on every device."""

    def __init__(self, seeds: Sequence[int]):
        self._seeds = [int(s) for s in seeds]
        self._made: dict[int, torch.Generator] = {}

    def __len__(self) -> int:
        return len(self._seeds)

    def row(self, i: int) -> torch.Generator:
        """The generator of row i."""
        if i not in self._made:
            self._made[i] = torch.Generator().manual_seed(self._seeds[i])
        return self._made[i]

    def select(self, rows: Sequence[int]) -> "RowGenerators":
        """The generators of `rows`, in that order, going on where they are."""
        chosen = RowGenerators([self._seeds[i] for i in rows])
        chosen._made = {new: self._made[old] for new, old in enumerate(rows) if old in self._made}
        return chosen

    def joined(self, other: "RowGenerators") -> "RowGenerators":
        """These generators and then `other`'s, each going on where it is."""
        both = RowGenerators(self._seeds + other._seeds)
        both._made = self._made | {len(self._seeds) + i: made for i, made in other._made.items()}
        return both

    def integers(self, high_B: Sequence[int]) -> list[int]:
        """One uniform integer in [0, high) per row."""
        return [int(torch.randint(0, h, (1,), generator=self.row(i))) for i, h in enumerate(high_B)]


def warpers(config: GenerationConfig) -> LogitsProcessorList:
    """Temperature, top-k, top-p and min-p of `config`; empty when it is greedy (do_sample false or temperature 0)."""
    if not is_sampling(config):
        return LogitsProcessorList()
    chain = LogitsProcessorList()
    if config.temperature is not None and config.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(float(config.temperature)))
    if config.top_k:
        chain.append(TopKLogitsWarper(top_k=int(config.top_k)))
    if config.top_p is not None and config.top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p=float(config.top_p)))
    if config.min_p:
        chain.append(MinPLogitsWarper(min_p=float(config.min_p)))
    return chain


def is_sampling(config: GenerationConfig) -> bool:
    """Whether `config` draws at random; temperature 0 means greedy."""
    return bool(config.do_sample) and config.temperature != 0


def check_sampling(config: GenerationConfig) -> None:
    """Refuse settings out of range, before any kernel sees them."""
    for name, low, high in (("temperature", 0.0, None), ("top_k", 0, None), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
        value = getattr(config, name, None)
        if value is None:
            continue
        if value < low or (high is not None and value > high) or value != value:
            allowed = f"from {low} to {high}" if high is not None else f"{low} or more"
            raise UserError(f"{name} is {value}; it must be {allowed}")


def draw(scores_NV: Tensor, generators: RowGenerators | None, rows: Sequence[int] | None = None) -> Tensor:
    """Token ids (N,): the most likely token when `generators` is None, else one draw each from softmax(scores).

    `rows`: whose generator each draws from, in order; None means one of each row. The draw is Gumbel-max in float32, on the
    CPU's random numbers: argmax(scores + Gumbel noise).
    """
    if generators is None or not len(scores_NV):
        return scores_NV.argmax(-1)
    owners = range(len(scores_NV)) if rows is None else rows
    uniform_NV = torch.stack([torch.rand(scores_NV.shape[-1], generator=generators.row(i)) for i in owners])
    gumbel_NV = -torch.log(-torch.log(uniform_NV.clamp_(1e-20, 1 - 1e-7)))
    return (scores_NV.float() + gumbel_NV.to(scores_NV.device)).argmax(-1)
