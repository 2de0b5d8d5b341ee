"""The few-row product of `few_rows.c`, compiled on first use for this CPU; None where that cannot be.

It needs a C compiler with OpenMP. The library is kept in the cache folder under a hash of its source, the compiler and the
CPU's features, so a change of any of them compiles anew. `POLYDECODE_NATIVE=0` turns it off.

Legend: N rows, I input width, O output width.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from polydecode.paths import cache_folder

_SOURCE = Path(__file__).with_name("few_rows.c")
_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", "-shared")
_SECONDS_TO_COMPILE = 60


@cache
def few_rows_kernel() -> Callable[[Tensor, Tensor], Tensor] | None:
    """The function (x (N, I), weight (O, I)) -> (N, O), all bfloat16, or None.

    The weight is contiguous, and both are on the CPU; sums are float32.
    """
    if os.environ.get("POLYDECODE_NATIVE") == "0":
        return None
    library = _library()
    if library is None:
        return None
    run = library.few_rows
    run.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3
    run.restype = None

    def product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        x_NI = x_NI.contiguous()
        (rows, inputs), outputs = x_NI.shape, weight_OI.shape[0]
        out_NO = torch.empty(rows, outputs, dtype=torch.bfloat16)
        run(x_NI.data_ptr(), weight_OI.data_ptr(), out_NO.data_ptr(), rows, outputs, inputs)
        return out_NO

    return product


def _library() -> ctypes.CDLL | None:
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        return None
    try:
        path = cache_folder() / "kernels" / f"few_rows_{_fingerprint(compiler)}.so"
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # not there yet, or damaged
            _compile(compiler, path)
            return ctypes.CDLL(str(path))
    except (
        OSError,
        subprocess.SubprocessError,
    ):  # no compiler that works, no place to write: the portable route serves
        return None


def _fingerprint(compiler: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        features = ""
    parts = [_SOURCE.read_text(), *_FLAGS, compiler, platform.machine(), platform.processor(), features]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS_TO_COMPILE)
        os.replace(built, path)
