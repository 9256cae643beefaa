"""Settings that turn determinism off or on, kernels that are chosen by measured time, and seeds.

A seed is missing, or differs from run to run.
"""

import ast
from collections.abc import Iterator

from lightning_d9m.tools.lint.rules import Certainty
from lightning_d9m.tools.lint.tree import (
    FUNCTION_NODES,
    NAMES,
    UNKNOWN,
    Call,
    Report,
    Scope,
    Tree,
    read_constant,
    resolve,
)

_CUDNN = "torch.backends.cudnn."
_OURS = {
    f"lightning_d9m.{name}"
    for name in ("DeterminismCallback", "enable", "deterministic", "HorovodDeterministicStrategy")
}
# Reported like a finding, as it needs the same names; the scan of all files then uses it.
TURNED_ON = "turned-on"
"""Id of the note that deterministic algorithms are on; it is not a finding."""

_WARN_ONLY = (
    "With warn_only nondeterministic ops run, and attention keeps its nondeterministic kernels, "
    "after one warning."
)

_NO_SEED = "It draws each number from the system, and ignores a seed."
_DEPTH = 4
# What `--fix` writes where a seed is missing.
_SEED = 0
# Code in these may run more than once.
_REPEATED = (
    *(*FUNCTION_NODES, ast.For, ast.AsyncFor, ast.While),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def check_setting_call(call: Call) -> Iterator[Report]:
    """Find Trainer(benchmark=True), deterministic=False and similar arguments."""
    mode: object = UNKNOWN
    warn_only: object = False
    if call.name == "lightning.Trainer":
        mode = call.read(None, "deterministic", default=UNKNOWN)
        if call.read(None, "benchmark") is True:
            yield Report("D9M401", call.node)
    elif call.name == "torch.use_deterministic_algorithms":
        mode = call.read(0, "mode", default=UNKNOWN)
        warn_only = call.read(None, "warn_only", default=False)
    elif call.name == "torch.set_deterministic_debug_mode":
        # torch takes a word or a number.
        given = call.read(0, "debug_mode", default=UNKNOWN)
        modes = {"default": False, 0: False, "warn": "warn", 1: "warn", "error": True, 2: True}
        mode = modes.get(given, UNKNOWN) if isinstance(given, (str, int)) else UNKNOWN
    elif call.name == f"{_CUDNN}flags" and call.read(1, "benchmark") is True:
        yield Report("D9M401", call.node)
    # Each of ours turns deterministic algorithms on.
    elif call.name in _OURS or (
        call.name.startswith("lightning_d9m.") and call.name.endswith("Callback")
    ):
        mode = True
    if mode is False:
        yield Report("D9M402", call.node)
    elif mode == "warn" or (mode is True and warn_only is True):
        fix = "Remove warn_only, so that torch raises."
        yield Report("D9M402", call.node, reason=_WARN_ONLY, fix=fix)
    elif mode is True and warn_only is False:
        yield Report(TURNED_ON, call.node)


def check_setting(node: ast.Assign, tree: Tree) -> Iterator[Report]:
    """Find assignments to torch's flags."""
    value = read_constant(node.value, tree.scope[node])
    for target in node.targets:
        name = resolve(target, tree.scope[node]) if isinstance(target, ast.Attribute) else ""
        if name == f"{_CUDNN}benchmark" and value is True:
            yield Report("D9M401", node)
        elif name == f"{_CUDNN}deterministic" and value is False:
            yield Report("D9M402", node, reason="cuDNN may choose nondeterministic algorithms.")
        elif name.startswith("torch._inductor.config.max_autotune") and value is True:
            yield Report("D9M106", node, "depends")


def check_choice_by_time(call: Call) -> Iterator[Report]:
    """Find ``triton.autotune`` over several configurations, and ``torch.compile`` that tunes."""
    if call.name == "triton.autotune":
        match call.get(0, "configs"):
            # With one configuration there is nothing to measure.
            case ast.List([one]) if not isinstance(one, ast.Starred):
                pass
            case given:
                known = isinstance(given, ast.List)
                yield Report("D9M106", call.node, "certain" if known else "depends")
    elif call.name == "torch.compile" and str(call.read(None, "mode")).startswith("max-autotune"):
        yield Report("D9M106", call.node, "depends")


def check_seed(call: Call) -> Iterator[Report]:
    """Find calls with a missing or varying seed."""
    node, name, words = call.node, call.name, ("seed", "x", "a", "entropy")
    generates, resets = name in NAMES["generators"], name in NAMES["from system when empty"]
    if name in NAMES["always from system"] or _reseeds_generator(call):
        # `--fix` writes the call that takes a seed in place of the one that draws it.
        method = "manual_seed_all" if name.endswith("_all") else "manual_seed"
        owner = ast.unparse(node.func).rpartition(".")[0]
        alone = owner and isinstance(call.parent, ast.Expr)  # its result is not used
        yield Report("D9M204", node, edit=_edit_seed(call, f"{owner}.{method}") if alone else "")
    elif name == "random.SystemRandom":
        yield Report("D9M201", node, "depends", reason=_NO_SEED, fix="Use random.Random(seed).")
    elif (generates or resets) and call.read(0, *words) is None:
        if resets or not _is_seeded_later(call):
            # A number in a dict display is data, such as the name of a run: the source does not
            # show who reads it.
            outer = next(o for o in call.tree.around(node) if isinstance(o, ast.Dict | ast.stmt))
            certainty: Certainty = "depends" if isinstance(outer, ast.Dict) else "certain"
            edit = _edit_seed(call, ast.unparse(node.func))
            yield Report("D9M201" if generates else "D9M204", node, certainty, edit=edit)
    else:
        seeds = generates or name in NAMES["global seeds"] or call.method == "manual_seed"
        # Any other function may take a seed by one of these names, such as scikit-learn's.
        given = [call.get(0, *words)] if seeds else map(call.named.get, NAMES["seed words"])
        for found in filter(None, (_find_entropy(seed, call.scope) for seed in given if seed)):
            called = f"{found.removeprefix('builtins.')}()"
            reason = f"The seed is taken from {called}, which differs in each run."
            yield Report("D9M203", node, reason=reason)


def _edit_seed(call: Call, function: str) -> str:
    """Return the call of a function with a seed, where that has one meaning."""
    # In code that runs more than once, a fixed seed would draw the same numbers each time.
    repeated = any(isinstance(outer, _REPEATED) for outer in call.tree.around(call.node))
    other = len(call.node.args) + len(call.node.keywords) > 1
    return "" if repeated or other else f"{function}({_SEED})"


def _find_entropy(node: ast.AST, scope: Scope, depth: int = _DEPTH) -> str:
    """Return the function without a fixed result that an expression, or a name in it, calls."""
    for part in ast.walk(node):
        name = resolve(part.func, scope) if isinstance(part, ast.Call) else ""
        if name in NAMES["entropy"]:
            return name
        found, where = scope.find(part.id) if isinstance(part, ast.Name) and depth else ([], scope)
        for one in found:
            value = one.node if one.kind == "assign" and isinstance(one.node, ast.expr) else None
            if value is not None and (inner := _find_entropy(value, where, depth - 1)):
                return inner
    return ""


def _reseeds_generator(call: Call) -> bool:
    """Return whether a call is ``seed()`` of a ``torch.Generator``, which takes no argument."""
    if call.method != "seed" or call.node.args:
        return False
    values, _, _ = call.scope.follow(call.receiver)
    made = (value.func for value in values if isinstance(value, ast.Call))
    return any(resolve(function, call.scope) == "torch.Generator" for function in made)


def _is_seeded_later(call: Call) -> bool:
    """Return whether a new object that has a name is seeded where it is used."""
    target = call.parent.targets[0] if isinstance(call.parent, ast.Assign) else None
    uses = (call.tree.parent[use] for use in call.tree.find_uses(target, call.scope))
    return any(getattr(use, "attr", "") in NAMES["seeding methods"] for use in uses)


def check_worker_seed(call: Call) -> Iterator[Report]:
    """Find a ``worker_init_fn`` that gives every worker the same seed."""
    given = call.named.get("worker_init_fn")
    function = None if given is None else call.scope.find_function(given)
    parts = () if function is None else ast.walk(function)
    for inner in [Call(part, call.tree) for part in parts if isinstance(part, ast.Call)]:
        seeding = inner.name in {*NAMES["from system when empty"], "torch.manual_seed"}
        # It has no edit: a program may call the function itself, too, to seed the main process.
        if seeding and inner.read(0, "seed", "a") not in (None, UNKNOWN):
            yield Report("D9M207", inner.node)
