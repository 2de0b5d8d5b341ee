"""How much memory a training run will take, before it starts.

Everything is counted, not guessed by a formula per architecture: weights, gradients and optimiser states from the
parameters that are there and trained, activations by running the model's own forward on fake tensors (shapes without
memory) and adding up what autograd would keep. What a method reads per example it says itself (`training_pass`).

Calibration: measured on a CPU as the largest resident memory of whole runs in a process of their own (random llamas of 20 to
50 million parameters, dmtd, block diffusion and adapters), the estimate was 1.16 to 1.36 times the measured peak;
tests/test_memory.py holds it between 1 and 1.6. Fused attention keeps less than the fake run counts, which pays for what the
allocator wastes. GPU numbers follow from the same counts and have not been measured.

Legend: B rows of a micro batch, S tokens the layers read per row, N predicted tokens, D width, V vocabulary.
"""

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from polydecode.config import TrainConfig
from polydecode.data import Example, Examples, lengths
from polydecode.methods.base import ParallelDecoder
from polydecode.ops.losses import chunk_size
from polydecode.train.distributed import split_batch, world_size

GIGABYTE = 1e9
PROCESS_BYTES = 0.85e9
"""Python and its libraries in a training process on a CPU (0.6 GB before, 0.7 to 0.8 GB after a step); on a GPU, the context of
CUDA."""
WASTE_BYTES = 0.3e9
"""What the CPU's allocator keeps of freed activations between the steps, at most (measured: none with blocks of 1 MB mapped)."""
ADAM_BYTES = 8
"""AdamW's two moments in float32, per trained parameter."""
MASK_BYTES = 10
"""Of a materialised attention mask and what it is made of, per pair of tokens."""
PROBE_TOKENS = (67, 131)
"""Lengths of the fake runs: primes, so that a pair of them in a shape can only be attention weights, which fused attention
does not keep."""


@dataclass
class MemoryEstimate:
    """Bytes at the peak of a run in one process, by use; `rows`, `tokens` describe the largest micro batch."""

    process: float
    weights: float
    gradients: float
    optimiser: float
    activations: float
    logits: float
    largest_layer: float
    rows: int
    tokens: int

    @property
    def total(self) -> float:
        """One process that holds everything; loading a checkpoint may hold the weights twice."""
        run = self.weights + self.gradients + self.optimiser + self.activations + self.logits
        return self.process + max(run, 2 * self.weights)

    def per_process(self, world_size: int, sharded: bool) -> float:
        """Bytes in each of `world_size` processes: replicated (DDP, which keeps a second copy of the gradients in its buckets),
        or with weights, gradients and optimiser states sharded (FSDP2, which gathers a layer and the next one)."""
        if world_size == 1:
            return self.total
        states = self.weights + self.gradients + self.optimiser
        states = states / world_size + 2 * self.largest_layer if sharded else states + self.gradients
        return self.process + states + self.activations + self.logits

    def line(self) -> str:
        """The estimate in one line."""
        parts = ("weights", "gradients", "optimiser", "activations", "logits", "process")
        told = ", ".join(f"{name} {gigabytes(getattr(self, name))}" for name in parts)
        return f"estimated peak memory {gigabytes(self.total)}: {told} ({self.rows} x {self.tokens} tokens per forward)"


def gigabytes(count: float) -> str:
    """Bytes as "3.1 GB"."""
    return f"{count / GIGABYTE:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


def estimate_memory(
    model: ParallelDecoder, config: TrainConfig, examples: Iterable[tuple[int, int]], on_gpu: bool | None = None
) -> MemoryEstimate:
    """The peak of training `model`, prepared as it will be trained (`prepare_parameters`), perhaps on the meta device.

    `examples`: (prompt tokens, answer tokens) of each; the micro batch of the longest ones counts.
    """
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    rows, _ = split_batch(config.batch_size, config.micro_batch_size, world_size())
    passes = [model.training_pass(p, a) for p, a in _longest(examples, rows)]
    tokens = max(p.tokens for p in passes)
    targets = sum(p.targets for p in passes)
    parameters = {id(p): p for p in model.parameters()}.values()
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    half = config.dtype == "bfloat16" or (config.dtype == "auto" and on_gpu)
    constant, per_token = kept_bytes(model, half)
    num_layers = model.stack.num_layers
    width, vocab = model.config.hidden_size, model.get_output_embeddings().weight.shape[0]
    one_layer = per_token / num_layers
    kept = num_layers * 4 * width + 2 * one_layer if config.gradient_checkpointing else per_token
    pairs = MASK_BYTES * rows * tokens**2 if any(p.has_mask for p in passes) else 0
    head = model.get_output_embeddings().weight
    activations = constant + rows * tokens * (kept + one_layer) + pairs
    return MemoryEstimate(
        process=PROCESS_BYTES + (0 if on_gpu else min(activations, WASTE_BYTES)),
        weights=sum(p.numel() * p.element_size() for p in parameters),
        gradients=4 * trained,
        optimiser=ADAM_BYTES * trained,
        activations=activations,
        logits=3 * 4 * vocab * min(chunk_size(vocab), targets)
        + 2 * 4 * targets * width
        + (2 * 4 * head.numel() if head.requires_grad else 0),
        largest_layer=4 * sum(p.numel() for p in model.stack.layers[0].parameters()),
        rows=rows,
        tokens=tokens,
    )


