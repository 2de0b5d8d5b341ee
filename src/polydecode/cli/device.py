"""Where and in which dtype a command decodes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from polydecode.methods.base import ParallelDecoder


@dataclass(kw_only=True)
class DecodingOptions:
    """Where to decode.

    Attributes:
        dtype: auto is bfloat16, or float32 on a GPU without it.
        device: auto, cpu, cuda, cuda:1, ...; auto is the GPU where there is one.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"


def open_model(checkpoint: str, options: DecodingOptions) -> "ParallelDecoder":
    """The model of `checkpoint`, ready to decode."""
    from polydecode.auto import load
    from polydecode.benchmark.machine import default_device, default_dtype

    device = default_device() if options.device == "auto" else options.device
    dtype = default_dtype(device) if options.dtype == "auto" else options.dtype
    return load(checkpoint, dtype=dtype, device=device)
