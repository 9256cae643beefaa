"""Programs that train without a seed, and environments that are reset without one."""

import ast
import re
from collections.abc import Iterator

from lightning_d9m.lint.checks.seeds import makes, passes
from lightning_d9m.lint.programs import runs, seeds
from lightning_d9m.lint.tree import Call, Report, Scope, is_named, read_last_name, resolve

_MAKERS = re.compile(r"gym(nasium)?\.(make(_vec)?|vector\.(make|SyncVectorEnv|AsyncVectorEnv))$")
_OF_ACTIONS = (
    "The space of actions has a generator of its own, which no reset() seeds: without a seed it "
    "takes one from the system, another in each run."
)


def check_training(call: Call) -> Iterator[Report]:
    """Find the training of a program whose file does not seed torch; imports are checked later."""
    module = call.tree.module
    if (
        _trains(call)
        and (isinstance(call.scope.node, ast.Module) or runs(module))
        and not seeds(module)
    ):
        yield Report("D9M210", call.node, "depends")


def _trains(call: Call) -> bool:
    """Return whether a call is a ``backward()``, or ``fit()`` of Lightning's Trainer."""
    match call.node.func:
        case ast.Attribute(attr="backward"):
            return True
        case ast.Attribute(owner, "fit"):
            values = call.scope.list_values(owner)[0]
            return any(makes(value, "lightning.Trainer", call.scope) for value in values)
    return False


def check_environment(call: Call) -> Iterator[Report]:
    """Find the first reset and the first drawn action of an unseeded Gymnasium environment."""
    match call.node.func:
        case ast.Attribute(ast.Attribute(owner, "action_space"), "sample"):
            method, of_actions = "sample", True
        case ast.Attribute(owner, "reset"):
            method, of_actions = "reset", False
        case _:
            return
    values, area = call.scope.list_values(owner)
    if not any(_makes_environment(value, call.scope) for value in values):
        return
    key = read_last_name(owner)
    calls = [Call(one, call.tree) for one in ast.walk(area) if isinstance(one, ast.Call)]
    nodes = [one.node for one in calls]
    same = [one for one in nodes if _is_call_of(one, key, method, of_actions=of_actions)]
    first = min(same, key=lambda one: (one.lineno, one.col_offset))
    if call.node is first and not any(
        _seeds_environment(one, key, of_actions=of_actions) for one in calls
    ):
        handed = any(passes(one, key) for one in nodes)
        reason = _OF_ACTIONS if of_actions else ""
        fix = "Call action_space.seed() with one that is fixed." if of_actions else ""
        yield Report("D9M211", call.node, "depends" if handed else "certain", reason, fix)


def _makes_environment(value: ast.AST, scope: Scope) -> bool:
    """Return whether an expression makes an environment, wrapped or not."""
    return any(
        isinstance(part, ast.Call) and _MAKERS.match(resolve(part.func, scope))
        for part in ast.walk(value)
    )


def _is_call_of(call: ast.Call, key: str, method: str, *, of_actions: bool) -> bool:
    """Return whether a method of the environment, or of its space of actions, is called."""
    match call.func:
        case ast.Attribute(ast.Attribute(owner, "action_space"), name) if of_actions:
            return name == method and is_named(owner, key)
        case ast.Attribute(owner, name) if not of_actions:
            return name == method and is_named(owner, key)
    return False


def _seeds_environment(call: Call, key: str, *, of_actions: bool) -> bool:
    """Return whether a call seeds an environment, or passes it to a function with that name."""
    if _is_call_of(call.node, key, "seed", of_actions=of_actions):
        return True
    if not of_actions and _is_call_of(call.node, key, "reset", of_actions=False):
        return call.unpacked or call.read(None, "seed") is not None
    named_so = (read_last_name(call.node.func), *call.named)
    return passes(call.node, key) and any("seed" in name.lower() for name in named_so)
