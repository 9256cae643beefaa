"""Files in the order of their modification time, and learning rates that depend on the clock."""

import ast
import re
from collections.abc import Iterator

from lightning_d9m.lint.checks.order_use import is_choice, is_list_order_used, is_order_used
from lightning_d9m.lint.checks.seeds import CLOCK, list_expressions
from lightning_d9m.lint.scopes import Scope, resolve
from lightning_d9m.lint.walk import NodeContext, ReportFinding

_CLOCK = re.compile(CLOCK)
_FILE_TIMES = {"getmtime", "getctime", "getatime"}
_STAT_TIMES = {f"st_{kind}time{unit}" for kind in "mca" for unit in ("", "_ns")}
_RATES = {"lr", "learning_rate"}
_LAMBDA_SCHEDULERS = re.compile(r"torch\.optim\.lr_scheduler\.(LambdaLR|MultiplicativeLR)$")
_DEPTH = 4


def check_modification_time(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find files that are sorted by time, and whose order is used.

    The newest file of a sorted list is a common way to find a checkpoint; it is not found.
    """
    assert isinstance(node, ast.Call)
    key = next((word.value for word in node.keywords if word.arg == "key"), None)
    if key is None or not _reads_file_time(key, context):
        return
    if context.resolve(node.func) == "builtins.sorted":
        parent = context.parents[-1]
        if isinstance(parent, ast.Assign):
            used = is_list_order_used(parent.targets[0], context)
        else:
            used = not is_choice(parent) and is_order_used(node, context)
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "sort":
        used = is_list_order_used(node.func.value, context)
    else:
        return
    if used:
        yield ReportFinding("D9M306", node)


def _reads_file_time(key: ast.AST, context: NodeContext) -> bool:
    if isinstance(key, ast.Lambda):
        return any(
            isinstance(part, (ast.Attribute, ast.Name))
            and (getattr(part, "attr", None) or getattr(part, "id", ""))
            in _FILE_TIMES | _STAT_TIMES
            for part in ast.walk(key.body)
        )
    return (resolve(key, context.scope) or "") in {f"os.path.{name}" for name in _FILE_TIMES}


def check_learning_rate(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find ``group["lr"] = ...`` with a value that depends on the clock."""
    assert isinstance(node, (ast.Assign, ast.AugAssign))
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    is_rate = any(
        isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value in _RATES
        for target in targets
    )
    if is_rate and _reads_clock(node.value, context.scope):
        yield ReportFinding("D9M212", node)


def check_learning_rate_call(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find ``lr=...`` and functions of a scheduler that depend on the clock."""
    assert isinstance(node, ast.Call)
    for word in node.keywords:
        if word.arg in _RATES and _reads_clock(word.value, context.scope):
            yield ReportFinding("D9M212", node)
    if not _LAMBDA_SCHEDULERS.match(context.resolve(node.func) or ""):
        return
    named = [word.value for word in node.keywords if word.arg == "lr_lambda"]
    for function in (*named, *node.args[1:2]):
        if isinstance(function, ast.Lambda):
            if _reads_clock(function.body, context.scope):
                yield ReportFinding("D9M212", node)
        elif isinstance(function, ast.Name):
            for binding in context.scope.find(function.id)[0]:
                if isinstance(binding.node, ast.FunctionDef) and _returns_clock(
                    binding.node, context.scope
                ):
                    yield ReportFinding("D9M212", node)


def _returns_clock(function: ast.FunctionDef, outer: Scope) -> bool:
    scope = Scope(function, outer, outer.package)
    return any(
        isinstance(part, ast.Return) and part.value is not None and _reads_clock(part.value, scope)
        for part in ast.walk(function)
    )


def _reads_clock(node: ast.AST, scope: Scope) -> bool:
    """Return whether an expression, or what its names stand for, reads the clock."""
    return any(
        isinstance(part, ast.Call) and _CLOCK.match(resolve(part.func, scope) or "")
        for part in list_expressions(node, scope, _DEPTH)
    )
