"""Launches of Triton kernels, with torch ops as the fallback.

A replacement gives its computation twice: as a function of torch ops, which is the CPU's and the
fallback, and as a function of this folder that launches a Triton kernel. Triton is loaded at the
first use on a CUDA device.
"""

import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pkgutil import resolve_name
from subprocess import SubprocessError
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.errors import D9mError

P = ParamSpec("P")
R = TypeVar("R")

INT32_LIMIT = 2**31 - 1
_BLOCK, _SMALL_BLOCK = 512, 128  # elements that a program of four warps writes
_SMALL = 2**17  # elements below which small blocks occupy more of a device
_device_types = {"cuda"}  # tests add "cpu", where Triton's interpreter runs the kernels
_withdrawn: set[str] = set()
_thread = threading.local()


def run_kernel(path: str, reference: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Compute with a Triton kernel on CUDA, and with torch ops elsewhere.

    Torch ops also take over, with a warning, from a kernel that cannot be loaded, compiled or
    launched, and from one that was withdrawn because its result was wrong.

    Args:
        path: ``"module:function"`` in this folder: the function that launches the kernel.
        reference: The function of torch ops, with the same arguments and results.
        *args: The arguments; the first one is a tensor on the device in question.
        **kwargs: More arguments.

    Raises:
        RuntimeError: The device failed before, as by an assertion.
        D9mError: The kernel failed while a CUDA graph is captured: it is compiled at its first use,
            which cannot be part of a graph.
    """
    first = args[0]
    assert isinstance(first, Tensor)
    if first.device.type not in _device_types or path in _withdrawn:
        return reference(*args, **kwargs)
    try:
        result: R = resolve_name(f"{__package__}.{path}")(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # TritonError is a plain Exception; any failure falls back
        if is_capturing():
            raise D9mError(
                f"A CUDA graph is being captured, and the Triton kernel {path} failed "
                f"({type(error).__name__}: {error}). It is compiled and loaded at its first use. "
                "Run the same step once before the capture."
            ) from error
        withdraw(path, explain_failure(error, first.device))
        return reference(*args, **kwargs)
    used = getattr(_thread, "used", None)
    if used is not None:
        used.append(path)
    return result


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, into which nothing may be copied."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def explain_failure(error: Exception, device: torch.device) -> str:
    """Return why a Triton kernel failed, and the remedy if the compiler is missing.

    Raises:
        RuntimeError: The device's own error, such as a failed assertion of an earlier kernel: it
            fails everything that follows, and this kernel is not its cause.
    """
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, ImportError | OSError | SubprocessError) or "C compiler" in str(error):
        return f"{reason}; Triton needs gcc and Python's headers"
    return reason


def withdraw(path: str, reason: str) -> None:
    """Use torch ops in place of a kernel from now on, with a warning."""
    _withdrawn.add(path)
    warnings.warn(
        f"The Triton kernel {path} cannot be used ({reason}). Torch ops compute the same on this "
        "device, deterministically but more slowly.",
        stacklevel=3,
    )


@contextmanager
def kernels_noted() -> Iterator[list[str]]:
    """Collect the kernels that this thread uses in the body."""
    before = getattr(_thread, "used", None)
    used: list[str] = []
    _thread.used = used
    try:
        yield used
    finally:
        _thread.used = before


def launch_blocks(kernel: Any, like: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a kernel with one program for each block of elements of its result.

    The kernel takes the number of elements after ``args``, and ``BLOCK``.
    """
    elements = like.numel()
    block = _SMALL_BLOCK if elements < _SMALL else _BLOCK
    with torch.cuda.device(like.device if like.is_cuda else -1):
        kernel[(-(-elements // block),)](
            *args,
            elements,
            BLOCK=block,
            num_warps=4,
            # The CPU rounds each product before it adds it, and so does the kernel.
            enable_fp_fusion=False,
            **constants,
        )


def needs_int64(*tensors: Tensor) -> bool:
    """Return whether an offset in one of the tensors exceeds 32 bits, also past its last block."""
    return any(_span(tensor) > INT32_LIMIT - _BLOCK for tensor in tensors)


def _span(tensor: Tensor) -> int:
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return max(reach + 1, tensor.numel())


def view_as_volumes(tensor: Tensor, dims: int) -> Tensor:
    """Return a view of shape ``[batch, channels, depth, height, width]``.

    Args:
        tensor: With ``dims`` spatial dimensions after the channels, with or without a batch.
        dims: From 1 to 3. Dimensions that are not there get the size 1.
    """
    if tensor.dim() == dims + 1:
        tensor = tensor.unsqueeze(0)
    for _ in range(3 - dims):
        tensor = tensor.unsqueeze(2)
    return tensor


def allocate(
    shape: Sequence[int], like: Tensor, memory_format: torch.memory_format | None = None
) -> Tensor:
    """Return memory that the kernel fills.

    Torch fills ``torch.empty`` as well while deterministic algorithms are on, which is one more
    launch.
    Without a memory format, it has that of ``like``.
    """
    if memory_format is None:
        memory_format = suggest_memory_format(like)
    strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    memory = torch.UntypedStorage(prod(shape) * like.itemsize, device=like.device)
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(memory, 0, shape, strides)


def encode_float(value: float, dtype: torch.dtype) -> int:
    """Return the bits of a number in float64 for float64, else in float32.

    Triton would pass every float as float32.
    """
    real, integer = ("d", "q") if dtype == torch.float64 else ("f", "i")
    return int(struct.unpack(f"<{integer}", struct.pack(f"<{real}", value))[0])
