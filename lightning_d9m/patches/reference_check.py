"""Check of a replacement on a device against the same replacement on the CPU.

The tests prove each replacement on the CPU, against torch's own kernel. On a CUDA device the first
use of each overload is compared with the CPU's result for the same arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_d9m.patches.primitives.segment_reduce import Update

_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 3e-2}
_TOLERANCE = 1e-3  # of the greatest magnitude: sums of many terms in a different order


class _NotComparableError(Exception):
    """The replacement left the arguments to torch's kernel."""


def agrees_with_cpu(
    replacement: Callable[..., Any], args: Any, kwargs: Any, actual: tuple[Tensor | None, ...]
) -> bool | None:
    """Return whether a replacement's results on a device are its results on the CPU.

    Returns:
        None if the CPU cannot compute them, or leaves them to torch's kernel.
    """

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise _NotComparableError

    host_args, host_kwargs = tree_map_only(Tensor, lambda part: part.cpu(), (args, kwargs))
    try:
        returned = replacement(refuse, *host_args, **host_kwargs)
        if isinstance(returned, Update):
            target = host_args[0].clone(memory_format=torch.contiguous_format)
            returned.write(target)
            returned = target
    except (_NotComparableError, RuntimeError, NotImplementedError):
        return None
    expected = returned if isinstance(returned, tuple) else (returned,)
    return len(expected) == len(actual) and all(map(_is_close, actual, expected))


def _is_close(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:
        return actual is expected
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    if not expected.is_floating_point() and not expected.is_complex():
        return torch.equal(actual.cpu(), expected)
    magnitudes = expected.abs().nan_to_num(0, 0, 0)
    scale = float(magnitudes.max()) if magnitudes.numel() else 0.0
    bound = _TOLERANCES.get(expected.dtype, _TOLERANCE) * scale
    return torch.allclose(actual.cpu(), expected, rtol=0, atol=bound, equal_nan=True)
