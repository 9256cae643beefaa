"""The formulas of ``formulas.py`` in the folder above, as Triton kernels.

A kernel is written from its formula, as its C is, at its first use: ``formulas.exp`` launches that
of ``KERNELS["exp"]``. What a total of a row adds is computed again where it is needed later.
"""

import linecache
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from math import isfinite
from typing import Any

import torch
import triton
from torch import Tensor

from lightning_d9m.ops.portability.definitions import BLOCK, LANES
from lightning_d9m.ops.portability.expressions import Kernel, Number
from lightning_d9m.ops.portability.formulas import FUNCTIONS, KERNELS, TWO_OVER_PI
from lightning_d9m.ops.portability.triton import kernels

_ROWS, _ELEMENTS = 4, 256  # of a program
_BINARY = {"add": "+", "sub": "-", "mul": "*", "and_": "&", "or_": "|", "rshift": ">>"}
_BINARY |= {"lshift": "<<", "lt": "<", "gt": ">", "ge": ">=", "eq": "=="}
_TEXTS = {name: f"{{}} {sign} {{}}" for name, sign in _BINARY.items()} | {
    "truediv": "divide({}, {})",
    "neg": "{} * -1",
    "invert": "~{}",
    "abs": "tl.abs({})",
    "copysign": "copy_sign({}, {})",
    "where": "tl.where({}, {}, {})",
    "to_bits": "{}.to(tl.int64, bitcast=True)",
    "from_bits": "{}.to(tl.float64, bitcast=True)",
    "wide": "{}.to(tl.float64)",
    "narrow": "{}.to(REAL)",
    "root": "find_root({})",
}
_KINDS = dict.fromkeys(("lt", "gt", "ge", "eq"), "tl.int1")
_KINDS |= {"to_bits": "tl.int64", "lookup": "tl.int64", "from_bits": "tl.float64"}
_KINDS |= {"wide": "tl.float64", "narrow": "REAL", "length": "REAL"}
_PLACES = {
    "at": "tl.load({} + (at + i), mask=here, other=0.0)",
    "0": "tl.load({} + i, mask=here, other=0.0)",
    "r % period": "tl.load({} + r % period, mask=there, other=0.0)",
}
# The start of a number of a row and of its lanes, a step of the lanes, and of the number.
_OF_ROWS = {
    "total": ("0.0", "lanes + {}", "{} + add_lanes(lanes, 1)"),
    "greatest": (
        'float("-inf")',
        "tl.maximum(lanes, {})",
        "tl.maximum({}, tl.max(lanes, 1)[:, None])",
    ),
}


class Line(Number):
    """A number of a kernel: a line of its source.

    Attributes:
        program: All numbers of the formula in order; this one is appended.
        kind: Its type.
        text: What computes it.
        operands: The numbers in the text.
        each: Whether it differs between the elements of a row.
        of_row: ``total`` or ``greatest`` if it takes a whole row.
    """

    def __init__(
        self,
        program: "list[Line]",
        kind: str,
        text: str,
        operands: "tuple[Line, ...]" = (),
        each: bool = False,
        of_row: str = "",
    ) -> None:
        self.program, self.kind, self.text, self.operands = program, kind, text, operands
        self.each, self.of_row, self.name = each, of_row, f"v{len(program)}"
        program.append(self)

    def apply(self, operation: str, *operands: Any) -> Any:
        """Append the result of an operation to the program."""
        if operation in FUNCTIONS:
            return FUNCTIONS[operation](*operands)
        if operation == "length":
            return Line(self.program, "REAL", "n.to(REAL)")
        lines = tuple(one for one in operands if isinstance(one, Line))
        kinds = {one.kind for one in lines} - {"tl.int1"}
        like = kinds.pop() if kinds else "tl.float64" if operation == "where" else "tl.int1"
        kind = _KINDS.get(operation, like)
        if operation in _OF_ROWS:
            return Line(self.program, kind, "", lines, of_row=operation)
        names = [one.name if isinstance(one, Line) else _write(one, like) for one in operands]
        text = _TEXTS[operation].format(*names) if operation != "lookup" else _choose(names[0])
        return Line(self.program, kind, text, lines, any(one.each for one in lines))


def _write(number: float, kind: str) -> str:
    """Return a constant of a type; without it, Triton may round it to float32."""
    text = repr(number) if isfinite(number) else f'float("{number}")'
    return f"tl.full([], {text}, {kind})"


def _choose(place: str) -> str:
    text = _write(0, "tl.int64")
    for number, word in enumerate(TWO_OVER_PI):
        signed = _write(word - (word >> 63 << 64), "tl.int64")
        text = f"tl.where({place} == {number}, {signed}, {text})"
    return text


def _list_needed(results: Iterable[Line], known: set[Line]) -> list[Line]:
    """Return the numbers that others are computed from, in order, without those that are known."""
    needed, left = set[Line](), [*results]
    program = left[0].program if left else []
    while left:
        one = left.pop()
        if one not in needed and one not in known:
            needed.add(one)
            left += one.operands
    return [one for one in program if one in needed]


def _declare(results: Iterable[Line], known: set[Line]) -> list[str]:
    """Return the lines that compute numbers from those that are known."""
    return [f"{one.name} = {one.text}" for one in _list_needed(results, known)]


