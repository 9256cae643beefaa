"""The compiled kernels: found in the package, or built once by the compiler that is there.

The file name has a hash of the sources and the flags, so a library never belongs to other sources.
Vector width follows torch's CPU capability when the program runs.
"""

import ctypes
import os
import struct
import subprocess
import warnings
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.errors import NotPortableError
from lightning_d9m.ops.portability.compiler import FOLDER, build, list_widths, name_library

_DIGEST = "a9e32ab90bbcc7f9"  # of a few results, on every machine
# Operations that one thread computes sooner than several: waking another one takes microseconds.
_ALONE = 2**16
_PROCESS = os.getpid()
_TYPES = {torch.float32: "float", torch.float64: "double"}

CompiledKernel = Callable[..., None]
"""Shares the results of a compiled function out among threads."""


@cache
def load() -> ctypes.CDLL | None:
    """Return the library for this processor; None, with a warning, without a compiler."""
    # Torch's choice, so that ATEN_CPU_CAPABILITY of a test or of a user holds for both.
    width = torch.backends.cpu.get_cpu_capability()
    width = width if width in list_widths() else "DEFAULT"
    path = FOLDER / name_library(width)
    try:
        # A wheel brings its libraries; they need no folder that can be written.
        if not path.exists():
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            path = base / "lightning_d9m" / path.name
        library = ctypes.CDLL(str(path if path.exists() else build(width, path.parent)))
    # A RuntimeError: the user has no home.
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().partition("\n")[0]
        warnings.warn(
            f"The kernels of portable bits cannot be compiled ({reason}). Torch operations compute "
            "the same bits, many times slower. Install a C compiler (cc), or name one by CC.",
            stacklevel=3,
        )
        return None
    long, address = ctypes.c_long, ctypes.c_void_p
    library.d9m_share.argtypes = [address, ctypes.c_char_p, long, long, address]
    library.d9m_share.restype = None
    _check(library)
    return library


def _check(library: ctypes.CDLL) -> None:
    """Raise an error unless the kernels give the bits that every machine must give.

    A compiler that fuses or reorders operations would change them, as ``-ffast-math`` in CC does.
    """
    # Whole numbers and powers of 2 only: no function that differs between machines makes the input.
    x = (torch.arange(640, dtype=torch.float32, device="cpu") * 37 % 101 - 50) * 2.0**-7
    places, nothing = (torch.arange(n, device="cpu") for n in (25, 1))
    total = sha256()
    for values in (x, x.double() / 3):
        out = torch.zeros(625, dtype=values.dtype, device="cpu")
        left, product = (places * 24, places, nothing), (places * 25, places, nothing)
        for name, count, *given in (
            ("product", 25, 25, 25, 25, values, values, out, *left, *left, *product),
            ("row_sums", 20, 30, 1, 0, 30, 1, values, out),
            ("tanh", 600, 1, 1, values, out),
        ):
            run(_take(library, name, values.dtype), count, 0, *given)
            total.update(out.numpy().tobytes())
    if total.hexdigest()[:16] != _DIGEST:
        raise NotPortableError(
            f"The compiled kernels of portable bits give {total.hexdigest()[:16]} instead of "
            f"{_DIGEST}: the compiler changes the order or the number of roundings, or this "
            "processor flushes subnormal numbers. Unset CC and CFLAGS, remove the files kernels-* "
            "in ~/.cache/lightning_d9m, and try again.",
            op="kernels",
            source=None,
        )


def _take(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> CompiledKernel:
    address = ctypes.cast(getattr(library, f"{name}_{_TYPES[dtype]}"), ctypes.c_void_p)
    return partial(library.d9m_share, address.value)


@cache
def _find(name: str, dtype: torch.dtype) -> CompiledKernel | None:
    library = load()
    return None if library is None or dtype not in _TYPES else _take(library, name, dtype)


def find_kernel(name: str, values: Tensor) -> CompiledKernel | None:
    """Return the kernel for tensors like this one; None if torch operations serve."""
    return _find(name, values.dtype) if values.device.type == "cpu" else None


def run(kernel: CompiledKernel, count: int, cost: int, *given: Any) -> None:
    """Compute all results of a kernel.

    Args:
        kernel: One of :func:`find_kernel`.
        count: The number of results.
        cost: About how many operations all of them take.
        *given: The members of the kernel's struct: whole numbers, floats, tensors.
    """
    # A struct of bytes and not ctypes' classes: one call of C then takes any kernel's arguments.
    form, members = "", list[Any]()
    for one in given:
        form += "d" if type(one) is float else "q"
        is_tensor = isinstance(one, Tensor)
        members.append(one.data_ptr() if is_tensor else one)
    threads = count_threads() if cost > _ALONE else 1
    kernel(struct.pack(form, *members), count, threads, _find_parallel())


def count_threads() -> int:
    """Return the number of torch's threads; in a forked process 1, as workers of loaders have.

    Such a process has not the threads of its parent, and OpenMP would wait for them.
    """
    return torch.get_num_threads() if os.getpid() == _PROCESS else 1


@cache
def _find_parallel() -> int | None:
    """Return the address of the function of torch's OpenMP that runs a function on its threads.

    GNU's, LLVM's and Intel's libraries have it. None leaves all to one thread.
    """
    found = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)  # noqa: SLF001 - the library that is linked with torch's OpenMP
    return ctypes.cast(found, ctypes.c_void_p).value if found else None
