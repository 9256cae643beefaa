"""Memory that is read before anything was written to it."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.values import Arguments, read_constant
from lightning_d9m.lint.walk import NodeContext, ReportFinding

_MAKERS = {"torch.empty", "torch.empty_like", "torch.empty_strided", "torch.Tensor"}
_SHAPED_TYPES = {f"torch.{kind}Tensor" for kind in ("Float", "Double", "Half", "Int", "Long")}
_METHODS = {"new_empty"}
# What only looks at the tensor's shape, or passes it on.
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


def check_empty(node: ast.AST, place: NodeContext) -> Iterator[ReportFinding]:
    """Find uninitialised tensors of which a value is read."""
    assert isinstance(node, ast.Call)
    if not _is_uninitialised(node, place):
        return
    parent = place.parents[-1]
    if isinstance(parent, _ARITHMETIC) or _reads(parent, place.parents):
        yield ReportFinding("D9M107", node)
    elif isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
        area = place.scope.node
        if (
            len(parent.targets) == 1
            and not isinstance(area, (ast.Module, ast.ClassDef))
            and _is_only_read(area, parent.targets[0].id)
        ):
            yield ReportFinding("D9M107", node)


def _is_uninitialised(node: ast.Call, place: NodeContext) -> bool:
    name = place.resolve(node.func)
    if name is None:
        return isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
    if name in {"torch.empty", "torch.empty_like", "torch.empty_strided"}:
        if Arguments(node, place.scope).read(None, "device") == "meta":
            return False
        sizes = [read_constant(size, place.scope) for size in node.args]
        return 0 not in sizes and (0,) not in sizes
    if name in _MAKERS | _SHAPED_TYPES:
        # With sizes these are uninitialised; with a list or an array they are not.
        sizes = [read_constant(size, place.scope) for size in node.args]
        return bool(sizes) and all(type(size) is int and size > 0 for size in sizes)
    return False


def _reads(parent: ast.AST, parents: list[ast.AST]) -> bool:
    """Say whether a method that is called on it reads its values."""
    if not isinstance(parent, ast.Attribute) or not parents[1:]:
        return False
    called = isinstance(parents[-2], ast.Call) and parents[-2].func is parent
    return called and not (
        parent.attr in _SHAPE_ONLY | _SAME_MEMORY
        or parent.attr.endswith("_")
        or parent.attr.startswith(("new_", "is_", "_", "register_", "fill"))
    )


def _is_only_read(area: ast.AST, name: str) -> bool:
    """Say whether a local tensor is used in arithmetic and nothing could have filled it."""
    read = False
    stack: list[tuple[ast.AST, list[ast.AST]]] = [(area, [])]
    while stack:
        node, parents = stack.pop()
        if isinstance(node, ast.Name) and node.id == name:
            if isinstance(node.ctx, ast.Store):
                if not isinstance(parents[-1], ast.Assign) or read is None:
                    return False
            elif isinstance(parents[-1], _ARITHMETIC) or _reads(parents[-1], parents):
                read = True
            elif not (isinstance(parents[-1], ast.Attribute) and parents[-1].attr in _SHAPE_ONLY):
                # Handed on, indexed, filled in place: somebody may have written to it.
                return False
        inner = [*parents, node]
        stack.extend((child, inner) for child in ast.iter_child_nodes(node))
    return read
