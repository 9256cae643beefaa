"""Generators without a seed, seeds that differ from run to run, and seeds that ranks share."""

import ast
import re
from collections.abc import Iterator

from lightning_d9m.lint.scopes import Scope, read_last_name, resolve
from lightning_d9m.lint.values import Arguments, find_value, list_values
from lightning_d9m.lint.walk import NodeContext, ReportFinding

GENERATORS = {
    "numpy.random.default_rng",
    "numpy.random.RandomState",
    "numpy.random.SeedSequence",
    *(f"numpy.random.{name}" for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")),
    "random.Random",
}
"""Constructors that take a seed from the system if they get none."""

_GLOBAL_SEEDS = {
    "random.seed",
    "numpy.random.seed",
    "torch.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "torch.mps.manual_seed",
    "torch.xpu.manual_seed",
    "torch.xpu.manual_seed_all",
    "lightning.seed_everything",
    "transformers.set_seed",
    "accelerate.utils.set_seed",
    "lightning_d9m.enable",
    "lightning_d9m.deterministic",
    "tensorflow.random.set_seed",
}
_FROM_SYSTEM_WHEN_EMPTY = {"random.seed", "numpy.random.seed"}
_ALWAYS_FROM_SYSTEM = {"torch.seed", "torch.random.seed", "torch.cuda.seed", "torch.cuda.seed_all"}
_SYSTEM_DRAWS = ("random.SystemRandom", "secrets.choice", "secrets.randbelow", "secrets.randbits")
CLOCK = (
    r"time\.(time|time_ns|perf_counter|perf_counter_ns|monotonic|monotonic_ns|process_time)$"
    r"|datetime\.(datetime\.|date\.)?(now|utcnow|today)$"
)
"""Pattern of the functions that read a clock."""
_ENTROPY = re.compile(
    rf"{CLOCK}|os\.(urandom|getpid|getrandom|times)$|uuid\.uuid[14]$|secrets\.|random\.SystemRandom"
    r"|builtins\.id$|torch\.(random\.)?seed$|torch\.cuda\.seed(_all)?$|threading\.get_ident$"
)
_NUMBERED = re.compile(r"(^|_)(rank|worker|worker_id|workerid|process_index|process_id|proc_id)$")
_NUMBERING = re.compile(r"(^|_)(get_rank|get_world_rank|rank|local_rank|process_index)$")
_SEED_WORDS = ("seed", "random_state", "random_seed", "rng_seed")
_SEEDING_METHODS = {"manual_seed", "set_state", "seed", "setstate"}
_DEPTH = 4


def check_seed(  # noqa: C901 - one case for each way to seed
    node: ast.AST, context: NodeContext
) -> Iterator[ReportFinding]:
    """Find calls with a missing or varying seed."""
    assert isinstance(node, ast.Call)
    name = context.resolve(node.func)
    arguments = Arguments(node, context.scope)
    seed = arguments.get(0, "seed", "x", "a", "entropy")
    if name in _ALWAYS_FROM_SYSTEM or (name is None and _reseeds_generator(node, context)):
        yield ReportFinding("D9M204", node)
    elif name in _SYSTEM_DRAWS:
        if not _is_in_seed(context):
            yield ReportFinding("D9M206", node)
    elif name in GENERATORS or name in _FROM_SYSTEM_WHEN_EMPTY:
        rule = "D9M201" if name in GENERATORS else "D9M204"
        value = None if seed is None else find_value(seed, context.scope)
        empty = seed is None or (isinstance(value, ast.Constant) and value.value is None)
        if empty and not (arguments.starred or arguments.unpacked):
            yield from _judge_empty(node, rule, context)
        elif seed is not None:
            yield from _judge(node, seed, context.scope)
    elif name in _GLOBAL_SEEDS or _is_method(node, "manual_seed", name):
        if seed is not None:
            yield from _judge(node, seed, context.scope)
    elif name == "torch.Generator":
        yield from _check_generator(node, context)
    else:
        for word in node.keywords:
            if word.arg in _SEED_WORDS and _find_entropy(word.value, context.scope):
                yield ReportFinding("D9M203", node)


def _judge_empty(node: ast.Call, rule: str, context: NodeContext) -> Iterator[ReportFinding]:
    """Find a seed from the system, unless the generator is seeded afterwards."""
    if rule == "D9M204" or not _is_seeded_later(*_find_area(context)):
        yield ReportFinding(rule, node)


def _judge(node: ast.Call, seed: ast.AST, scope: Scope) -> Iterator[ReportFinding]:
    """Find errors in the expression of a seed."""
    if found := _find_entropy(seed, scope):
        yield ReportFinding(
            "D9M203", node, reason=f"The seed is taken from {found}, which differs in each run."
        )
    elif _adds_number(seed, scope, _DEPTH):
        yield ReportFinding("D9M205", node)


def _find_entropy(node: ast.AST, scope: Scope) -> str:
    """Return the name of a function in an expression that differs in each run, or an empty text."""
    for part in list_expressions(node, scope, _DEPTH):
        if isinstance(part, ast.Call):
            name = resolve(part.func, scope) or ""
            if _ENTROPY.match(name):
                return name.removeprefix("builtins.") + "()"
    return ""


def list_expressions(node: ast.AST, scope: Scope, depth: int) -> Iterator[ast.AST]:
    """Yield the nodes of an expression and of the values of its names."""
    for part in ast.walk(node):
        yield part
        if isinstance(part, ast.Name) and depth:
            found, where = scope.find(part.id)
            for binding in found:
                if binding.kind == "assign" and isinstance(binding.node, ast.expr):
                    yield from list_expressions(binding.node, where, depth - 1)


def _adds_number(node: ast.AST, scope: Scope, depth: int) -> bool:
    """Return whether an expression adds the number of a rank or worker to something."""
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
            sides = (part.left, part.right)
            if any(_is_number(side, scope) for side in sides):
                return not any(_counts_apart(side) for side in sides)
        if isinstance(part, ast.Name) and depth:
            found, where = scope.find(part.id)
            if (
                len(found) == 1
                and found[0].kind == "assign"
                and found[0].node is not None
                and _adds_number(found[0].node, where, depth - 1)
            ):
                return True
    return False


def _counts_apart(node: ast.AST) -> bool:
    """Return whether a term is a multiple, such as ``seed * world_size``, which separates seeds."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def _is_number(node: ast.AST, scope: Scope) -> bool:
    if isinstance(node, ast.Call):
        name = resolve(node.func, scope) or read_last_name(node.func)
        if name == "builtins.int" and node.args:
            return _is_number(node.args[0], scope)
        return bool(_NUMBERING.search(name.rpartition(".")[2]))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value).upper() in {"RANK", "LOCAL_RANK"}
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return bool(_NUMBERED.search(name.lower()))


def _reseeds_generator(node: ast.Call, context: NodeContext) -> bool:
    """Return whether a call is ``seed()`` of a ``torch.Generator``, which takes no argument."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "seed":
        return False
    values, _ = list_values(node.func.value, context.scope)
    return not node.args and any(
        isinstance(value, ast.Call) and resolve(value.func, context.scope) == "torch.Generator"
        for value in values
    )


def _is_method(node: ast.Call, method: str, name: str | None) -> bool:
    return name is None and isinstance(node.func, ast.Attribute) and node.func.attr == method


def _is_in_seed(context: NodeContext) -> bool:
    """Return whether an expression is part of a seed, which D9M203 covers."""
    return any(
        isinstance(parent, ast.Call)
        and (context.resolve(parent.func) or "") in _GLOBAL_SEEDS | GENERATORS
        for parent in context.parents
    )


def _check_generator(node: ast.Call, context: NodeContext) -> Iterator[ReportFinding]:
    """Find a ``torch.Generator`` that is not seeded in its scope or class."""
    parent = context.parents[-1]
    if isinstance(parent, ast.Attribute):
        if parent.attr not in _SEEDING_METHODS:
            yield ReportFinding("D9M202", node)
        return
    area, key = _find_area(context)
    if area is None:
        if isinstance(parent, ast.keyword):
            yield ReportFinding("D9M202", node)
    elif not _is_seeded_later(area, key) and not _is_passed_on(area, key, context):
        yield ReportFinding("D9M202", node)


def _find_area(context: NodeContext) -> tuple[ast.AST | None, str]:
    """Return the scope or class in which the new object has a name, and the name."""
    parent = context.parents[-1]
    return context.find_area(parent.targets[0] if isinstance(parent, ast.Assign) else None)


def _is_seeded_later(area: ast.AST | None, key: str) -> bool:
    return area is not None and any(
        isinstance(node, ast.Attribute)
        and node.attr in _SEEDING_METHODS
        and key in {getattr(node.value, "id", ""), getattr(node.value, "attr", "")}
        for node in ast.walk(area)
    )


def _is_passed_on(area: ast.AST, key: str, context: NodeContext) -> bool:
    """Return whether a generator is passed to a function that may seed it."""
    return any(
        isinstance(node, ast.Call) and passes(node, key) and not _is_draw(node, context)
        for node in ast.walk(area)
    )


def passes(call: ast.Call, key: str) -> bool:
    """Return whether a call has the named object as an argument."""
    return any(key in {getattr(a, "id", ""), getattr(a, "attr", "")} for a in call.args)


def _is_draw(call: ast.Call, context: NodeContext) -> bool:
    return (context.resolve(call.func) or "").startswith("torch.")
