"""Fields of the stack on which the code depends that ``torch.compile`` generates."""

import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from lightning_d9m.ledger.format.fields import Scalar

CACHE = "compiler.cache"
"""The field for Inductor's cache on disk when the run began: ``cold`` (empty), ``warm`` or
``disabled``."""

# Settings of Inductor that change which kernels it makes, or what they compute.
_FLAGS = (
    *("deterministic", "max_autotune", "freezing", "fallback_random"),
    "emulate_precision_casts",
)


def capture_compiler() -> dict[str, Scalar]:
    """Record Inductor's settings, its cache and its compiler of C++, for a run that compiles."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    settings: Any = config
    graphs = Path(cache_dir()) / "fxgraph"
    found = "warm" if graphs.is_dir() and any(graphs.iterdir()) else "cold"
    stack: dict[str, Scalar] = {
        CACHE: "disabled" if settings.force_disable_caches else found,
        "compiler.cxx": _read_cxx(),
    }
    for name in _FLAGS:
        if hasattr(settings, name):
            stack[f"flag.inductor.{name}"] = bool(getattr(settings, name))
    return stack


@cache
def _read_cxx() -> str | None:
    """Return the first line of ``--version`` of the compiler; None without one."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    with suppress(Exception):  # torch raises InvalidCxxCompiler if it finds none
        command = [get_cpp_compiler(), "--version"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - torch named it
        return text.partition("\n")[0][:256]
    return None
