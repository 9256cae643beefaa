"""Reads of memory that was not, or only partly, written."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.values import Arguments, read_constant
from lightning_d9m.lint.walk import NodeContext, ReportFinding, walk_whole

_MAKERS = {"torch.empty", "torch.empty_like", "torch.empty_strided", "torch.Tensor"}
_SHAPED_TYPES = {f"torch.{kind}Tensor" for kind in ("Float", "Double", "Half", "Int", "Long")}
_METHODS = {"new_empty"}
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
_ARITHMETIC = (ast.BinOp, ast.Compare, ast.UnaryOp)


def check_empty(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find uninitialized tensors whose values are read."""
    assert isinstance(node, ast.Call)
    if not _is_uninitialized(node, context):
        return
    parent = context.parents[-1]
    if isinstance(parent, _ARITHMETIC) or _reads(parent, context.parents):
        yield ReportFinding("D9M107", node)
    elif isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
        area = context.scope.node
        if len(parent.targets) != 1 or isinstance(area, (ast.Module, ast.ClassDef)):
            return
        if _is_only_read(area, parent.targets[0].id):
            yield ReportFinding("D9M107", node)
        elif certainty := _is_partly_written(area, parent.targets[0].id, context):
            reason = "Only a part of the memory is written; the rest is whatever was in memory."
            yield ReportFinding("D9M107", node, certainty, reason)


def _is_uninitialized(node: ast.Call, context: NodeContext) -> bool:
    name = context.resolve(node.func)
    if name is None:
        return isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
    if name in {"torch.empty", "torch.empty_like", "torch.empty_strided"}:
        if Arguments(node, context.scope).read(None, "device") == "meta":
            return False
        sizes = [read_constant(size, context.scope) for size in node.args]
        return 0 not in sizes and (0,) not in sizes
    if name in _MAKERS | _SHAPED_TYPES:
        # With sizes they return uninitialized memory; with a list or an array they do not.
        sizes = [read_constant(size, context.scope) for size in node.args]
        return bool(sizes) and all(type(size) is int and size > 0 for size in sizes)
    return False


def _reads(parent: ast.AST, parents: list[ast.AST]) -> bool:
    """Return whether the called method reads the tensor's values."""
    if not isinstance(parent, ast.Attribute) or not parents[1:]:
        return False
    called = isinstance(parents[-2], ast.Call) and parents[-2].func is parent
    return called and not (
        parent.attr in _SHAPE_ONLY | _SAME_MEMORY
        or parent.attr.endswith("_")
        or parent.attr.startswith(("new_", "is_", "_", "register_", "fill"))
    )


def _is_partly_written(area: ast.AST, name: str, context: NodeContext) -> Certainty | None:
    """Return whether a local tensor is read as a whole after one assignment to a part of it.

    Returns:
        "depends" if it is only returned: the caller may write the rest. None if anything else may
        write to it.
    """
    parts: list[ast.AST] = []
    certainty: Certainty | None = None
    for node, parents in walk_whole(area):
        if isinstance(node, ast.Name) and node.id == name:
            parent = parents[-1]
            if isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store):
                parts.append(parent.slice)
            elif isinstance(parent, ast.Assign) and isinstance(node.ctx, ast.Store):
                parts += [] if _makes_memory(parent.value) else [node]
            elif (
                isinstance(parent, _ARITHMETIC)
                or _reads(parent, parents)
                or (isinstance(parent, ast.Call) and _reads_argument(parent, node, context))
            ):
                certainty = "certain"
            elif isinstance(parent, ast.Return):
                certainty = certainty or "depends"
            elif not (isinstance(parent, ast.Attribute) and parent.attr in _SHAPE_ONLY):
                return None
    return certainty if len(parts) == 1 and _leaves_rest(parts[0]) else None


def _makes_memory(value: ast.AST) -> bool:
    return isinstance(value, ast.Call) and "empty" in ast.unparse(value.func)


def _reads_argument(call: ast.Call, node: ast.AST, context: NodeContext) -> bool:
    """Return whether a function of torch reads an argument and returns something else."""
    name = context.resolve(call.func) or ""
    writes = name.endswith("_") or any(word.arg == "out" for word in call.keywords)
    return name.startswith("torch.") and node in call.args and not writes


def _leaves_rest(part: ast.AST) -> bool:
    """Return whether an index never covers a whole dimension: ``1:``, ``:-1`` or ``::2``."""
    if isinstance(part, ast.Tuple):
        return any(map(_leaves_rest, part.elts))
    if not isinstance(part, ast.Slice):
        return False
    lower, upper, step = map(_read_integer, (part.lower, part.upper, part.step))
    return lower > 0 or upper < 0 or step > 1


def _read_integer(node: ast.AST | None) -> int:
    """Return a constant integer; 0 for anything else."""
    sign = -1 if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else 1
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    value = node.value if isinstance(node, ast.Constant) else 0
    return sign * value if isinstance(value, int) else 0


def _is_only_read(area: ast.AST, name: str) -> bool:
    """Return whether a local tensor is used in arithmetic and never written."""
    read = False
    for node, parents in walk_whole(area):
        if isinstance(node, ast.Name) and node.id == name:
            if isinstance(node.ctx, ast.Store):
                if not isinstance(parents[-1], ast.Assign):
                    return False
            elif isinstance(parents[-1], _ARITHMETIC) or _reads(parents[-1], parents):
                read = True
            elif not (isinstance(parents[-1], ast.Attribute) and parents[-1].attr in _SHAPE_ONLY):
                # Passed on, indexed or filled in place: it may be written.
                return False
    return read
