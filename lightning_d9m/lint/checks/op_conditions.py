"""Conditions under which a call runs a nondeterministic op: mode, dtype, size, used results.

Each condition is given the call's arguments and what stands around it, and returns the catalog's
name of the op and whether that is certain, or None where the call is deterministic.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.values import UNKNOWN, Arguments, find_value, read_kind

Verdict: TypeAlias = tuple[str, Certainty] | None
Condition: TypeAlias = Callable[["CallSite"], Verdict]

_INTERPOLATIONS = {
    "linear": "upsample_linear1d_backward",
    "bilinear": "upsample_bilinear2d_backward",
    "bicubic": "upsample_bicubic2d_backward",
    "trilinear": "upsample_trilinear3d_backward",
}
_INTEGER_CASTS = {"int", "long", "short", "byte", "bool"}


@dataclass(frozen=True)
class CallSite:
    """A call of an op.

    Attributes:
        arguments: Its arguments.
        parents: The nodes around it, the nearest last.
        owned: Whether its receiver is known to be a tensor, or it is not a method.
    """

    arguments: Arguments
    parents: Sequence[ast.AST]
    owned: bool


def always(op: str, certainty: Certainty = "certain") -> Condition:
    """Accept any arguments."""
    return lambda _: (op, certainty)


def unless(
    op: str, default: object, context: int | None, *names: str, fine: set[object]
) -> Condition:
    """Accept a call unless an argument, or its default, has one of the ``fine`` values."""

    def check(spelled: CallSite) -> Verdict:
        value = spelled.arguments.read(context, *names, default=default)
        return None if value in fine else (op, "depends" if value is UNKNOWN else "certain")

    return check


def given(op: str, context: int | None, *names: str) -> Condition:
    """Accept a call if an argument is given."""

    def check(spelled: CallSite) -> Verdict:
        has = spelled.arguments.has(context, *names)
        return None if has is False else (op, "certain" if has else "depends")

    return check


def interpolated(context: int) -> Condition:
    """Choose the op by the mode of an interpolation."""

    def check(spelled: CallSite) -> Verdict:
        mode = spelled.arguments.read(context, "mode", default="nearest")
        if mode is UNKNOWN:
            return "upsample_bilinear2d_backward", "depends"
        if mode == "area":
            return "adaptive_avg_pool2d_backward", "depends"
        if spelled.arguments.read(None, "antialias", default=False) is True and mode != "linear":
            return f"upsample_{mode}2d_aa_backward", "certain"
        op = _INTERPOLATIONS.get(str(mode))
        return (op, "certain") if op else None

    return check


def padded(spelled: CallSite) -> Verdict:
    """Choose the op by the mode of ``pad`` and the padded dimensions."""
    return _pad(spelled, "constant", 2, "mode", _count_dims(spelled.arguments.read(1, "pad")))


def convolved(dims: int) -> Condition:
    """Choose the op by the ``padding_mode`` of a convolution."""
    return lambda spelled: _pad(spelled, "zeros", 8, "padding_mode", dims)


def _pad(spelled: CallSite, default: str, context: int, name: str, dims: int) -> Verdict:
    mode = spelled.arguments.read(context, name, default=default)
    if mode is UNKNOWN:
        return f"reflection_pad{dims}d_backward", "depends"
    kind = {"reflect": "reflection", "replicate": "replication"}.get(str(mode))
    return (f"{kind}_pad{dims}d_backward", "certain") if kind else None


def _count_dims(pad: object) -> int:
    known = isinstance(pad, tuple) and len(pad) in {2, 4, 6}
    return len(pad) // 2 if known else 2  # type: ignore[arg-type] # a tuple, as known says


def pooled(op: str, context: int) -> Condition:
    """Accept a pooling unless its output has one element, for which torch takes the mean."""

    def check(spelled: CallSite) -> Verdict:
        size = spelled.arguments.read(context, "output_size", default=UNKNOWN)
        if size == 1 or (isinstance(size, tuple) and set(size) == {1}):
            return None
        return op, "depends" if size is UNKNOWN else "certain"

    return check


def reduced(spelled: CallSite) -> Verdict:
    """Choose the op by the reduction of ``scatter_reduce``."""
    reduction = spelled.arguments.read(4, "reduce", default=UNKNOWN)
    if reduction == "prod":
        return "scatter_reduce_prod", "certain"
    if reduction in {"sum", "mean"}:
        return "scatter_reduce_sum", "certain"
    return ("scatter_reduce_prod", "depends") if reduction is UNKNOWN else None


def put_by_index(spelled: CallSite) -> Verdict:
    """Choose the op by the ``accumulate`` argument of ``index_put``."""
    adds = spelled.arguments.read(3, "accumulate", default=False)
    return "index_put_accumulate" if adds is True else "index_put", "certain"


def scattered(spelled: CallSite) -> Verdict:
    """Accept a scatter unless its source is one number, as for one-hot vectors."""
    arguments = spelled.arguments
    if not spelled.owned and not _is_indexed(arguments, 3):
        return None
    source = arguments.get(3, "src", "value")
    if source is None or "value" in arguments.named:
        return None
    if isinstance(arguments.read(3, "src", default=UNKNOWN), (int, float)):
        return None
    op = "scatter_with_reduce" if isinstance(arguments.read(None, "reduce"), str) else "scatter"
    kind = read_kind(source, arguments.scope)
    return None if kind == "other" else (op, "certain" if kind == "tensor" else "depends")


def gathered(spelled: CallSite) -> Verdict:
    """Accept a tensor's ``gather``, which takes a dimension and an index."""
    fine = spelled.owned or _is_indexed(spelled.arguments, 2)
    return ("gather_backward", "certain") if fine else None