def lengths_of(examples: Iterable[Example]) -> list[tuple[int, int]]:
    """(prompt tokens, other tokens) of each example."""
    return [(sum(e.is_prompt), len(e.input_ids) - sum(e.is_prompt)) for e in examples]


def longest_lengths(training: Any, config: TrainConfig) -> list[tuple[int, int]]:
    """Lengths of the longest micro batch of what is trained on; full rows where documents are packed or come from a stream."""
    if config.packing or not isinstance(training, Examples):
        return [(0, config.max_length)]
    rows, _ = split_batch(config.batch_size, config.micro_batch_size, world_size())
    order = np.argsort(-lengths(training.examples), kind="stable")[:rows]
    return lengths_of(training.examples[int(i)] for i in order)


def _longest(examples: Iterable[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    """The `rows` longest; the last one again when there are fewer."""
    chosen = sorted(examples, key=sum, reverse=True)[:rows]
    return chosen + [chosen[-1]] * (rows - len(chosen))


def kept_bytes(model: ParallelDecoder, half: bool) -> tuple[float, float]:
    """(constant, per token) bytes that autograd keeps between forward and backward, weights themselves aside.

    `half`: under bfloat16 autocast, which also keeps a rounded copy of the weights (the constant).
    """
    few, many = (_kept(model, tokens, half) for tokens in PROBE_TOKENS)
    per_token = (many - few) / (PROBE_TOKENS[1] - PROBE_TOKENS[0])
    return max(many - per_token * PROBE_TOKENS[1], 0.0), per_token


def _kept(model: ParallelDecoder, tokens: int, half: bool) -> int:
    """Bytes of the storages that autograd keeps over one forward of one row."""
    kept: dict[int, tuple[Any, int]] = {}
    was_training, base_config = model.training, model.base.config
    attention = base_config._attn_implementation
    model.train()
    base_config._attn_implementation = "sdpa"  # the other fused kernels keep the same and do not run on fake tensors
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = _fake_tensors(model)
            own = {f.untyped_storage()._cdata for f in fakes.values()}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if tensor.shape[-2:] != (tokens, tokens) and storage._cdata not in own:
                    kept[storage._cdata] = (storage, storage.nbytes())
                return tensor

            autocast = torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()
            with torch.enable_grad(), autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                ids = torch.zeros(1, tokens, dtype=torch.long)
                output = torch.func.functional_call(model, fakes, (ids,))
                del output
    finally:
        model.train(was_training)
        base_config._attn_implementation = attention
    return sum(size for _, size in kept.values())


def _fake_tensors(model: ParallelDecoder) -> dict[str, Tensor]:
    """Every parameter and buffer without memory, on a CPU that is not there; tied ones stay one."""
    made: dict[int, Tensor] = {}
    fakes = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in made:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            made[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
        fakes[name] = made[id(tensor)]
    return fakes


def available_bytes(on_gpu: bool | None = None) -> float:
    """What a run may take here: the GPU's free memory or the machine's (and its container's), with what this process has."""
    if torch.cuda.is_available() if on_gpu is None else on_gpu:
        return float(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
    own = psutil.Process().memory_info().rss
    free = psutil.virtual_memory().available + own
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return min(free, limit - (used or 0) + own) if limit else free


def _number(file: Path) -> float | None:
    """The number in a small file; None when it is missing or holds a word."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return None


def warning(estimate: MemoryEstimate, available: float, world_size: int = 1) -> str | None:
    """One line when the run will not fit, with what to change; None when it will."""
    needed = estimate.per_process(world_size, sharded=False)
    if needed <= available:
        return None
    return (
        f"warning: about {gigabytes(needed)} needed, {gigabytes(available)} available: lower --micro-batch-size (now "
        f"{estimate.rows}) or --max-length, give --gradient-checkpointing, or train adapters with --lora-rank 16"
    )


def report_memory(model: ParallelDecoder, config: TrainConfig, examples: Iterable[tuple[int, int]]) -> MemoryEstimate:
    """Print the estimate, and a warning where it exceeds the machine, on stderr."""
    estimate = estimate_memory(model, config, examples)
    print(estimate.line(), file=sys.stderr)
    told = warning(estimate, available_bytes())
    if told:
        print(told, file=sys.stderr)
    return estimate
