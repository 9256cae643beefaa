"""Reads ``x[index]`` whose gradient adds several values to one place."""

import ast
from collections.abc import Iterator, Sequence

from lightning_d9m.lint.checks.ops import explain_op, is_without_gradient, rule_of
from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.tree import (
    Call,
    Report,
    Scope,
    Tree,
    find_value,
    read_constant,
    resolve,
)

_OP = "index_put_accumulate"
_PARAMETERS = {"torch.nn.Parameter", "torch.nn.parameter.Parameter"}
_CONSTANT = {"torch.zeros", "torch.ones", "torch.full"}
_INTEGERS = {f"torch.{name}" for name in ("long", "int", "int64", "int32", "short", "int16")}
# Methods that keep which entries of an index are equal, and do not make a mask of it.
_SAME_ENTRIES = {"long", "int", "cuda", "cpu", "clone", "view", "reshape", "flatten", "contiguous"}
_REPEATING = {"repeat", "repeat_interleave"}
_INDICES = {"torch.arange", "torch.randperm", "torch.randint"}
_MASKS = {"torch.bool", "torch.uint8"}


def check_index(node: ast.Subscript, tree: Tree) -> Iterator[Report]:
    """Find an index that repeats entries of a tensor with a gradient."""
    if not isinstance(node.ctx, ast.Load) or not _has_gradient(node.value, tree):
        return
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    found = [certainty for part in parts if (certainty := _repeats(part, tree))]
    if found and not is_without_gradient(node, tree):
        op, reason, fix = explain_op(_OP)
        reason = f"The index repeats entries, so its gradient adds to them by index_put_. {reason}"
        yield Report(rule_of(op), node, min(found), reason, fix, op.name)


def _has_gradient(node: ast.expr, tree: Tree) -> bool:
    """Return whether a tensor is a parameter, or made with ``requires_grad``."""
    makes = _makes_gradient
    if isinstance(node, ast.Attribute) and node.attr in {"weight", "bias"}:
        node, makes = node.value, _makes_module
    calls = _list_bound(node, tree.scope[node])
    return bool(calls) and all(
        isinstance(one, ast.Call) and makes(Call(one, tree)) for one in calls
    )


def _list_bound(node: ast.expr, scope: Scope) -> Sequence[ast.AST]:
    """Return the values of a name that is bound once, or of an attribute of the class."""
    match node:
        case ast.Name():
            value = find_value(node, scope)
            return [] if value is node else [value]
        case ast.Attribute(ast.Name("self")):
            return scope.list_values(node)[0]
    return []


def _makes_module(call: Call) -> bool:
    return call.name.startswith("torch.nn.") and call.name.rpartition(".")[2][:1].isupper()


def _makes_gradient(call: Call) -> bool:
    if call.name in _PARAMETERS or call.method == "requires_grad_":
        position = 1 if call.name else 0
        return call.read(position, "requires_grad", default=True) is True
    return call.name.startswith("torch.") and call.read(None, "requires_grad") is True


def _repeats(node: ast.expr, tree: Tree) -> Certainty | None:
    """Return whether an index has equal entries: certain, as drawn numbers may, or not known."""
    values = _list_bound(node, tree.scope[node]) or [node]
    found = {_repeats_value(value, tree) for value in values}
    if None in found:
        return None
    return "depends" if "depends" in found else "certain"


def _repeats_value(node: ast.AST, tree: Tree) -> Certainty | None:
    cast = False
    while isinstance(node, ast.Call):
        call = Call(node, tree)
        if call.receiver is None or call.method not in {*_SAME_ENTRIES, "to"}:
            return _repeats_made(call, cast=cast)
        given = [*node.args, *call.named.values()]
        if call.method == "to" and _MASKS & {resolve(value, call.scope) for value in given}:
            return None
        cast |= call.method in {"long", "int"}
        node = find_value(call.receiver, call.scope)
    duplicates = isinstance(node, ast.List) and _has_duplicates(
        read_constant(node, tree.scope[node])
    )
    return "certain" if duplicates else None


def _repeats_made(call: Call, *, cast: bool) -> Certainty | None:
    """Return whether a call makes an index with equal entries."""
    dtype = resolve(call.get(None, "dtype"), call.scope)
    if call.name == "torch.randint":  # (high, size) or (low, high, size)
        fits = call.get(None, "dtype") is None or dtype in _INTEGERS
        size = 1 if isinstance(call.read(1), tuple) else 2
        return "depends" if fits and _is_long(call, size) else None
    if call.name == "torch.tensor":
        repeats = _has_duplicates(call.read(0, "data"))
    elif call.name in _CONSTANT:
        repeats = (cast or dtype in _INTEGERS) and _is_long(call, 0)
    else:
        counts = [read_constant(count, call.scope) for count in call.node.args]
        several = any(type(n) is int and n > 1 for n in counts)
        repeats = call.method in _REPEATING and several and _repeats_index(call)
    return "certain" if repeats else None


def _repeats_index(call: Call) -> bool:
    """Return whether the receiver of a method holds integers, and is not a mask."""
    value = find_value(call.receiver, call.scope) if call.receiver is not None else None
    if not isinstance(value, ast.Call):
        return False
    made = Call(value, call.tree)
    if made.name == "torch.tensor":
        return _is_whole(made.read(0, "data"))
    return made.name in _INDICES and made.get(None, "dtype") is None


def _is_long(call: Call, position: int) -> bool:
    """Return whether the size has several elements, as far as the source shows."""
    size = call.read(position, "size", default=0)
    sizes = size if isinstance(size, tuple) else (size,)
    return any(type(n) is int and n > 1 for n in sizes)


def _is_whole(entries: object) -> bool:
    return isinstance(entries, tuple) and all(type(entry) is int for entry in entries)


def _has_duplicates(entries: object) -> bool:
    return isinstance(entries, tuple) and _is_whole(entries) and len(entries) != len(set(entries))
