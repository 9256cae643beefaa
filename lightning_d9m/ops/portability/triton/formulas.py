"""The formulas of ``formulas.py`` in the folder above, as Triton kernels.

A kernel is written from its formula, as its C is, at its first use: ``formulas.exp`` launches that
of ``KERNELS["exp"]``. What a total of a row adds is computed again where it is needed later.
"""

import linecache
from collections.abc import Callable, Container, Iterable
from functools import cache, lru_cache, partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.ops.patches.triton.launch import jit, prepare_launch
from lightning_d9m.ops.portability.expressions import TEXTS, Code, RowKernel, declare, write_row
from lightning_d9m.ops.portability.formulas import KERNELS, TWO_OVER_PI
from lightning_d9m.ops.portability.triton import kernels
from lightning_d9m.ops.portability.triton.kernels import BLOCK, LANES

_ROWS, _ELEMENTS = 4, 256  # of a program of four warps: one row each
_BITS = {"to_bits": "int64", "from_bits": "float64"}
# Triton has no tables of constants, so that a place is looked up by as many comparisons.
_LOOK_UP = "tl.full([], 0, tl.int64)"
for _place, _word in enumerate(TWO_OVER_PI):
    _LOOK_UP = f"tl.where({{0}} == {_place}, {_word - (_word >> 63 << 64)}, {_LOOK_UP})"
# Earlier releases of Triton compute `-x` as `0 - x`, which is 0.0 for 0.0; a product with -1
# changes every sign.
_TEXTS = TEXTS | {"neg": "{} * -1", "invert": "~{}", "abs": "tl.abs({})", "lookup": _LOOK_UP}
_TEXTS |= {"where": "tl.where({}, {}, {})", "wide": "{}.to(tl.float64)", "narrow": "{}.to(REAL)"}
_TEXTS |= {name: f"tl.cast({{}}, tl.{kind}, bitcast=True)" for name, kind in _BITS.items()}
_TEXTS |= {"total": "total", "greatest": "greatest", "root": "find_root({})"}
_TEXTS["rest"] = "find_rest({}, {})"
# A number on the device: CUDA multiplies by the reciprocal of one on the CPU.
_TEXTS |= {"truediv": "divide({}, {})", "length": "tl.full([], 0, REAL) + n.to(REAL)"}
_TEXTS["copysign"] = f"tl.abs({{0}}) * tl.where({_TEXTS['to_bits'].format('{1}')} < 0, -1, 1)"
_TYPES = {"double": "tl.float64", "int64_t": "tl.int64", "REAL": "REAL"}
_PLACES = {"number": "tl.load({} + {}).to(REAL)", "0": "tl.load({} + i, mask=here, other=0.0)"}
_PLACES["at"] = "tl.load({} + (at + i), mask=here, other=0.0)"
_PLACES["r % period"] = "tl.load({} + r % period, mask=there, other=0.0)"
# The start of a number of a row and of its lanes, a step of the lanes, and one of the number.
_MAXIMUM = ('float("-inf")', "tl.maximum(lanes, {})", "tl.maximum({}, tl.max(lanes, 1)[:, None])")
_OF_ROWS = {"total": ("0.0", "lanes + {}", "{} + add_lanes(lanes, 1, 5)"), "greatest": _MAXIMUM}
_BEGIN = [f"i = first + tl.arange(0, {LANES})[None, :] + r * 0", "here = there & (i < n)"]


class TritonCode(Code):
    """A number in Triton."""

    texts = _TEXTS
    form = (
        *("{0.name} = {0.text}", "tl.store({} + (at + i), {}, mask=here)"),
        "tl.store({} + r, {}, mask=there)",
    )

    @staticmethod
    def write(number: float, kind: str) -> str:
        """Return a constant of a type; without it, Triton may round it to float32."""
        text = repr(number) if isfinite(number) else f'float("{number}")'
        return f"tl.full([], {text}, {_TYPES[kind]})"


def _loop(head: str, lines: Iterable[str]) -> list[str]:
    return [f"for {head}:", *(f"    {line}" for line in lines)]


