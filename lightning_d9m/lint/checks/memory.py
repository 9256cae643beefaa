"""Memory that is read before it is written."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.tree import Call, Report, Tree, read_constant, resolve

_EMPTY = {"torch.empty", "torch.empty_like", "torch.empty_strided"}
# With sizes they return uninitialized memory; with a list or an array they do not.
_SHAPED = {f"torch.{kind}Tensor" for kind in ("", "Float", "Double", "Half", "Int", "Long")}
# Methods that read values, and attributes that do not.
_READING = {"sum", "mean", "max", "min", "abs", "norm", "item", "tolist", "backward"}
_SHAPE_ONLY = {"shape", "size", "dim", "ndim", "numel", "dtype", "device", "stride", "is_cuda"}
_PARTLY = "Only a part of the memory is written; the rest is whatever was in memory."


def check_empty(call: Call) -> Iterator[Report]:
    """Find uninitialized tensors whose values are read."""
    sizes = [read_constant(size, call.scope) for size in call.node.args]
    if call.name in _EMPTY:
        empty = call.read(None, "device") != "meta" and 0 not in sizes and (0,) not in sizes
    elif call.name in _SHAPED:
        empty = bool(sizes) and all(type(size) is int and size > 0 for size in sizes)
    else:
        empty = call.method == "new_empty"
    if not empty:
        return
    if _reads(call.node, call.tree):
        yield Report("D9M107", call.node)
        return
    area = call.scope.node
    match call.parent:
        case ast.Assign([ast.Name(name)]) if not isinstance(area, (ast.Module, ast.ClassDef)):
            certainty, partly = _judge_uses(area, name, call.tree)
            if certainty is not None:
                yield Report("D9M107", call.node, certainty, _PARTLY if partly else "")


def _reads(node: ast.AST, tree: Tree) -> bool:
    """Return whether arithmetic, or a method of the tensor, reads its values."""
    arithmetic = isinstance(tree.parent[node], (ast.BinOp, ast.Compare, ast.UnaryOp))
    return arithmetic or tree.find_method(node)[0] in _READING


def _is_taken(node: ast.AST, tree: Tree) -> bool:
    """Return whether a function of torch reads an argument and returns something else."""
    taker = tree.find_taker(node)
    name = "" if taker is None else resolve(taker.func, tree.scope[taker])
    writes = taker is None or any(word.arg == "out" for word in taker.keywords)
    return name.startswith("torch.") and not name.endswith("_") and not writes


def _judge_uses(area: ast.AST, name: str, tree: Tree) -> tuple[Certainty | None, bool]:
    """Return whether a local tensor is read although it is written in part or not at all.

    Returns:
        The certainty: "depends" if it is only returned, since the caller may write the rest; None
        if it is not read, or anything else may write to it. And whether a part is written.
    """
    parts: list[ast.expr] = []
    found: set[Certainty] = set()
    stores, passed = 0, False
    for use in ast.walk(area):
        if not isinstance(use, ast.Name) or use.id != name:
            continue
        match tree.parent[use]:
            case ast.Subscript(slice=part, ctx=ast.Store()):
                parts.append(part)
            case ast.Return():
                found.add("depends")
            case _ if _is_taken(use, tree):
                found.add("certain")
                passed = True
            case ast.Attribute(attr=attribute) if attribute in _SHAPE_ONLY:
                pass
            case ast.Assign() if isinstance(use.ctx, ast.Store):
                stores += 1
            case _ if _reads(use, tree):
                found.add("certain")
            case _:
                return None, False
    certainty = min(found, default=None)
    if not parts:
        return (certainty if "certain" in found and not passed and stores == 1 else None), False
    rest = len(parts) == 1 and stores == 1 and _leaves_rest(parts[0], tree)
    return certainty if rest else None, True


def _leaves_rest(part: ast.expr, tree: Tree) -> bool:
    """Return whether an index never covers a whole dimension: ``1:``, ``:-1`` or ``::2``."""
    match part:
        case ast.Tuple(parts):
            return any(_leaves_rest(one, tree) for one in parts)
        case ast.Slice(lower, upper, step):
            found = [read_constant(one, tree.scope[part]) for one in (lower, upper, step)]
            first, end, stride = (one if isinstance(one, int) else 0 for one in found)
            return first > 0 or end < 0 or stride > 1
    return False
