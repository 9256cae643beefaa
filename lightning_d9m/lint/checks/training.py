"""Programs that train without a seed, and environments that are reset without one."""

import ast
import re
from collections.abc import Iterator

from lightning_d9m.lint.checks.seeds import passes
from lightning_d9m.lint.programs import runs, seeds
from lightning_d9m.lint.scopes import Scope, read_last_name, resolve
from lightning_d9m.lint.values import Arguments, list_values
from lightning_d9m.lint.walk import NodeContext, ReportFinding

_MAKERS = re.compile(r"^gym(nasium)?\.(make(_vec)?|vector\.(make|SyncVectorEnv|AsyncVectorEnv))$")
_OF_ACTIONS = (
    "The space of actions has a generator of its own, which no reset() seeds: without a seed it "
    "takes one from the system, another in each run."
)


def check_training(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find the training of a program whose file does not seed torch; imports are checked later."""
    assert isinstance(node, ast.Call)
    tree = context.parents[0]
    assert isinstance(tree, ast.Module)
    if (
        _trains(node, context.scope)
        and (isinstance(context.scope.node, ast.Module) or runs(tree))
        and not seeds(tree)
    ):
        yield ReportFinding("D9M210", node, "depends")


def _trains(call: ast.Call, scope: Scope) -> bool:
    """Return whether a call is a ``backward()``, or ``fit()`` of Lightning's Trainer."""
    if not isinstance(call.func, ast.Attribute):
        return False
    return call.func.attr == "backward" or (
        call.func.attr == "fit"
        and any(
            isinstance(value, ast.Call) and resolve(value.func, scope) == "lightning.Trainer"
            for value in list_values(call.func.value, scope)[0]
        )
    )


def check_environment(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find the first reset and the first drawn action of an unseeded Gymnasium environment."""
    assert isinstance(node, ast.Call)
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in {"reset", "sample"}:
        return
    owner = node.func.value
    of_actions = node.func.attr == "sample"
    if of_actions:
        if not isinstance(owner, ast.Attribute) or owner.attr != "action_space":
            return
        owner = owner.value
    values, area = list_values(owner, context.scope)
    if not any(_makes_environment(value, context.scope) for value in values):
        return
    key = read_last_name(owner)
    calls = [part for part in ast.walk(area) if isinstance(part, ast.Call)]
    same = [call for call in calls if _is_call_of(call, key, node.func.attr, of_actions)]
    if node is min(same, key=lambda call: (call.lineno, call.col_offset)) and not any(
        _seeds_environment(call, key, context.scope, of_actions) for call in calls
    ):
        handed = any(passes(call, key) for call in calls)
        reason = _OF_ACTIONS if of_actions else ""
        fix = "Call action_space.seed() with one that is fixed." if of_actions else ""
        yield ReportFinding("D9M211", node, "depends" if handed else "certain", reason, fix)


def _makes_environment(value: ast.AST, scope: Scope) -> bool:
    """Return whether an expression makes an environment, wrapped or not."""
    return any(
        isinstance(part, ast.Call) and _MAKERS.match(resolve(part.func, scope) or "")
        for part in ast.walk(value)
    )


def _is_call_of(call: ast.Call, key: str, method: str, of_actions: bool) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != method:
        return False
    owner = call.func.value
    if of_actions:
        return getattr(owner, "attr", "") == "action_space" and key == read_last_name(
            getattr(owner, "value", owner)
        )
    return read_last_name(owner) == key


def _seeds_environment(call: ast.Call, key: str, scope: Scope, of_actions: bool) -> bool:
    """Return whether a call seeds an environment, or passes it to a function with that name."""
    if _is_call_of(call, key, "seed", of_actions):
        return True
    if not of_actions and _is_call_of(call, key, "reset", of_actions):
        arguments = Arguments(call, scope)
        return arguments.unpacked or arguments.read(None, "seed") is not None
    return passes(call, key) and (
        "seed" in read_last_name(call.func).lower()
        or any("seed" in (word.arg or "") for word in call.keywords)
    )
