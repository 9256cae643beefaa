"""Launches of Triton kernels, with torch ops as the fallback.

The text of a kernel is compiled by Triton, which is loaded at the first use on a CUDA device. Torch
ops run the same text on a CPU, and as the fallback (``language.py``). On a device both compute a
small example first.
"""

import threading
import warnings
from collections.abc import Callable
from functools import cache
from pkgutil import resolve_name
from subprocess import SubprocessError
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.errors import D9mError
from lightning_d9m.ops.patches.triton import language

INT32_LIMIT = 2**31 - 1
# The CPU rounds each product before it adds it, and so must a kernel.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_BLOCK = 128  # elements of a program of four warps
_MARGIN = 4096  # elements by which the last program, which has whole blocks, may pass the last one
_SLICE = 2**18  # elements of a program of torch ops: a few of their tensors fit a processor's cache
_device_types = {"cuda"}  # tests add "cpu", where Triton's interpreter runs the kernels
# Both last as long as the process: a kernel that failed once would fail, and warn, in each step.
_withdrawn: set[str] = set()
_checked: set[tuple[str, torch.device, torch.dtype]] = set()
_load = cache(lambda path: resolve_name(path if "." in path else f"{__package__}.{path}"))
_thread = threading.local()  # `by_torch` while torch ops run the kernels

natives: dict[str, Callable[..., Any]] = {}
"""Functions with the arguments and the bits of kernels, by their paths, faster than torch ops.

They return ``NotImplemented`` for tensors that they do not take, as those of a device.
"""


def jit(*sizes: str) -> Callable[[Any], Any]:
    """Mark a function that Triton compiles, of which some arguments are numbers: one for all."""

    def mark(function: Any) -> Any:
        function.sizes = sizes
        return function

    return mark


@cache
def _translate(kernel: Any) -> Any:
    """Return the function of Triton for a kernel."""
    import triton
    import triton.language

    # In the copies `tl` is Triton's, and names of other functions are those that Triton compiles.
    # A second text with the same bits took 320 lines, and tests on a CPU did not run the first one.
    given = kernel.__globals__
    names = {**given, "tl": triton.language}
    for name, one in given.items():
        if hasattr(one, "sizes"):
            copy = FunctionType(one.__code__, names, name)
            copy.__annotations__ = one.__annotations__
            names[name] = triton.jit(do_not_specialize=[*one.sizes])(copy)
    return names[kernel.__name__]


def run_on_torch(path: str, *args: Any) -> None:
    """Call a function that launches kernels, and let torch ops run them."""
    before, _thread.by_torch = getattr(_thread, "by_torch", False), True
    try:
        _load(path)(*args)
    finally:
        _thread.by_torch = before


