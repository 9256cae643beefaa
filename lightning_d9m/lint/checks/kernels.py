"""Kernels in Triton or Numba: atomics, and kernels that are chosen by measured time."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.tree import Call, Report, read_constant

_ORDERED = {"triton.language.atomic_add", "numba.cuda.atomic.add", "numba.cuda.atomic.sub"}
_LAST_WINS = {
    *("triton.language.atomic_xchg", "triton.language.atomic_cas"),
    *("numba.cuda.atomic.exch", "numba.cuda.atomic.cas"),
}
# Their result is the same in any order; their return value is not.
_ANY_ORDER = {f"triton.language.atomic_{kind}" for kind in ("max", "min", "and", "or", "xor")}
_FLOATS = ("float", "bfloat", "fp", "half", "double")
_RETURNED = (
    "What an atomic returns, and which of several writes is the last, depends on the order in "
    "which programs meet, which is not fixed."
)


def check_atomic(call: Call) -> Iterator[Report]:
    """Find atomics whose result depends on the order of the threads."""
    if call.name in _ORDERED:
        value = call.get(2 if call.name.startswith("numba") else 1, "val", "value")
        constant = read_constant(value, call.scope)
        dtype = _read_cast(value)
        if not (isinstance(constant, int) or dtype.strip("u").startswith("int")):
            certain = isinstance(value, ast.Constant) or dtype.startswith(_FLOATS)
            yield Report("D9M105", call.node, "certain" if certain else "depends")
            return
    used = not isinstance(call.parent, ast.Expr)
    if call.name in _LAST_WINS or (used and call.name in _ORDERED | _ANY_ORDER):
        fix = "Compute places from the program's number, for instance with a prefix sum."
        yield Report("D9M105", call.node, "depends", _RETURNED, fix)


def _read_cast(node: ast.AST | None) -> str:
    """Return the target dtype of a cast: ``float32`` for ``x.to(tl.float32)``."""
    match node:
        case ast.Call(ast.Attribute(attr="to" | "cast" | "full" | "zeros"), [*_, last]):
            return last.attr if isinstance(last, ast.Attribute) else ""
    return ""


def check_choice_by_time(call: Call) -> Iterator[Report]:
    """Find ``triton.autotune`` over several configurations, and ``torch.compile`` that tunes."""
    if call.name == "triton.autotune":
        match call.get(0, "configs"):
            case ast.List([one]) if not isinstance(one, ast.Starred):
                pass
            case given:
                known = isinstance(given, ast.List)
                yield Report("D9M106", call.node, "certain" if known else "depends")
    elif call.name == "torch.compile" and str(call.read(None, "mode")).startswith("max-autotune"):
        yield Report("D9M106", call.node, "depends")
