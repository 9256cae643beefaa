"""The compiled kernels: found in the package, or built once by the compiler that is there.

The file name has a hash of the sources and the flags, so a library never belongs to other sources.
Vector width follows torch's CPU capability when the program runs.
"""

import ctypes
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
import warnings
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FOLDER = Path(__file__).parent
SOURCES = ("kernels.c", "real.h", "functions.h", "coefficients.h")
# No contraction and no reassociation: then a compiler may not change the bits of a result.
_FLAGS = "-std=gnu11 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared -pthread"
# What torch requires of a processor before it reports these capabilities.
_WIDTHS = {
    "AVX512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mprefer-vector-width=512",
    "AVX2": "-mavx2 -mfma",
    "DEFAULT": "",
}
_ALONE = 2**16  # operations that one thread computes sooner than several
_KERNELS: dict[tuple[str, torch.dtype], Any] = {}


def list_widths() -> dict[str, str]:
    """Return the flags of each vector width of this kind of processor, the widest first."""
    return _WIDTHS if platform.machine() in ("x86_64", "AMD64") else {"DEFAULT": ""}


def name_library(width: str) -> str:
    """Return the file name of the library for a vector width."""
    text = b"".join((_FOLDER / one).read_bytes() for one in SOURCES)
    key = sha256(text + f"{_FLAGS} {list_widths()[width]}".encode()).hexdigest()[:16]
    return f"kernels-{platform.machine()}-{width.lower()}-{key}.so"


def build(width: str, folder: Path) -> Path:
    """Compile the library for a vector width into a folder; return its path.

    Raises:
        OSError: There is no compiler, or the folder cannot be written.
        subprocess.CalledProcessError: The compiler failed.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or [
        next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "cc")
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name_library(width)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch, path.name)
        flags = [*_FLAGS.split(), *list_widths()[width].split()]
        command = [*compiler, *flags, str(_FOLDER / "kernels.c"), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - CC's
        made.replace(path)  # at once: another process may build it, too
    return path


@cache
def load() -> ctypes.CDLL | None:
    """Return the library for this processor; None, with a warning, without a compiler."""
    width = torch.backends.cpu.get_cpu_capability()
    width = width if width in list_widths() else "DEFAULT"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_d9m"
    places = (_FOLDER / name_library(width), base / name_library(width))
    try:
        path = next((one for one in places if one.exists()), None) or build(width, base)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().partition("\n")[0]
        warnings.warn(
            f"The kernels of portable bits cannot be compiled ({reason}). Torch operations compute "
            "the same bits, many times slower. Install a C compiler (cc), or name one by CC.",
            stacklevel=3,
        )
        return None
    library.d9m_share.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_long]
    library.d9m_share.restype = None
    return library


class Kernel(NamedTuple):
    """A compiled function and what shares its results out among threads."""

    share: Any
    address: int


def find_kernel(name: str, values: Tensor) -> Kernel | None:
    """Return the kernel for tensors like this one; None if torch operations serve."""
    key = name, values.dtype
    if values.device.type != "cpu":
        return None
    if key not in _KERNELS:
        library = load()
        kind = {torch.float32: "float", torch.float64: "double"}[values.dtype]
        _KERNELS[key] = library and Kernel(
            library.d9m_share,
            ctypes.cast(getattr(library, f"{name}_{kind}"), ctypes.c_void_p).value,
        )
    return _KERNELS[key]


def find_width(values: Tensor) -> int:
    """Return the number of columns of a product that are one item of its kernel."""
    key = "width", values.dtype
    if key not in _KERNELS:
        kind = {torch.float32: "float", torch.float64: "double"}[values.dtype]
        _KERNELS[key] = ctypes.c_long.in_dll(load(), f"wide_{kind}").value
    return int(_KERNELS[key])


def run(kernel: Kernel, count: int, cost: int, *given: Any) -> None:
    """Compute all results of a kernel.

    Args:
        kernel: One of :func:`find_kernel`.
        count: The number of results.
        cost: About how many operations all of them take.
        *given: The members of the kernel's struct: whole numbers, floats, tensors, None for NULL.
    """
    form, members = "", list[Any]()
    for one in given:
        form += "d" if type(one) is float else "q"
        is_tensor = isinstance(one, Tensor)
        members.append(one.data_ptr() if is_tensor else 0 if one is None else one)
    threads = torch.get_num_threads() if cost > _ALONE else 1
    kernel.share(kernel.address, struct.pack(form, *members), count, threads)
