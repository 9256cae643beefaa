"""Reads ``x[index]`` whose gradient adds several values to one place."""

import ast
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from lightning_d9m.lint.checks.op_table import explain_op, rule_of
from lightning_d9m.lint.checks.ops import is_without_gradient
from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.scopes import Scope, resolve
from lightning_d9m.lint.values import Arguments, find_value, list_values, read_constant
from lightning_d9m.lint.walk import NodeContext, ReportFinding

_OP = "index_put_accumulate"
_PARAMETERS = {"torch.nn.Parameter", "torch.nn.parameter.Parameter"}
_OF_A_MODULE = {"weight", "bias"}
_CONSTANT = {"torch.zeros", "torch.ones", "torch.full"}
_INTEGERS = {f"torch.{name}" for name in ("long", "int", "int64", "int32", "short", "int16")}
# Methods that keep which entries of an index are equal, and do not make a mask of it.
_SAME_ENTRIES = {"long", "int", "cuda", "cpu", "clone", "view", "reshape", "flatten", "contiguous"}
_REPEATING = {"repeat", "repeat_interleave"}
_INDICES = {"torch.arange", "torch.randperm", "torch.randint"}


def check_index(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find an index that repeats entries of a tensor with a gradient."""
    assert isinstance(node, ast.Subscript)
    if not isinstance(node.ctx, ast.Load) or not _has_gradient(node.value, context.scope):
        return
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    found = [certainty for part in parts if (certainty := _repeats(part, context.scope))]
    if not found or is_without_gradient(context):
        return
    op, reason, fix = explain_op(_OP)
    reason = f"The index repeats entries, so its gradient adds to them by index_put_. {reason}"
    yield ReportFinding(rule_of(op), node, min(found), reason, fix, op.name)


def _has_gradient(node: ast.AST, scope: Scope) -> bool:
    """Return whether a tensor is a parameter, or made with ``requires_grad``."""
    if isinstance(node, ast.Attribute) and node.attr in _OF_A_MODULE:
        modules = _list_bound(node.value, scope)
        return bool(modules) and all(_is_module(value, scope) for value in modules)
    values = _list_bound(node, scope)
    return bool(values) and all(_makes_gradient(value, scope) for value in values)


def _list_bound(node: ast.AST, scope: Scope) -> Sequence[ast.AST]:
    """Return the values of a name that is bound once, or of an attribute of the class."""
    if isinstance(node, ast.Name):
        value = find_value(node, scope)
        return [] if value is node else [value]
    if isinstance(node, ast.Attribute) and _is_self(node.value):
        return list_values(node, scope)[0]
    return []


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_module(node: ast.AST, scope: Scope) -> bool:
    name = (resolve(node.func, scope) or "") if isinstance(node, ast.Call) else ""
    return name.startswith("torch.nn.") and name.rpartition(".")[2][:1].isupper()


def _makes_gradient(node: ast.AST, scope: Scope) -> bool:
    if not isinstance(node, ast.Call):
        return False
    arguments = Arguments(node, scope)
    name = resolve(node.func, scope) or ""
    if name in _PARAMETERS:
        return arguments.read(1, "requires_grad", default=True) is True
    if name.startswith("torch."):
        return arguments.read(None, "requires_grad", default=False) is True
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return method == "requires_grad_" and arguments.read(0, "requires_grad", default=True) is True


def _repeats(node: ast.AST, scope: Scope) -> Certainty | None:
    """Return whether an index has equal entries: certain, as drawn numbers may, or not known."""
    values = _list_bound(node, scope) or [node]
    found = {_repeats_value(value, scope) for value in values}
    if None in found:
        return None
    return "depends" if "depends" in found else "certain"


def _repeats_value(node: ast.AST, scope: Scope) -> Certainty | None:
    cast = False
    while isinstance(node, ast.Call) and _method(node, scope) in _SAME_ENTRIES | {"to"}:
        cast |= _method(node, scope) in {"long", "int"}
        if _method(node, scope) == "to" and not _moves_only(node, scope):
            return None
        node = find_value(node.func.value, scope)  # type: ignore[attr-defined] # it is a method
    if isinstance(node, ast.List):
        return "certain" if _has_duplicates(read_constant(node, scope)) else None
    return _repeats_made(node, scope, cast=cast) if isinstance(node, ast.Call) else None


def _repeats_made(node: ast.Call, scope: Scope, *, cast: bool) -> Certainty | None:
    """Return whether a call makes an index with equal entries."""
    name, arguments = resolve(node.func, scope) or "", Arguments(node, scope)
    if name == "torch.randint":  # (high, size) or (low, high, size)
        fits = arguments.get(None, "dtype") is None or _is_integer(arguments)
        size = 1 if isinstance(arguments.read(1), tuple) else 2
        return "depends" if fits and _is_long(arguments, size) else None
    if name == "torch.tensor":
        repeats = _has_duplicates(arguments.read(0, "data"))
    elif name in _CONSTANT:
        repeats = (cast or _is_integer(arguments)) and _is_long(arguments, 0)
    else:
        repeats = _method(node, scope) in _REPEATING and _repeats_index(node, scope)
    return "certain" if repeats else None


def _is_integer(arguments: Arguments) -> bool:
    dtype = arguments.get(None, "dtype")
    return dtype is not None and resolve(dtype, arguments.scope) in _INTEGERS


def _repeats_index(node: ast.Call, scope: Scope) -> bool:
    """Return whether a method repeats an index several times."""
    counts = [read_constant(count, scope) for count in node.args]
    several = any(type(n) is int and n > 1 for n in counts)
    return several and isinstance(node.func, ast.Attribute) and _is_index(node.func.value, scope)


def _method(node: ast.Call, scope: Scope) -> str:
    """Return the name of a called method; empty for a function."""
    own = isinstance(node.func, ast.Attribute) and resolve(node.func, scope) is None
    return node.func.attr if own else ""  # type: ignore[attr-defined] # an attribute, as own says


def _moves_only(node: ast.Call, scope: Scope) -> bool:
    """Return whether ``to`` names no dtype but that of an index."""
    given = [*node.args, *(word.value for word in node.keywords)]
    names = [resolve(value, scope) or "" for value in given]
    dtypes = {"torch.bool", "torch.uint8"}
    return not dtypes & set(names)


def _is_index(node: ast.AST, scope: Scope) -> bool:
    """Return whether an expression holds integers, and not a mask."""
    value = find_value(node, scope)
    if not isinstance(value, ast.Call):
        return False
    name, arguments = resolve(value.func, scope), Arguments(value, scope)
    if name == "torch.tensor":
        return _is_whole(arguments.read(0, "data"))
    return name in _INDICES and arguments.get(None, "dtype") is None


def _is_long(arguments: Arguments, position: int) -> bool:
    """Return whether the size has several elements, as far as the source shows."""
    given = arguments.get(position, "size")
    if given is None:
        return False
    size = read_constant(given, arguments.scope)
    sizes = size if isinstance(size, tuple) else (size,)
    return any(type(n) is int and n > 1 for n in sizes)


def _is_whole(entries: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(entries, tuple) and all(type(entry) is int for entry in entries)


def _has_duplicates(entries: object) -> bool:
    return _is_whole(entries) and len(entries) != len(set(entries))
