"""torch's own switches: each with the mechanism that makes it necessary."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends import cuda as cuda_backend
from torch.backends import cudnn as cudnn_backend
from torch.backends import mkldnn as _mkldnn
from torch.utils import deterministic as _memory

from lightning_d9m.control.environment import INDUCTOR, users_value
from lightning_d9m.errors import SettingError

# torch makes these attributes by other means than those that a type checker follows.
mkldnn_backend: Any = _mkldnn
memory: Any = _memory

_INDUCTOR = "torch._inductor.config"
Flags = dict[str, bool]


def capture_flags() -> Flags:
    """Return torch's flags that this module sets, by dotted name."""
    return {
        "torch.deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "torch.fill_uninitialized_memory": memory.fill_uninitialized_memory,
        "cudnn.deterministic": cudnn_backend.deterministic,
        "cudnn.benchmark": cudnn_backend.benchmark,
        "sdpa.cudnn": bool(cuda_backend.cudnn_sdp_enabled()),
        "mkldnn.deterministic": mkldnn_backend.deterministic,
        "inductor.deterministic": _inductor_deterministic(),
    }


def restore_flags(flags: Flags) -> None:
    """Put torch's flags back as they were captured."""
    torch.use_deterministic_algorithms(
        flags["torch.deterministic_algorithms"], warn_only=flags["torch.deterministic_warn_only"]
    )
    memory.fill_uninitialized_memory = flags["torch.fill_uninitialized_memory"]
    cudnn_backend.deterministic = flags["cudnn.deterministic"]
    cudnn_backend.benchmark = flags["cudnn.benchmark"]
    cuda_backend.enable_cudnn_sdp(flags["sdpa.cudnn"])
    mkldnn_backend.deterministic = flags["mkldnn.deterministic"]
    # `use_deterministic_algorithms` has loaded this, and has set it to the same as its own mode.
    sys.modules[_INDUCTOR].deterministic = flags["inductor.deterministic"]  # type: ignore[attr-defined]


def wanted_flags(*, fill_uninitialized_memory: bool) -> Flags:
    """Return the flags of a deterministic session."""
    return {
        # Picks deterministic kernels, and raises where an operation has none.
        "torch.deterministic_algorithms": True,
        # With warnings only, attention keeps its nondeterministic backward kernels.
        "torch.deterministic_warn_only": False,
        # A program that reads what it never wrote reads the same each time.
        "torch.fill_uninitialized_memory": fill_uninitialized_memory,
        # cuDNN's fastest convolutions add with atomics.
        "cudnn.deterministic": True,
        # The benchmark picks kernels by timing them.
        "cudnn.benchmark": False,
        # cuDNN's attention takes no word from torch about determinism.
        "sdpa.cudnn": False,
        # oneDNN picks the fastest kernel for a device unless it is told.
        "mkldnn.deterministic": True,
        # Autotuning picks kernels by timing them.
        "inductor.deterministic": True,
    }


@contextmanager
def algorithms_switched(*, fill_uninitialized_memory: bool) -> Iterator[None]:
    """Compute with deterministic algorithms, and restore torch's flags."""
    before = capture_flags()
    try:
        restore_flags(before | wanted_flags(fill_uninitialized_memory=fill_uninitialized_memory))
        yield
    finally:
        restore_flags(before)


def verify_flags(*, fill_uninitialized_memory: bool) -> None:
    """Raise if somebody has changed a flag since.

    Raises:
        SettingError: With the first flag that is not as it was set.
    """
    wanted = wanted_flags(fill_uninitialized_memory=fill_uninitialized_memory)
    for name, value in capture_flags().items():
        if value != wanted[name]:
            raise SettingError(
                f"The flag {name} is {value} and was set to {wanted[name]}: something switched it "
                "during the run, so the run is not deterministic. Look for "
                "torch.use_deterministic_algorithms, torch.backends.cudnn or "
                "Trainer(deterministic=...) in the program, and remove it."
            )


def _inductor_deterministic() -> bool:
    """Return the compiler's flag, or how it will start where it is not loaded; loading is slow."""
    config: Any = sys.modules.get(_INDUCTOR)
    if config is None:
        return users_value(INDUCTOR) == "1"
    return bool(config.deterministic)
