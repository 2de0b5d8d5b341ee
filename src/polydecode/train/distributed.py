"""What several processes must agree on: who reads which examples, when to stop, and how long the run has taken.

One process and many consume the same examples in the same steps: `batch_size` is the global batch, an epoch's order is one
permutation by (seed, epoch), and an uneven last batch is filled up with blank rows, which have no targets, instead of
examples a second time.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, Sampler

from polydecode.data import Example
from polydecode.errors import UserError
from polydecode.ops.sampling import mix_seed

_ORDER = 0x5EED
"""Sets the order of an epoch apart from its noise."""


def world_size() -> int:
    """Processes of this run, as torchrun or accelerate tell them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this is the process that tells and writes."""
    return os.environ.get("RANK", "0") == "0"


def check_can_shard() -> None:
    """Raise `UserError` where accelerate has nothing to shard over."""
    if not torch.cuda.is_available():
        raise UserError("fsdp needs GPUs: accelerate does not shard on the CPU")


def split_batch(batch_size: int, micro_batch_size: int, processes: int) -> tuple[int, int]:
    """(examples per forward, forwards per step) of each process. `UserError` when the batch does not divide."""
    if batch_size % processes:
        raise UserError(
            f"batch_size {batch_size} is over all processes and is not a multiple of their number, {processes}"
        )
    share = batch_size // processes
    micro = micro_batch_size or share
    if share % micro:
        raise UserError(
            f"micro_batch_size {micro} does not divide the {share} examples of each of {processes} processes "
            f"(batch_size {batch_size})"
        )
    return micro, share // micro


class Rows(Dataset):
    """The training rows, and behind them blank ones up to a multiple of `multiple`."""

    def __init__(self, rows: Any, multiple: int, packed: bool):
        self.rows = rows
        self.real = len(rows)
        self.total = -(-self.real // multiple) * multiple
        blank = Example([], [], [], example_id=-1)
        self.blank: Any = [blank] if packed else blank

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, i: int) -> Any:
        return self.rows[i] if i < self.real else self.blank


class EpochOrder(Sampler):
    """One permutation of the real rows per (seed, epoch), the blank ones last."""

    def __init__(self, rows: Rows, seed: int, epoch: Callable[[], int]):
        self.rows, self.seed, self.epoch = rows, seed, epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(mix_seed(self.seed, self.epoch(), _ORDER))
        yield from torch.randperm(self.rows.real, generator=generator).tolist()
        yield from range(self.rows.real, len(self.rows))


def make_whole(model: nn.Module) -> None:
    """Replace sharded parameters (FSDP2) by whole ones on the CPU, tied ones staying tied; every process must ask."""
    whole: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves some gathered
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in whole:
                full = parameter.detach().full_tensor().cpu()
                whole[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
            module._parameters[name] = whole[id(parameter)]


@contextmanager
def among_others() -> Iterator[None]:
    """Tell in one line that this process was left alone by another, which says itself why it ended."""
    try:
        yield
    except RuntimeError as error:
        if world_size() == 1 or not any(words in str(error) for words in _LEFT_ALONE):
            raise
        raise UserError("another process of this run has ended; its message says why") from error


_LEFT_ALONE = ("Connection closed by peer", "Connection reset by peer", "remote process exited")


def any_of_them(flag: bool, device: torch.device) -> bool:
    """Whether any process says so; every process must ask."""
    if world_size() == 1:
        return flag
    told = torch.tensor(float(flag), device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told)


def of_the_first(value: float, device: torch.device) -> float:
    """The first process's value, for all; every process must ask."""
    if world_size() == 1:
        return value
    told = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(told, src=0)
    return float(told)


def of_the_last(values: tuple[float, ...], device: torch.device) -> tuple[float, ...]:
    """The last process's values, for all; every process must ask."""
    if world_size() == 1:
        return values
    told = torch.tensor(values, dtype=torch.float64, device=device)
    dist.broadcast(told, src=world_size() - 1)
    return tuple(told.tolist())


def summed(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Each value summed over the processes, which all have the same names."""
    if world_size() == 1 or not values:
        return values
    names = sorted(values)
    told = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(told)
    return dict(zip(names, told.tolist(), strict=True))
