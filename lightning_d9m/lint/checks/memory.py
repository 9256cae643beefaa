"""Memory that is read before it is written, or that a thread writes."""

import ast
from collections.abc import Iterator
from itertools import pairwise

from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.tree import (
    Call,
    Function,
    Report,
    Tree,
    list_targets,
    mentions,
    read_constant,
    read_last_name,
    resolve,
)

_EMPTY = {"torch.empty", "torch.empty_like", "torch.empty_strided"}
# With sizes they return uninitialized memory; with a list or an array they do not.
_SHAPED = {f"torch.{kind}Tensor" for kind in ("", "Float", "Double", "Half", "Int", "Long")}
# Methods that read values, and attributes that do not.
_READING = {"sum", "mean", "max", "min", "abs", "norm", "item", "tolist", "backward"}
_SHAPE_ONLY = {"shape", "size", "dim", "ndim", "numel", "dtype", "device", "stride", "is_cuda"}
_PARTLY = "Only a part of the memory is written; the rest is whatever was in memory."
_PARAMETERS = {"parameters", "named_parameters"}
_HARMLESS = {"requires_grad_", "share_memory_"}


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


def check_thread(call: Call) -> Iterator[Report]:
    """Find a thread whose function writes to parameters, or steps an optimizer."""
    starts = call.name in {"threading.Thread", "threading.Timer"}
    target = call.get(1, "target", "function") if starts else None
    function = None if target is None else call.scope.find_function(target)
    if function is not None and _writes_parameters(function) and not _is_joined(call):
        yield Report("D9M307", call.node, "depends")


def _writes_parameters(function: Function) -> bool:
    names: set[str] = set()
    for part in ast.walk(function):
        if isinstance(part, (ast.For, ast.comprehension)):
            names |= _name_parameters(part.target, part.iter)
    return any(_writes(part, names) for part in ast.walk(function))


def _name_parameters(target: ast.AST, values: ast.AST) -> set[str]:
    """Return the names of a loop that stand for parameters."""
    match target, values:
        case ast.Tuple(targets), ast.Call(ast.Name("zip"), args):
            return set().union(*map(_name_parameters, targets, args))
    named = any(read_last_name(one) in _PARAMETERS for one in ast.walk(values))
    return {one.id for one in ast.walk(target) if isinstance(one, ast.Name)} if named else set()


def _writes(node: ast.AST, names: set[str]) -> bool:
    match node:
        case ast.Assign() | ast.AugAssign():
            return any(
                isinstance(target, (ast.Attribute, ast.Subscript))
                and getattr(target, "attr", "data") == "data"
                and mentions(target.value, names)
                for target in list_targets(node)
            )
        case ast.Call(ast.Attribute(receiver, "step")):
            return "optim" in read_last_name(receiver).lower()
        case ast.Call(ast.Attribute(receiver, method)) if method not in _HARMLESS:
            in_place = method.endswith("_") and not method.endswith("__")
            return in_place and "grad" not in ast.unparse(receiver) and mentions(receiver, names)
    return False


def _is_joined(call: Call) -> bool:
    """Return whether the thread is waited for as soon as it is started."""
    name = ast.unparse(call.parent.targets[0]) if isinstance(call.parent, ast.Assign) else "-"
    for block in ast.walk(call.scope.node):
        body = getattr(block, "body", None)
        lines = [ast.unparse(line) for line in body] if isinstance(body, list) else []
        for first, second in pairwise(lines):
            if first == f"{name}.start()" and second.startswith(f"{name}.join("):
                return True
    return False