def _add_up(one: Code, element: Code, known: Container[Code]) -> list[str]:
    """Return the lines that compute a number of a row from its elements."""
    start, add, end = _OF_ROWS[one.text]
    step = f"lanes = tl.where(here, {add.format(element.name)}, lanes)"
    steps = [*_BEGIN, *declare([element], known), step]
    body = [f"lanes = tl.full([BLOCK, {LANES}], {start}, REAL)"]
    body += _loop(f"first in range(block, tl.minimum(block + {BLOCK}, n), {LANES})", steps)
    body += [f"{one.name} = {end.format(one.name)}"]
    loop = _loop(f"block in range(0, n, {BLOCK})", body)
    return [f"{one.name} = tl.full([BLOCK, 1], {start}, REAL)", *loop]


def write_kernel(kernel: RowKernel) -> str:
    """Return the source of a kernel, a program of which computes ``BLOCK`` rows or elements.

    Its arguments are the fresh outputs, the inputs, the number of all rows or elements, the length
    of a row, and the period of ``Rows``.
    """
    before, each, after = write_row(kernel.trace(TritonCode, _PLACES), _add_up)
    # All inputs have one type, see `compute`; a tensor with an element for each place is always
    # there.
    like = next(name for name, place in kernel.inputs.items() if place == "at")
    arguments = ", ".join((*kernel.fresh, *kernel.inputs, "count", "n", "period"))
    # One kernel for all sizes: only tensors beyond 2**31 elements need counts of 64 bits.
    lines = [
        f"def kernel({arguments}, WIDE: tl.constexpr, BLOCK: tl.constexpr):",
        f"REAL: tl.constexpr = {like}.dtype.element_ty",
        "program = tl.program_id(0)",
        "if WIDE:",
        "    program, n = program.to(tl.int64), n.to(tl.int64)",
        "r = program * BLOCK + tl.arange(0, BLOCK)",
    ]
    if kernel.in_rows:
        lines += ["r = r[:, None]", "there = r < count", "at = r * n", *before]
        lines += _loop(f"first in range(0, n, {LANES})", [*_BEGIN, *each])
    else:
        lines += ["at, i, here = 0, r, r < count", *before, *each]
    return "\n    ".join((*lines, *after)) + "\n"


@cache
def _define(name: str) -> Any:
    """Return the kernel of a name in ``KERNELS``."""
    text, file = write_kernel(KERNELS[name]), f"<kernel {name}>"
    # Triton reads the source of a function where Python's tracebacks do.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # Triton looks up the functions that a kernel calls among the globals of that kernel.
    namespace = dict(vars(kernels))
    exec(compile(text, file, "exec"), namespace)  # noqa: S102 - a formula of ours
    return jit("count", "n", "period")(namespace["kernel"])


@lru_cache(maxsize=4096)
def _prepare(name: str, count: int, n: int, period: int, *_dtypes: torch.dtype) -> Any:
    """Return a launch."""
    block, width = (_ROWS, LANES) if KERNELS[name].in_rows else (_ELEMENTS, 1)
    numbers = count, n, period
    return prepare_launch(_define(name), count, count * n, *numbers, block=block, width=width)


@lru_cache(maxsize=256)
def _put(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers on a device: an optimizer has the same ones for all of its parameters."""
    return torch.tensor(numbers, dtype=torch.float64, device="cpu").to(device)


def _launch(name: str, *given: Any) -> None:
    """Compute a kernel; the fresh outputs come first, then the inputs."""
    kernel = KERNELS[name]
    places = dict(zip((*kernel.fresh, *kernel.inputs), given, strict=True))
    some = {place: places[key] for key, place in kernel.inputs.items()}  # one of each kind
    x, period = some["at"], len(some.get("r % period", [0]))
    # Elements without rows are rows of one element, so one arithmetic of places serves both.
    n = x.shape[-1] if kernel.in_rows else 1
    used = [one if isinstance(one, Tensor) else _put(tuple(one), x.device) for one in given]
    _prepare(name, x.numel() // max(n, 1), n, period, x.dtype)(*used)


def __getattr__(name: str) -> Callable[..., None]:
    if name in KERNELS:
        return partial(_launch, name)
    raise AttributeError(name)
