"""torch's flags for determinism and its number of threads, each with the mechanism behind it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends import cuda as cuda_backend
from torch.backends import cudnn as cudnn_backend
from torch.backends import mkldnn as _mkldnn
from torch.utils import deterministic as _memory

from lightning_d9m.compatibility import has_compiler_flag, has_mkldnn_flag
from lightning_d9m.control.environment import INDUCTOR, read_user_value
from lightning_d9m.errors import SettingError

# torch creates these attributes dynamically, so type checkers do not see them.
mkldnn_backend: Any = _mkldnn
memory: Any = _memory

_INDUCTOR = "torch._inductor.config"
Flags = dict[str, bool]


# Flags that are attributes, by dotted name; an older torch lacks some.
_ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "torch.fill_uninitialized_memory": (memory, "fill_uninitialized_memory"),
    "cudnn.deterministic": (cudnn_backend, "deterministic"),
    "cudnn.benchmark": (cudnn_backend, "benchmark"),
}
if has_mkldnn_flag():
    _ATTRIBUTES["mkldnn.deterministic"] = (mkldnn_backend, "deterministic")


def capture_flags() -> Flags:
    """Return torch's flags that this module sets, by dotted name."""
    flags = {
        "torch.deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "sdpa.cudnn": bool(cuda_backend.cudnn_sdp_enabled()),
    }
    flags |= {name: getattr(owner, own) for name, (owner, own) in _ATTRIBUTES.items()}
    if has_compiler_flag():
        # Its initial value before the (slow) import of its module.
        config: Any = sys.modules.get(_INDUCTOR)
        value = read_user_value(INDUCTOR) == "1" if config is None else config.deterministic
        flags["inductor.deterministic"] = bool(value)
    return flags


def restore_flags(flags: Flags) -> None:
    """Put torch's flags back as they were captured, unless the interpreter is shutting down."""
    if sys.is_finalizing():  # nothing can be imported any more, and nothing will be computed
        return
    torch.use_deterministic_algorithms(
        flags["torch.deterministic_algorithms"], warn_only=flags["torch.deterministic_warn_only"]
    )
    cuda_backend.enable_cudnn_sdp(flags["sdpa.cudnn"])
    for name, (owner, own) in _ATTRIBUTES.items():
        setattr(owner, own, flags[name])
    if has_compiler_flag():
        # `use_deterministic_algorithms` has imported this module and set it to its own mode.
        sys.modules[_INDUCTOR].deterministic = flags["inductor.deterministic"]  # type: ignore[attr-defined]


def wanted_flags(*, fill_uninitialized_memory: bool) -> Flags:
    """Return the flags of a deterministic session."""
    return {
        # Chooses deterministic kernels, and raises if an operation has none.
        "torch.deterministic_algorithms": True,
        # With warn_only, attention keeps its nondeterministic backward kernels.
        "torch.deterministic_warn_only": False,
        # A program that reads memory it never wrote reads the same values in each run.
        "torch.fill_uninitialized_memory": fill_uninitialized_memory,
        # cuDNN's fastest convolutions add with atomics.
        "cudnn.deterministic": True,
        # The benchmark chooses kernels by timing them.
        "cudnn.benchmark": False,
        # cuDNN's attention does not read torch's flag.
        "sdpa.cudnn": False,
        # Without it oneDNN chooses the fastest kernel for a device.
        "mkldnn.deterministic": True,
        # Autotuning chooses kernels by timing them.
        "inductor.deterministic": True,
    }


@contextmanager
def algorithms_switched(wanted: Flags) -> Iterator[None]:
    """Compute with the flags of a deterministic session, and restore torch's flags."""
    before = capture_flags()
    try:
        restore_flags(wanted)
        yield
    finally:
        restore_flags(before)


def find_changed_flags(wanted: Flags) -> Flags:
    """Return the present values of the flags that differ from those of a session."""
    return {name: value for name, value in capture_flags().items() if value != wanted[name]}


# With it OpenMP gives an operation fewer threads while the machine is busy, even if the number is
# pinned. OpenMP reads it when it starts, which is when torch is imported.
DYNAMIC = "OMP_DYNAMIC"
# The number that the user has set, which OpenMP also reads when it starts. Later the variable may
# hold another one: Lightning's launchers set it, if it is not set, by the number of processes.
_NUMBER_AT_START = os.environ.get("OMP_NUM_THREADS", "")


def read_threads() -> int | None:
    """Return the ``OMP_NUM_THREADS`` of the user, who sets it before torch is imported; or None.

    torchrun sets it for its processes.
    """
    text = _NUMBER_AT_START.partition(",")[0].strip()  # the rest is of nested parallel regions
    return int(text) if text.isdecimal() and int(text) else None


@contextmanager
def threads_pinned(number: int | None) -> Iterator[None]:
    """Compute with ``number`` intra-op threads, and restore the number that was set.

    torch splits a sum over many elements into one part per thread, and each split rounds
    differently.

    With None nothing changes. The number of inter-op threads does not matter: they run independent
    operations side by side.

    Raises:
        SettingError: If OpenMP may vary the number.
    """
    if threads_vary():
        raise SettingError(
            f"The variable {DYNAMIC} is {os.environ[DYNAMIC]!r}, so OpenMP chooses the number of "
            "threads by the load of the machine, and results differ with it. Start the program "
            f"without it, or with {DYNAMIC}=false."
        )
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)


def threads_vary() -> bool:
    """Return whether OpenMP may choose the number of threads for every operation."""
    return os.environ.get(DYNAMIC, "").strip().lower() in ("true", "1")
