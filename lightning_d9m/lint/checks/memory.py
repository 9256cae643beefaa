"""Reads of memory that was not, or only partly, written."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.tree import Call, Report, Tree, read_constant, resolve

_EMPTY = {"torch.empty", "torch.empty_like", "torch.empty_strided"}
# With sizes they return uninitialized memory; with a list or an array they do not.
_SHAPED = {f"torch.{kind}Tensor" for kind in ("", "Float", "Double", "Half", "Int", "Long")}
# Attributes that do not read values.
_SHAPE_ONLY = {
    "shape", "size", "dim", "ndim", "numel", "dtype", "device", "stride", "is_cuda",
    "element_size", "data_ptr", "untyped_storage", "storage", "nbytes", "itemsize", "type",
    "requires_grad", "layout", "is_contiguous", "get_device", "is_floating_point", "names",
    "is_sparse", "grad_fn", "is_complex",
}  # fmt: skip
_SAME_MEMORY = {
    "to", "cuda", "cpu", "float", "half", "double", "view", "reshape", "pin_memory", "t",
    "transpose", "contiguous", "expand", "unsqueeze", "squeeze", "flatten", "detach", "clone",
    "permute", "data", "requires_grad_", "share_memory_", "set_", "unbind", "split", "chunk",
    "long", "bfloat16", "T", "resize_", "as_subclass", "numpy", "expand_as", "view_as",
    "narrow", "type_as", "select",
}  # fmt: skip
# They write where an index says, which may be everywhere.
_WRITING = ("index_copy", "index_put", "scatter", "masked_scatter")
_PARTLY = "Only a part of the memory is written; the rest is whatever was in memory."
_ARITHMETIC = (ast.BinOp, ast.Compare, ast.UnaryOp)


def check_empty(call: Call) -> Iterator[Report]:
    """Find uninitialized tensors whose values are read."""
    if not _is_uninitialized(call):
        return
    area = call.scope.node
    if _reads(call.node, call.tree):
        yield Report("D9M107", call.node)
        return
    match call.parent:
        case ast.Assign([ast.Name(name)]) if not isinstance(area, (ast.Module, ast.ClassDef)):
            certainty, partly = _judge_uses(area, name, call.tree)
            if certainty is not None:
                yield Report("D9M107", call.node, certainty, _PARTLY if partly else "")


def _is_uninitialized(call: Call) -> bool:
    sizes = [read_constant(size, call.scope) for size in call.node.args]
    if call.name in _EMPTY:
        return call.read(None, "device") != "meta" and 0 not in sizes and (0,) not in sizes
    if call.name in _SHAPED:
        return bool(sizes) and all(type(size) is int and size > 0 for size in sizes)
    return call.method == "new_empty"


def _reads(node: ast.AST, tree: Tree) -> bool:
    """Return whether arithmetic, or a method of the tensor, reads its values."""
    parent = tree.parent[node]
    if not isinstance(parent, ast.Attribute):
        return isinstance(parent, _ARITHMETIC)
    outer = tree.parent[parent]
    return (
        isinstance(outer, ast.Call)
        and outer.func is parent
        and parent.attr not in _SHAPE_ONLY | _SAME_MEMORY
        and not parent.attr.endswith("_")
        and not parent.attr.startswith(("new_", "is_", "_", "register_", "fill", *_WRITING))
    )


def _judge_uses(area: ast.AST, name: str, tree: Tree) -> tuple[Certainty | None, bool]:
    """Return whether a local tensor is read although it is written in part or not at all.

    Returns:
        The certainty: "depends" if it is only returned, since the caller may write the rest; None
        if it is not read, or anything else may write to it. And whether a part is written.
    """
    parts: list[ast.expr] = []
    certainty: Certainty | None = None
    written = passed = False
    for use in ast.walk(area):
        if not isinstance(use, ast.Name) or use.id != name:
            continue
        stored = isinstance(use.ctx, ast.Store)
        match tree.parent[use]:
            case ast.Subscript(slice=part, ctx=ast.Store()):
                parts.append(part)
            case ast.Assign(value=value) if stored:
                written |= not (isinstance(value, ast.Call) and "empty" in ast.unparse(value.func))
            case ast.Return():
                certainty, passed = certainty or "depends", True
            case ast.Attribute(attr=attribute) if attribute in _SHAPE_ONLY:
                pass
            case ast.Call() as call if _reads_argument(call, use, tree):
                certainty, passed = "certain", True
            case _ if _reads(use, tree) and not stored:
                certainty = "certain"
            case _:
                return None, False
    if not parts and not passed:
        return certainty, False
    once = len(parts) == 1 and not written and _leaves_rest(parts[0])
    return certainty if once else None, True


def _reads_argument(call: ast.Call, node: ast.expr, tree: Tree) -> bool:
    """Return whether a function of torch reads an argument and returns something else."""
    name = resolve(call.func, tree.scope[call])
    writes = name.endswith("_") or any(word.arg == "out" for word in call.keywords)
    return name.startswith("torch.") and node in call.args and not writes


def _leaves_rest(part: ast.expr) -> bool:
    """Return whether an index never covers a whole dimension: ``1:``, ``:-1`` or ``::2``."""
    match part:
        case ast.Tuple(parts):
            return any(map(_leaves_rest, parts))
        case ast.Slice(lower, upper, step):
            first, end, stride = map(_read_integer, (lower, upper, step))
            return first > 0 or end < 0 or stride > 1
    return False


def _read_integer(node: ast.expr | None) -> int:
    """Return a constant integer; 0 for anything else."""
    match node:
        case ast.UnaryOp(ast.USub(), ast.Constant(int() as value)):
            return -value
        case ast.Constant(int() as value):
            return value
    return 0
