"""Compiles the kernels; it imports only what needs no torch, because a wheel's build loads it."""

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from lightning_d9m.ops.portability.formulas import write_sources

FOLDER = Path(__file__).parent

_SOURCES = ("kernels.c", "real.h", "formulas.py", "expressions.py", "coefficients.txt")
# No contraction and no reassociation: then a compiler may not change the bits of a result.
_FLAGS = "-std=gnu11 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math"
_FLAGS += " -fwrapv -fPIC -shared"  # sums of whole numbers wrap
# What torch requires of a processor before it reports these capabilities.
_WIDTHS = {
    "AVX512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mprefer-vector-width=512",
    "AVX2": "-mavx2 -mfma",
    # Without fused multiply-add: `fma` of the C library, exact and slower, has the same bits.
    "DEFAULT": "",
}


def list_widths() -> dict[str, str]:
    """Return the flags of each vector width of this kind of processor, the widest first."""
    return _WIDTHS if platform.machine() in ("x86_64", "AMD64") else {"DEFAULT": ""}


def name_library(width: str) -> str:
    """Return the file name of the library for a vector width."""
    text = b"".join((FOLDER / one).read_bytes() for one in _SOURCES)
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
    # Within the folder, so that the last step is a rename on one file system.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch, path.name)
        flags = [*_FLAGS.split(), *list_widths()[width].split(), f"-I{scratch}"]
        for name, text in write_sources().items():
            Path(scratch, name).write_text(text)
        command = [*compiler, *flags, str(FOLDER / "kernels.c"), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - CC's
        made.replace(path)  # at once: another process may build it, too
    return path
