"""Kernels written in Triton or Numba: atomics, and configurations chosen by time."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.values import UNKNOWN, Arguments, read_constant
from lightning_d9m.lint.walk import NodeContext, ReportFinding

_ORDERED = {"triton.language.atomic_add", "numba.cuda.atomic.add", "numba.cuda.atomic.sub"}
_LAST_WINS = {
    "triton.language.atomic_xchg",
    "triton.language.atomic_cas",
    "numba.cuda.atomic.exch",
    "numba.cuda.atomic.cas",
}
# Their result is the same in any order; their return value is not.
_ANY_ORDER = {f"triton.language.atomic_{kind}" for kind in ("max", "min", "and", "or", "xor")}
_FLOATS = ("float", "bfloat", "fp", "half", "double")


def check_atomic(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find atomics whose result depends on the order of the threads."""
    assert isinstance(node, ast.Call)
    name = context.resolve(node.func)
    if name is None or name not in _ORDERED | _LAST_WINS | _ANY_ORDER:
        return
    used = not isinstance(context.parents[-1], ast.Expr)
    if name in _ORDERED:
        arguments = Arguments(node, context.scope)
        numba = name.startswith("numba")
        value = arguments.get(2 if numba else 1, "val", "value")
        if not _is_integer(value, context):
            certainty: Certainty = "certain" if _is_float(value) else "depends"
            yield ReportFinding("D9M105", node, certainty)
            return
    if used or name in _LAST_WINS:
        yield ReportFinding(
            "D9M105",
            node,
            "depends",
            reason=(
                "What an atomic returns, and which of several writes is the last, depends on the "
                "order in which programs meet, which is not fixed."
            ),
            fix="Compute places from the program's number, for instance with a prefix sum.",
        )


def check_autotuning(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find ``triton.autotune`` over more than one configuration."""
    assert isinstance(node, ast.Call)
    if context.resolve(node.func) != "triton.autotune":
        return
    configurations = Arguments(node, context.scope).get(0, "configs")
    if (
        isinstance(configurations, ast.List)
        and len(configurations.elts) == 1
        and not isinstance(configurations.elts[0], ast.Starred)
    ):
        return
    known = isinstance(configurations, ast.List)
    yield ReportFinding("D9M106", node, "certain" if known else "depends")


def _is_integer(node: ast.AST | None, context: NodeContext) -> bool:
    if node is None:
        return False
    value = read_constant(node, context.scope)
    if value is not UNKNOWN:
        return isinstance(value, int)
    return _cast(node).strip("u").startswith("int")


def _is_float(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) or (node is not None and _cast(node).startswith(_FLOATS))


def _cast(node: ast.AST) -> str:
    """Return the target dtype of a cast: ``float32`` for ``x.to(tl.float32)``."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"to", "cast", "full", "zeros"}
        and node.args
    ):
        last = node.args[-1]
        return last.attr if isinstance(last, ast.Attribute) else ""
    return ""