def taken(spelled: CallSite) -> Verdict:
    """Accept a tensor's ``take``, whose gradient calls ``put_``."""
    return ("put_", "certain") if spelled.owned else None


def repeated(spelled: CallSite) -> Verdict:
    """Accept ``repeat_interleave`` unless it repeats all elements equally, which torch expands."""
    count = spelled.arguments.read(1, "repeats", default=UNKNOWN)
    if isinstance(count, int):
        return None
    node = spelled.arguments.get(1, "repeats")
    tensor = node is not None and read_kind(node, spelled.arguments.scope) == "tensor"
    return "repeat_interleave_backward", "certain" if tensor else "depends"


def counted(spelled: CallSite) -> Verdict:
    """Accept ``histc`` of floating point."""
    first = spelled.arguments.get(0, "input")
    if first is None and isinstance(spelled.arguments.call.func, ast.Attribute):
        first = spelled.arguments.call.func.value
    return None if first is not None and _is_integer(first, spelled) else ("histc", "certain")


def multiplied(spelled: CallSite) -> Verdict:
    """Accept ``bmm`` of a sparse tensor."""
    first = spelled.arguments.get(0, "input")
    if first is None and isinstance(spelled.arguments.call.func, ast.Attribute):
        first = spelled.arguments.call.func.value
    if first is None:
        return None
    value = find_value(first, spelled.arguments.scope)
    sparse = any(
        "sparse" in (node.attr if isinstance(node, ast.Attribute) else "")
        for node in ast.walk(value)
    )
    return ("bmm_sparse", "certain") if sparse else None


def selected(op: str) -> Condition:
    """Accept an op along a dimension if its indices, which vary, are used."""

    def check(spelled: CallSite) -> Verdict:
        arguments = spelled.arguments
        if op in {"median", "nanmedian"}:
            along = arguments.get(1, "dim")
            if along is None and not arguments.unpacked:
                return None
            if "dim" not in arguments.named and not spelled.owned:
                return None
        return (
            None if _takes_values_only(spelled) else (op, "certain" if spelled.owned else "depends")
        )

    return check


def _takes_values_only(spelled: CallSite) -> bool:
    parent = spelled.parents[-1] if spelled.parents else None
    if isinstance(parent, ast.Attribute):
        return parent.attr == "values"
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.slice, ast.Constant) and parent.slice.value == 0
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Tuple):
        names = parent.targets[0].elts
        return isinstance(names[-1], ast.Name) and names[-1].id.strip("_") == ""
    return isinstance(parent, ast.Expr)


def _is_indexed(arguments: Arguments, least: int) -> bool:
    """Return whether a method's arguments begin with a dimension and an index."""
    if {"index", "src"} & set(arguments.named):
        return True
    dim = arguments.get(1, "dim")
    if dim is None or len(arguments.positional) + len(arguments.named) < least:
        return False
    named = isinstance(dim, ast.Name) and ("dim" in dim.id or "axis" in dim.id)
    return named or isinstance(arguments.read(1, "dim", default=UNKNOWN), int)


def _is_integer(node: ast.AST, spelled: CallSite) -> bool:
    node = find_value(node, spelled.arguments.scope)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    dtypes = [*node.args, *(word.value for word in node.keywords if word.arg == "dtype")]
    integer = any(
        isinstance(dtype, ast.Attribute) and dtype.attr.strip("u").startswith("int")
        for dtype in dtypes
    )
    return node.func.attr in _INTEGER_CASTS or integer
