"""What a replacement does with arguments it does not take: let the original speak.

A replacement accepts exactly what the original accepts. Where a cheap look at shapes and dtypes
says that the original would raise, the original is called, so that its own error comes out word
for word.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_d9m.errors import D9mError

Original = Callable[..., Any]
"""The kernel that a replacement stands in for, bound to the dispatch keys of the present call."""


def raise_as_original(original: Original, *args: object, **kwargs: object) -> NoReturn:
    """Call the original, which is expected to raise.

    Raises:
        D9mError: The original took the arguments. Its result is thrown away, because it may be
            nondeterministic: refusing is safe, silence is not.
    """
    original(*args, **kwargs)
    raise D9mError(
        "The deterministic replacement does not take these arguments, although torch's own kernel "
        f"does: {[_describe(argument) for argument in args]}. Exclude the op from the patches to "
        "run torch's nondeterministic kernel, and please report the case."
    )


def overlaps_itself(tensor: Tensor) -> bool:
    """Say whether several elements are known to share memory, as in an expanded tensor."""
    return torch._debug_has_internal_overlap(tensor) == 1  # noqa: SLF001 - what torch's kernels ask


def holds(condition: Tensor) -> bool:
    """Say whether a condition on values is known to hold everywhere.

    On CUDA the check is made on the device, as those of torch's own kernels are, and nothing waits.
    """
    try:
        torch.ops.aten._assert_async(condition.all())  # noqa: SLF001 - no wait for the device
    except RuntimeError:
        return False
    return True


def _describe(argument: object) -> str:
    shape, dtype = getattr(argument, "shape", None), getattr(argument, "dtype", None)
    return repr(argument) if shape is None else f"{dtype} of shape {tuple(shape)}"
