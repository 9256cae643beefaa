"""Fallback of a kernel to torch for arguments that it does not take.

A kernel accepts exactly what torch's kernel accepts. Where a cheap check of shapes and dtypes shows
that torch would raise, the kernel calls torch's own, so that the user sees torch's error message.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_d9m.errors import D9mError

Original = Callable[..., Any]
"""Torch's kernel, bound to the dispatch keys of the current call."""


def raise_as_original(original: Original, *args: object, **kwargs: object) -> NoReturn:
    """Call torch's kernel, perhaps with arguments bound to it already, which is expected to raise.

    Raises:
        D9mError: It accepted the arguments. Its result may be nondeterministic and is discarded.
    """
    original(*args, **kwargs)
    if isinstance(original, partial):
        args = (*original.args, *args)
    raise D9mError(
        "The deterministic replacement does not take these arguments, although torch's own kernel "
        f"does: {[_describe_argument(argument) for argument in args]}. Exclude the op from the "
        "patches to run torch's nondeterministic kernel, and please report the case."
    )


def holds(condition: Tensor) -> bool:
    """Return whether a condition on values is known to be true everywhere.

    On CUDA the check runs on the device, as in torch's own kernels, and the host does not wait: a
    failed check is a device-side assertion, which surfaces as an error at a later call.
    """
    try:
        torch.ops.aten._assert_async(condition.all())  # noqa: SLF001 - it does not wait for the device
    except RuntimeError:
        return False
    return True


def _describe_argument(argument: object) -> str:
    shape, dtype = getattr(argument, "shape", None), getattr(argument, "dtype", None)
    return repr(argument) if shape is None else f"{dtype} of shape {tuple(shape)}"
