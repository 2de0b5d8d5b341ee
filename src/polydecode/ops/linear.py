"""Matrix products of few rows on CPUs without bfloat16 arithmetic.

Decoding multiplies every weight by 1 to some tens of rows. Where the CPU has no bfloat16 units, torch's bfloat16 product widens
every weight once per row, so that a pass over 4 tokens costs as much as 4 passes. `fast_linear` takes another route: up to
some rows a small C kernel that widens a weight once for all rows (`ops/native.py`); for more rows, or without a compiler, the
weight is widened to float32 in a buffer that stays in the cache, and multiplied there. Sums are float32, so results differ
from torch's by bfloat16 rounding. In float32 it orders the operands the way the vendor's kernel is fast for few rows. On GPUs
and on CPUs with bfloat16 units it does nothing.

Legend: N rows, I input width, O output width.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polydecode.ops.native import few_rows_kernel

_FEW_ROWS = 16
_NATIVE_ROWS = 64
_CHUNK_VALUES = 2**21
_local = threading.local()


@cache
def has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16 or AMX)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) if torch.backends.mkldnn.is_available() else False


def few_rows_route(dtype: torch.dtype) -> str:
    """How few-row products are done on this CPU in `dtype`, in words for a report."""
    if has_bfloat16_units() or dtype not in (torch.float32, torch.bfloat16):
        return "torch"
    if dtype == torch.float32:
        return "reordered"
    return "native kernel" if few_rows_kernel() is not None else "widened weights"


def few_rows_product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """x @ weight^T, (N, O) in x's dtype, by the faster route for this dtype and number of rows."""
    rows = x_NI.shape[0]
    if x_NI.dtype == torch.float32:
        return torch.mm(weight_OI, x_NI.t()).t() if 1 < rows <= _FEW_ROWS else F.linear(x_NI, weight_OI)
    kernel = few_rows_kernel() if rows <= _NATIVE_ROWS else None
    if kernel is not None and weight_OI.is_contiguous():
        return kernel(x_NI, weight_OI)
    if rows <= 2:
        return F.linear(x_NI, weight_OI)
    wide_IN = x_NI.float().t()
    out_ON = torch.empty(weight_OI.shape[0], rows)
    chunk = max(_CHUNK_VALUES // weight_OI.shape[1], 1)
    for start in range(0, weight_OI.shape[0], chunk):
        part_OI = weight_OI[start : start + chunk]
        torch.mm(_widened(part_OI), wide_IN, out=out_ON[start : start + chunk])
    return out_ON.t().to(x_NI.dtype)


def _widened(weight_OI: Tensor) -> Tensor:
    """The weight in float32, in this thread's buffer: valid until the next call."""
    buffer = getattr(_local, "buffer", None)
    if buffer is None or buffer.numel() < weight_OI.numel():
        with torch.inference_mode(False):
            buffer = _local.buffer = torch.empty(max(weight_OI.numel(), _CHUNK_VALUES))
    return buffer[: weight_OI.numel()].view_as(weight_OI).copy_(weight_OI)


class _FewRowsForward:
    """Replaces the `forward` of one `nn.Linear` instance."""

    def __init__(self, module: nn.Linear):
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        out = few_rows_product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias


@contextmanager
def fast_linear(model: nn.Module) -> Iterator[None]:
    """Within it, the model's plain linear layers use `few_rows_product` where that is faster; for inference only."""
    patched = []
    if not has_bfloat16_units():
        for module in model.modules():
            eligible = (
                type(module) is nn.Linear and module.weight.device.type == "cpu" and "forward" not in vars(module)
            )
            if eligible and module.weight.dtype in (torch.float32, torch.bfloat16):
                module.forward = _FewRowsForward(module)  # type: ignore
                patched.append(module)
    try:
        yield
    finally:
        for module in patched:
            del module.forward
