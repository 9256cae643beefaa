"""Differences between versions of torch and Lightning; no other file looks at a version.

Where an older release lacks something, this module says what does not work with it.
"""

import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lightning_d9m.version import parse_release

OLDEST_TORCH = (2, 4)
OLDEST_LIGHTNING = (2, 2)
# The first release with all names of `hooks.py` that patches need.
_OLDEST_PATCHED = (2, 11)
# `torch.accelerator` is older, and its functions take `check_available` only since this release.
_OLDEST_ACCELERATOR = (2, 7)


def describe_unsupported(package: str = "torch") -> str | None:
    """Return why torch, or a package of Lightning that is used, is too old; None if it is not."""
    name = package.partition(".")[0]
    oldest = OLDEST_TORCH if name == "torch" else OLDEST_LIGHTNING
    version = str(getattr(sys.modules.get(name), "__version__", ""))
    if () < parse_release(version) < oldest:  # one that does not say its version counts as new
        needed = ".".join(map(str, oldest))
        return f"{name} is {version}, and lightning_d9m needs {needed} or later."
    if name == "torch" and not imports_extensions():
        return (
            f"torch {torch.__version__} loads no extensions when it is imported, as 2.5 and later "
            "do, so nothing would be seeded before the program builds its model. Call "
            "lightning_d9m.enable() at the top of the program."
        )
    return None


def describe_missing_patches() -> str | None:
    """Return why no operation can be patched with this torch; None if they can be."""
    if parse_release(torch.__version__) >= _OLDEST_PATCHED:
        return None
    return (
        f"lightning_d9m patches no operation of torch {torch.__version__}: that needs torch "
        f"{'.'.join(map(str, _OLDEST_PATCHED))} or later. An operation without a deterministic "
        "CUDA kernel raises an error of torch instead. Pass patch_ops=False if no model needs one."
    )


def can_patch() -> bool:
    """Return whether operations can be patched, and warn if a CUDA device would need it."""
    problem = describe_missing_patches()
    if problem is not None and torch.cuda.device_count():
        warnings.warn(problem, stacklevel=2)
    return problem is None


def get_boxed_kernel(name: str, device_key: str) -> Callable[..., Any]:
    """Return torch's kernel of an operator for a dispatch key; see ``can_patch``."""
    kernel: Callable[..., Any] = torch.library.get_kernel(name, device_key).call_boxed
    return kernel


def has_mkldnn_flag() -> bool:
    """Return whether oneDNN can be told to choose deterministic kernels."""
    return hasattr(torch.backends.mkldnn, "deterministic")


def has_compiler_flag() -> bool:
    """Return whether torch's flag also makes its compiler deterministic."""
    # The code of the function tells it without the slow import of the compiler's settings.
    return "inductor_config" in torch.use_deterministic_algorithms.__code__.co_varnames


def imports_extensions() -> bool:
    """Return whether ``import torch`` calls the entry points of ``torch.backends``.

    Without that, ``LIGHTNING_D9M=1`` cannot seed a program before it builds its model.
    """
    return hasattr(torch, "_is_device_backend_autoload_enabled")


@cache  # it is asked at each validation
def _has_accelerators() -> bool:
    """Return whether torch has a module for whatever accelerator it was built for."""
    return parse_release(torch.__version__) >= _OLDEST_ACCELERATOR


def find_accelerator(*, available: bool = False) -> torch.device | None:
    """Return the kind of device that torch was built for, without starting its driver.

    If ``available``, only one that this machine has. With an older torch, only CUDA is known.
    """
    # Asking CUDA whether it is available starts its driver, after which a process cannot fork. What
    # torch was built for does not.
    if _has_accelerators():
        check = {"check_available": True} if available else {}
        return torch.accelerator.current_accelerator(**check)
    found = torch.cuda.is_available() if available else torch.backends.cuda.is_built()
    return torch.device("cuda") if found else None


def count_devices() -> int:
    """Return the number of accelerators of that kind."""
    return torch.accelerator.device_count() if _has_accelerators() else torch.cuda.device_count()


def synchronize(device: str | None = None) -> None:
    """Wait for a device; None for the current one."""
    (torch.accelerator if _has_accelerators() else torch.cuda).synchronize(device)
