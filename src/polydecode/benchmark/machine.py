"""What a number was measured on, and what decoding runs on by default."""

import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import transformers

import polydecode


@dataclass
class Machine:
    """The machine and the libraries of a measurement."""

    device: str
    device_name: str
    threads: int
    torch: str
    transformers: str
    polydecode: str


def describe_machine(device: torch.device | str) -> Machine:
    """The machine as it is now; `threads` is torch's setting for one operation."""
    on_gpu = torch.device(device).type == "cuda"
    return Machine(
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        polydecode=polydecode.__version__,
    )


@lru_cache
def cpu_name() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def default_device() -> str:
    """ "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> str:
    """The dtype that decodes fastest: bfloat16, but float32 on a GPU without it.

    On a CPU without bfloat16 instructions it is still the faster one, since half the bytes are read (`ops/linear.py`).
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_bf16_supported():
        return "float32"
    return "bfloat16"
