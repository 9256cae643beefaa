"""Calls of the catalog's ops, and of packages with their own kernels."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.checks.op_conditions import CallSite, Condition
from lightning_d9m.lint.checks.op_table import (
    FUNCTIONS,
    METHODS,
    ON_CPU_TOO,
    explain_op,
    is_backward,
    rule_of,
)
from lightning_d9m.lint.values import Arguments, read_constant, read_kind
from lightning_d9m.lint.walk import NodeContext, ReportFinding

_NO_GRADIENTS = {"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad"}
_OWN = {"self", "cls", "super"}


def check_op(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find a call of an op of the catalog."""
    assert isinstance(node, ast.Call)
    name, skipped = context.resolve(node.func), 0
    if name == "functools.partial" and node.args:
        name, skipped = context.resolve(node.args[0]), 1
    conditions: tuple[Condition, ...] = ()
    owned = True
    if name is not None:
        conditions = FUNCTIONS.get(name, ())
        if not conditions and name.startswith("torch.Tensor."):
            conditions = _as_tuple(METHODS.get(name.removeprefix("torch.Tensor.")))
    elif isinstance(node.func, ast.Attribute):
        conditions = _as_tuple(METHODS.get(node.func.attr))
        if not conditions:
            return
        kind = read_kind(node.func.value, context.scope)
        if kind == "other" or _is_own(node.func.value):
            return
        owned, skipped = kind != "unknown", -1
    if not conditions:
        return
    arguments = Arguments(node, context.scope, skipped)
    spelled = CallSite(arguments, context.parents, owned)
    for condition in conditions:
        verdict = condition(spelled)
        if verdict is None or _is_spared(verdict[0], node, context, name):
            continue
        op, reason, fix = explain_op(verdict[0])
        yield ReportFinding(rule_of(op), node, verdict[1], reason, fix, op.name)


def check_function_choice(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find ``torch.compile`` with a mode that chooses kernels by time."""
    assert isinstance(node, ast.Call)
    if context.resolve(node.func) == "torch.compile":
        arguments = Arguments(node, context.scope)
        mode = arguments.read(None, "mode")
        if isinstance(mode, str) and mode.startswith("max-autotune"):
            yield ReportFinding("D9M106", node, "depends")


def _as_tuple(condition: Condition | None) -> tuple[Condition, ...]:
    return () if condition is None else (condition,)


def _is_own(node: ast.AST) -> bool:
    """Return whether the receiver of a method is the calling class."""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in _OWN


def _is_spared(op: str, node: ast.Call, context: NodeContext, name: str | None) -> bool:
    """Return whether a call cannot vary: on a CPU, or without a gradient."""
    if op not in ON_CPU_TOO:
        receiver = (
            node.func.value if name is None and isinstance(node.func, ast.Attribute) else None
        )
        first = receiver or (node.args[0] if node.args else None)
        if read_kind(first, context.scope) == "cpu tensor":
            return True
    makes_module = name is not None and name.rpartition(".")[2][:1].isupper()
    return is_backward(op) and not makes_module and is_without_gradient(context)


def is_without_gradient(context: NodeContext) -> bool:
    """Return whether a node is in code that turns gradients off."""
    for parent in reversed(context.parents):
        if isinstance(parent, (ast.With, ast.AsyncWith)):
            if any(_turns_off(item.context_expr, context) for item in parent.items):
                return True
        elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return any(_turns_off(decorator, context) for decorator in parent.decorator_list)
    return False


def _turns_off(node: ast.AST, context: NodeContext) -> bool:
    if isinstance(node, ast.Call):
        name = context.resolve(node.func)
        if name == "torch.set_grad_enabled":
            return bool(node.args) and read_constant(node.args[0], context.scope) is False
        return name in _NO_GRADIENTS
    return context.resolve(node) in _NO_GRADIENTS
