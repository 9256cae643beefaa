"""Threads that write to parameters while a model trains."""

import ast
from collections.abc import Iterator
from itertools import pairwise

from lightning_d9m.lint.scopes import Function, read_last_name
from lightning_d9m.lint.walk import NodeContext, ReportFinding

_TARGETS = {"threading.Thread": "target", "threading.Timer": "function"}
_PARAMETERS = {"parameters", "named_parameters"}
_HARMLESS = {"requires_grad_", "share_memory_"}


def check_thread(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find a thread whose function writes to parameters, or steps an optimizer."""
    assert isinstance(node, ast.Call)
    keyword = _TARGETS.get(context.resolve(node.func) or "")
    if keyword is None:
        return
    named = [word.value for word in node.keywords if word.arg == keyword]
    for target in (*named, *node.args[1:2]):
        function = context.find_function(target)
        if function is not None and _writes_parameters(function) and not _is_joined(context):
            yield ReportFinding("D9M307", node, "depends")


def _writes_parameters(function: Function) -> bool:
    names: set[str] = set()
    for part in ast.walk(function):
        if isinstance(part, (ast.For, ast.comprehension)):
            names |= _list_parameter_names(part.target, part.iter)
    return any(_writes(part, names) for part in ast.walk(function))


def _list_parameter_names(target: ast.AST, values: ast.AST) -> set[str]:
    """Return the names of a loop that stand for parameters, including those in a ``zip``."""
    if not isinstance(values, ast.Call):
        return set()
    name = read_last_name(values.func)
    if name in {"zip", "enumerate", "list"} and isinstance(target, ast.Tuple):
        shift = name == "enumerate"
        pairs = zip(target.elts[shift:], values.args, strict=False)
        return set().union(*(_list_parameter_names(*pair) for pair in pairs))
    if name in {"list", "reversed"} and values.args:
        return _list_parameter_names(target, values.args[0])
    if name not in _PARAMETERS:
        return set()
    if name == "named_parameters" and isinstance(target, ast.Tuple):
        target = target.elts[-1]
    return {target.id} if isinstance(target, ast.Name) else set()


def _writes(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(
            isinstance(target, (ast.Attribute, ast.Subscript))
            and getattr(target, "attr", "data") == "data"
            and _find_root(target) in names
            for target in targets
        )
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    method, receiver = node.func.attr, node.func.value
    if method == "step":
        return "optim" in read_last_name(receiver).lower()
    in_place = method.endswith("_") and not method.endswith("__") and method not in _HARMLESS
    return in_place and "grad" not in ast.unparse(receiver) and _find_root(receiver) in names


def _find_root(node: ast.AST) -> str:
    """Return the name that ``name.data``, ``name[0]`` or ``name.add_(1)`` begins with."""
    while not isinstance(node, ast.Name):
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id


def _is_joined(context: NodeContext) -> bool:
    """Return whether the thread is waited for as soon as it is started."""
    parent = context.parents[-1]
    if not isinstance(parent, ast.Assign):
        return False
    name = ast.unparse(parent.targets[0])
    for block in ast.walk(context.scope.node):
        body = getattr(block, "body", None)
        lines = [ast.unparse(line) for line in body] if isinstance(body, list) else []
        for first, second in pairwise(lines):
            if first == f"{name}.start()" and second.startswith(f"{name}.join("):
                return True
    return False