def _loop(begin: str, end: str, lines: Iterable[str]) -> list[str]:
    """Return the lines of a loop over the elements of rows, ``LANES`` at a time."""
    head = f"for first in range({begin}, {end}, {LANES}):"
    body = ("i = first + lane", "here = there & (i < n)", *lines)
    return [head, *(f"    {line}" for line in body)]


def _write_rows(results: dict[str, Line], stores: list[str]) -> list[str]:
    """Return the lines that compute rows."""
    lines, known = ["r = r[:, None]", "there = r < count", "at = r * n"], set[Line]()
    lines += [f"lane = tl.arange(0, {LANES})[None, :] + r * 0"]
    for one in _list_needed(results.values(), known):
        if one.of_row:
            start, add, end = _OF_ROWS[one.of_row]
            (element,) = one.operands
            step = f"lanes = tl.where(here, {add.format(element.name)}, lanes)"
            lines += [f"{one.name} = tl.full([BLOCK, 1], {start}, REAL)"]
            lines += [f"for block in range(0, n, {BLOCK}):"]
            body = [f"lanes = tl.full([BLOCK, {LANES}], {start}, REAL)"]
            steps = [*_declare([element], known), step]
            body += _loop("block", f"tl.minimum(block + {BLOCK}, n)", steps)
            lines += [f"    {line}" for line in (*body, f"{one.name} = {end.format(one.name)}")]
        elif not one.each:
            lines.append(f"{one.name} = {one.text}")
        if not one.each:
            known.add(one)
    each = [one for one in results.values() if one.each]
    lines += _loop("0", "n", (*_declare(each, known), *stores))
    totals = ((name, one.name) for name, one in results.items() if not one.each)
    return lines + [f"tl.store({name} + r, {value}, mask=there)" for name, value in totals]


def write_kernel(kernel: Kernel) -> str:
    """Return the source of a kernel, a program of which computes ``BLOCK`` rows or elements.

    Its arguments are the fresh outputs, the inputs, the number of all rows or elements, the length
    of a row, and the period of ``Rows``.
    """
    program, given = list[Line](), dict[str, Any]()
    for name, place in kernel.inputs.items():
        if isinstance(place, int):
            texts = (f"tl.load({name} + {k}).to(REAL)" for k in range(place))
            given[name] = [Line(program, "REAL", text) for text in texts]
        else:
            each = place in ("at", "0")
            given[name] = Line(program, "REAL", _PLACES[place].format(name), each=each)
    results: dict[str, Line] = kernel.formula(**given)
    each = [(name, one) for name, one in results.items() if one.each]
    stores = [f"tl.store({name} + (at + i), {one.name}, mask=here)" for name, one in each]
    like = next(name for name, place in kernel.inputs.items() if place == "at")
    arguments = ", ".join((*kernel.fresh, *kernel.inputs, "count", "n", "period"))
    lines = [
        f"def kernel({arguments}, BLOCK: tl.constexpr):",
        f"REAL: tl.constexpr = {like}.dtype.element_ty",
        "r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
    ]
    if kernel.in_rows:
        lines += _write_rows(results, stores)
    else:
        lines += ["at, i, here = 0, r, r < count", *_declare(results.values(), set()), *stores]
    return "\n    ".join(lines) + "\n"


@cache
def _compile(name: str) -> Any:
    """Return the kernel of a name in ``KERNELS``."""
    text, file = write_kernel(KERNELS[name]), f"<kernel {name}>"
    # Triton reads the source of a function where Python's tracebacks do.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace = dict(vars(kernels))
    exec(compile(text, file, "exec"), namespace)  # noqa: S102 - a formula of ours
    return triton.jit(do_not_specialize=["count", "n", "period"])(namespace["kernel"])


@lru_cache(maxsize=256)
def _put(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers on a device: an optimizer has the same ones for all of its parameters."""
    return torch.tensor(numbers, dtype=torch.float64, device="cpu").to(device)


def _launch(name: str, *given: Any) -> None:
    """Compute a kernel; the fresh outputs come first, then the inputs."""
    kernel = KERNELS[name]
    names, places = (*kernel.fresh, *kernel.inputs), kernel.inputs
    x = next(one for key, one in zip(names, given, strict=True) if places.get(key) == "at")
    used = [
        one.contiguous() if isinstance(one, Tensor) else _put(tuple(map(float, one)), x.device)
        for one in given
    ]
    n = x.shape[-1] if kernel.in_rows else 1
    periods = (
        len(one) for key, one in zip(names, used, strict=True) if places.get(key) == "r % period"
    )
    count, each = x.numel() // max(n, 1), _ROWS if kernel.in_rows else _ELEMENTS
    numbers = (count, n, next(periods, 1), each)
    kernels.start(_compile(name), triton.cdiv(count, each), used, *numbers)
    for key, one, own in zip(names, given, used, strict=True):
        if key in kernel.outputs and own is not one:
            one.copy_(own)


def __getattr__(name: str) -> Callable[..., None]:
    if name not in KERNELS:
        raise AttributeError(name)
    return partial(_launch, name)