def run_kernel(
    path: str, example: Callable[[torch.device], tuple[Any, ...]], out: Tensor, *args: Any
) -> None:
    """Write into a tensor with a Triton kernel on CUDA, and with torch ops elsewhere.

    Torch ops also take over, with a warning, from a kernel that cannot be loaded, compiled or
    launched, and from one whose example has different bits on the CPU.

    Args:
        path: ``"module:function"`` in this folder, or with the whole name of the module: the
            function that launches the kernel.
        example: Returns small arguments on a device, at the first use of each dtype there.
        out: The tensor to write into.
        *args: More arguments.

    Raises:
        RuntimeError: The device failed before, as by an assertion.
        D9mError: The kernel failed while a CUDA graph is captured, or before: it is compiled at its
            first use, which cannot be part of a graph, and neither can torch ops.
    """
    device = out.device
    if device.type in _device_types and path not in _withdrawn:
        try:
            kernel = _load(path)
            # A kernel may have code for each dtype.
            use = path, device, out.dtype
            if use not in _checked and not is_capturing():
                _checked.add(use)
                _check(path, example, device)
            kernel(out, *args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # TritonError is a plain Exception; any failure falls back
            if is_capturing():
                raise D9mError(
                    f"A CUDA graph is being captured, and the Triton kernel {path} failed "
                    f"({type(error).__name__}: {error}). It is compiled and loaded at its first "
                    "use. Run the same step once before the capture."
                ) from error
            reason = explain_failure(error, device)
            _withdrawn.add(path)
            warnings.warn(
                f"The Triton kernel {path} cannot be used ({reason}). Torch ops compute the same "
                "bits on this device, but more slowly.",
                stacklevel=3,
            )
        else:
            return
    if device.type in _device_types and is_capturing():
        raise D9mError(
            f"A CUDA graph is being captured, and the Triton kernel {path} cannot be used on this "
            "device. Torch ops, which run its text, wait for the device, and a graph cannot hold "
            "that. Leave this step out of the graph."
        )
    # A mode, as that of portable bits, would take the operations of the text apart again.
    with torch._C._DisableTorchDispatch():  # noqa: SLF001 - no public form
        native = natives.get(path)
        if native is None or native(out, *args) is NotImplemented:
            run_on_torch(path, out, *args)


def _check(
    path: str, example: Callable[[torch.device], tuple[Any, ...]], device: torch.device
) -> None:
    given, known = example(device), example(torch.device("cpu"))
    _load(path)(*given)
    run_on_torch(path, *known)
    tensors = [
        [one.cpu().flatten().view(torch.uint8) for one in some if isinstance(one, Tensor)]
        for some in (given, known)
    ]
    if not all(map(torch.equal, *tensors)):
        raise RuntimeError(f"on {device} its bits for a small example are not the CPU's")


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


def prepare_launch(
    kernel: Any,
    elements: int,
    offsets: int,
    *numbers: Any,
    block: int | None = None,
    width: int = 1,
    count: Callable[[int], int] | None = None,
) -> Callable[..., None]:
    """Return a launch, which takes tensors: all but their addresses is known.

    Triton binds the arguments of the first call and compiles; later calls start what it compiled.

    Args:
        kernel: The kernel, whose arguments are tensors, then numbers, then constants; the last
            constants are ``WIDE``, whether it counts in 64 bits, and ``BLOCK``, the number of
            elements that a program computes at a time.
        elements: The elements that the programs divide among themselves.
        offsets: The greatest offset from any of the tensors.
        numbers: The other arguments, without ``WIDE`` and ``BLOCK``.
        block: The elements of a program, if not the usual number.
        width: The numbers that a program has for each element.
        count: Returns the number of programs by their elements, by default one for each block.
    """
    block = block or _BLOCK
    numbers = (*numbers, max(elements, offsets) > INT32_LIMIT - _MARGIN)
    count = count or (lambda block: -(-elements // block))
    grid = (count(block), 1, 1)
    variants: dict[tuple[object, ...], Any] = {}

    def launch(*tensors: Tensor) -> None:
        device = tensors[0].device
        if getattr(_thread, "by_torch", False):
            some = max(min(elements, _SLICE // width), 1)
            _run(kernel, count(some), tensors, numbers, some)
            return
        # Triton compiles code for aligned tensors, and for others.
        variant = (device, *[address & 15 for address in map(Tensor.data_ptr, tensors)])
        compiled = variants.get(variant)
        with torch.cuda.device(device.index if tensors[0].is_cuda else -1):
            if compiled is None:
                found = _translate(kernel)[grid](*tensors, *numbers, block, **OPTIONS)
                variants[variant] = found and found[grid]
            else:
                compiled(*tensors, *numbers, block)

    return launch


def _run(kernel: Any, programs: int, tensors: Any, numbers: Any, block: int) -> None:
    """Run a kernel by torch ops, whose whole numbers have 64 bits."""
    sizes = len(kernel.sizes)
    given: list[Any] = [*map(language.point_to, tensors)]
    # Tensors of no dimension have `to` and `dtype`, as numbers of Triton have, leave the type of a
    # result to the other operand, and are taken from the CPU together with those of any device.
    given += [torch.tensor(one, device="cpu") for one in numbers[:sizes]]
    given += [*numbers[sizes:-1], False, block]
    language.run(kernel, programs, tensors[0].device, *given)
