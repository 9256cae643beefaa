"""Threads that write to parameters while a model trains."""

import ast
from collections.abc import Iterator
from itertools import pairwise

from lightning_d9m.lint.tree import Call, Function, Report, list_targets, read_last_name

_TARGETS = {"threading.Thread": "target", "threading.Timer": "function"}
_PARAMETERS = {"parameters", "named_parameters"}
_HARMLESS = {"requires_grad_", "share_memory_"}


def check_thread(call: Call) -> Iterator[Report]:
    """Find a thread whose function writes to parameters, or steps an optimizer."""
    if call.name not in _TARGETS:
        return
    target = call.get(1, _TARGETS[call.name])
    function = None if target is None else call.scope.find_function(target)
    if function is not None and _writes_parameters(function) and not _is_joined(call):
        yield Report("D9M307", call.node, "depends")


def _writes_parameters(function: Function) -> bool:
    names: set[str] = set()
    for part in ast.walk(function):
        if isinstance(part, (ast.For, ast.comprehension)):
            names |= _list_parameter_names(part.target, part.iter)
    return any(_writes(part, names) for part in ast.walk(function))


def _list_parameter_names(target: ast.AST, values: ast.AST) -> set[str]:
    """Return the names of a loop that stand for parameters, including those in a ``zip``."""
    name = read_last_name(values.func) if isinstance(values, ast.Call) else ""
    args = values.args if isinstance(values, ast.Call) else []
    match target:
        case ast.Tuple(targets) if name in {"zip", "enumerate", "list"}:
            pairs = zip(targets[name == "enumerate" :], args, strict=False)
            return set().union(*(_list_parameter_names(*pair) for pair in pairs))
        case _ if name in {"list", "reversed"} and args:
            return _list_parameter_names(target, args[0])
        case ast.Name(found) if name in _PARAMETERS:
            return {found}
        case ast.Tuple([*_, ast.Name(found)]) if name == "named_parameters":
            return {found}
    return set()


def _writes(node: ast.AST, names: set[str]) -> bool:
    match node:
        case ast.Assign() | ast.AugAssign():
            return any(
                isinstance(target, (ast.Attribute, ast.Subscript))
                and getattr(target, "attr", "data") == "data"
                and _find_root(target) in names
                for target in list_targets(node)
            )
        case ast.Call(ast.Attribute(receiver, "step")):
            return "optim" in read_last_name(receiver).lower()
        case ast.Call(ast.Attribute(receiver, method)):
            in_place = method.endswith("_") and not method.endswith("__")
            in_place = in_place and method not in _HARMLESS
            return (
                in_place and "grad" not in ast.unparse(receiver) and _find_root(receiver) in names
            )
    return False


def _find_root(node: ast.AST) -> str:
    """Return the name that ``name.data``, ``name[0]`` or ``name.add_(1)`` begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return read_last_name(node)


def _is_joined(call: Call) -> bool:
    """Return whether the thread is waited for as soon as it is started."""
    if not isinstance(call.parent, ast.Assign):
        return False
    name = ast.unparse(call.parent.targets[0])
    for block in ast.walk(call.scope.node):
        body = getattr(block, "body", None)
        lines = [ast.unparse(line) for line in body] if isinstance(body, list) else []
        for first, second in pairwise(lines):
            if first == f"{name}.start()" and second.startswith(f"{name}.join("):
                return True
    return False
