"""Generators without a seed, seeds that differ from run to run, and programs that set none."""

import ast
import re
from collections.abc import Iterator

from lightning_d9m.lint.programs import runs, seeds
from lightning_d9m.lint.tree import (
    UNKNOWN,
    Call,
    Report,
    Scope,
    Tree,
    find_value,
    list_expressions,
    list_targets,
    read_last_name,
    resolve,
)

_GENERATORS = {
    "random.Random",
    *(f"numpy.random.{name}" for name in ("default_rng", "RandomState", "SeedSequence")),
    *(f"numpy.random.{name}" for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")),
}
_FROM_SYSTEM_WHEN_EMPTY = {"random.seed", "numpy.random.seed"}
_GLOBAL_SEEDS = {
    *(*_FROM_SYSTEM_WHEN_EMPTY, "torch.manual_seed", "torch.mps.manual_seed"),
    *(f"torch.{kind}.manual_seed{every}" for kind in ("cuda", "xpu") for every in ("", "_all")),
    *("lightning.seed_everything", "transformers.set_seed", "accelerate.utils.set_seed"),
    *("lightning_d9m.enable", "lightning_d9m.deterministic", "tensorflow.random.set_seed"),
}
_ALWAYS_FROM_SYSTEM = {"torch.seed", "torch.random.seed", "torch.cuda.seed", "torch.cuda.seed_all"}
_SYSTEM_DRAWS = {"random.SystemRandom", "secrets.choice", "secrets.randbelow", "secrets.randbits"}
_CLOCK = (
    r"time\.(time|time_ns|perf_counter|perf_counter_ns|monotonic|monotonic_ns|process_time)$"
    r"|datetime\.(datetime\.|date\.)?(now|utcnow|today)$"
)
_ENTROPY = (
    rf"{_CLOCK}|os\.(urandom|getpid|getrandom|times)$|uuid\.uuid[14]$|secrets\.|random\.SystemRandom"
    r"|builtins\.id$|torch\.(random\.)?seed$|torch\.cuda\.seed(_all)?$|threading\.get_ident$"
)
_NUMBERED = re.compile(r"(^|_)(rank|worker|worker_id|workerid|process_index|process_id|proc_id)$")
_NUMBERING = re.compile(r"(^|_)(get_rank|get_world_rank|rank|local_rank|process_index)$")
_SEED_WORDS = ("seed", "random_state", "random_seed", "rng_seed")
_SEEDING_METHODS = {"manual_seed", "set_state", "seed", "setstate"}
_RATES = {"lr", "learning_rate"}
_LAMBDA_SCHEDULERS = {f"torch.optim.lr_scheduler.{n}LR" for n in ("Lambda", "Multiplicative")}
_ENVIRONMENTS = re.compile(
    r"gym(nasium)?\.(make(_vec)?|vector\.(make|SyncVectorEnv|AsyncVectorEnv))$"
)
_OF_ACTIONS = (
    "The space of actions has a generator of its own, which no reset() seeds: without a seed it "
    "takes one from the system, another in each run."
)
_DEPTH = 4
# What `--fix` writes where a seed is missing.
_SEED = 0


def check_seed(call: Call) -> Iterator[Report]:  # noqa: C901 - one case for each way to seed
    """Find calls with a missing or varying seed."""
    node, name = call.node, call.name
    seed = call.get(0, "seed", "x", "a", "entropy")
    if name in _ALWAYS_FROM_SYSTEM or _reseeds_generator(call):
        method = "manual_seed_all" if name.endswith("_all") else "manual_seed"
        owner = ast.unparse(node.func).rpartition(".")[0]
        alone = owner and isinstance(call.parent, ast.Expr)  # its result is not used
        yield Report("D9M204", node, edit=f"{owner}.{method}({_SEED})" if alone else "")
    elif name in _GENERATORS | _FROM_SYSTEM_WHEN_EMPTY:
        value = ast.Constant(None) if seed is None else find_value(seed, call.scope)
        empty = isinstance(value, ast.Constant) and value.value is None
        if empty and not (call.starred or call.unpacked):
            if name in _FROM_SYSTEM_WHEN_EMPTY or not _is_seeded_later(call):
                alone = len(node.args) + len(node.keywords) <= 1
                edit = f"{ast.unparse(node.func)}({_SEED})" if alone else ""
                yield Report("D9M201" if name in _GENERATORS else "D9M204", node, edit=edit)
        elif seed is not None:
            yield from _judge(node, seed, call.scope)
    elif name in _GLOBAL_SEEDS or call.method == "manual_seed":
        if seed is not None:
            yield from _judge(node, seed, call.scope)
    elif name == "torch.Generator":
        if _is_never_seeded(call):
            yield Report("D9M202", node)
    else:
        words = (call.named[word] for word in _SEED_WORDS if word in call.named)
        if any(_find_call(_ENTROPY, value, call.scope) for value in words):
            yield Report("D9M203", node)


def check_system_draw(call: Call) -> Iterator[Report]:
    """Find numbers that the system draws; within a seed D9M203 covers them."""
    if call.name in _SYSTEM_DRAWS:
        outer = (one for one in call.tree.around(call.node) if isinstance(one, ast.Call))
        if not any(resolve(one.func, call.scope) in _GLOBAL_SEEDS | _GENERATORS for one in outer):
            yield Report("D9M206", call.node)


def _judge(node: ast.Call, seed: ast.AST, scope: Scope) -> Iterator[Report]:
    """Find errors in the expression of a seed."""
    if found := _find_call(_ENTROPY, seed, scope):
        called = f"{found.removeprefix('builtins.')}()"
        reason = f"The seed is taken from {called}, which differs in each run."
        yield Report("D9M203", node, reason=reason)
    elif _adds_number(seed, scope, _DEPTH):
        yield Report("D9M205", node)


def _find_call(pattern: str, node: ast.AST, scope: Scope) -> str:
    """Return the name of a function that an expression, or what its names stand for, calls."""
    for part in list_expressions(node, scope, _DEPTH):
        name = resolve(part.func, scope) if isinstance(part, ast.Call) else ""
        if re.match(pattern, name):
            return name
    return ""


def _adds_number(node: ast.AST, scope: Scope, depth: int) -> bool:
    """Return whether an expression adds the number of a rank or worker to something.

    A multiple, such as ``seed * world_size``, separates the seeds. Divisors, powers and shifts add
    nothing.
    """
    match node:
        case ast.BinOp(left, ast.Add(), right) if any(
            _is_number(side, scope) for side in (left, right)
        ):
            sides = (left, right)
            return not any(isinstance(s, ast.BinOp) and isinstance(s.op, ast.Mult) for s in sides)
        case ast.BinOp(left, operator) if not isinstance(operator, (ast.Add, ast.Sub, ast.Mult)):
            return _adds_number(left, scope, depth)
        case ast.Name(name) if depth:
            value, where = scope.find_only(name)
            return value is not None and _adds_number(value, where, depth - 1)
    return any(_adds_number(part, scope, depth) for part in ast.iter_child_nodes(node))


def _is_number(node: ast.AST, scope: Scope) -> bool:
    match node:
        case ast.Call(function, args):
            name = resolve(function, scope) or read_last_name(function)
            if name == "builtins.int" and args:
                return _is_number(args[0], scope)
            return _NUMBERING.search(name.rpartition(".")[2]) is not None
        case ast.Subscript(slice=ast.Constant(key)):
            return str(key).upper() in {"RANK", "LOCAL_RANK"}
    return _NUMBERED.search(read_last_name(node).lower()) is not None


def _makes(value: ast.AST, name: str, scope: Scope) -> bool:
    return isinstance(value, ast.Call) and resolve(value.func, scope) == name


def _reseeds_generator(call: Call) -> bool:
    """Return whether a call is ``seed()`` of a ``torch.Generator``, which takes no argument."""
    if call.method != "seed" or call.node.args:
        return False
    values, _, _ = call.scope.follow(call.receiver)
    return any(_makes(value, "torch.Generator", call.scope) for value in values)


def _find_uses(call: Call) -> list[ast.AST] | None:
    """Return the uses of a new object; None if it has no name."""
    target = call.parent.targets[0] if isinstance(call.parent, ast.Assign) else None
    _, area, key = call.scope.follow(target)
    return None if area is None else call.tree.find_uses(area, key)


def _is_seeded_later(call: Call) -> bool:
    methods = (call.tree.find_method(use)[0] for use in _find_uses(call) or ())
    return any(method.partition(".")[0] in _SEEDING_METHODS for method in methods)


def _is_never_seeded(call: Call) -> bool:
    """Return whether a ``torch.Generator`` is not seeded in its scope or class."""
    if isinstance(call.parent, ast.Attribute):
        return call.parent.attr not in _SEEDING_METHODS
    uses = _find_uses(call)
    if uses is None:
        return isinstance(call.parent, ast.keyword)
    # A function that it is passed to may seed it, if it is not torch's.
    takers = [taker for use in uses if (taker := call.tree.find_taker(use))]
    passed = any(not resolve(one.func, call.scope).startswith("torch.") for one in takers)
    return not passed and not _is_seeded_later(call)


def check_learning_rate(node: ast.Assign | ast.AugAssign, tree: Tree) -> Iterator[Report]:
    """Find ``group["lr"] = ...`` with a value that depends on the clock."""
    for target in list_targets(node):
        match target:
            case ast.Subscript(slice=ast.Constant("lr" | "learning_rate")):
                if _find_call(_CLOCK, node.value, tree.scope[node]):
                    yield Report("D9M212", node)


def check_learning_rate_call(call: Call) -> Iterator[Report]:
    """Find ``lr=...`` and functions of a scheduler that depend on the clock."""
    values: list[ast.expr] = [call.named[word] for word in _RATES if word in call.named]
    if call.name in _LAMBDA_SCHEDULERS and (given := call.get(1, "lr_lambda")) is not None:
        function = call.scope.find_function(given)
        if isinstance(function, ast.Lambda):
            values.append(function.body)
        parts = () if function is None else ast.walk(function)
        values += [one.value for one in parts if isinstance(one, ast.Return) and one.value]
    if any(_find_call(_CLOCK, value, call.tree.scope[value]) for value in values):
        yield Report("D9M212", call.node)


def check_worker_seed(call: Call) -> Iterator[Report]:
    """Find a ``worker_init_fn`` that gives every worker the same seed."""
    given = call.named.get("worker_init_fn")
    function = None if given is None else call.scope.find_function(given)
    parts = () if function is None else ast.walk(function)
    for inner in [Call(part, call.tree) for part in parts if isinstance(part, ast.Call)]:
        seeding = inner.name in {*_FROM_SYSTEM_WHEN_EMPTY, "torch.manual_seed"}
        if seeding and inner.read(0, "seed", "a") not in (None, UNKNOWN):
            known = resolve(ast.Name("torch"), inner.scope) == "torch"
            edit = f"{ast.unparse(inner.node.func)}(torch.initial_seed() % 2**32)"
            yield Report("D9M207", inner.node, edit=edit if known else "")


def check_rank_seeds(call: Call) -> Iterator[Report]:
    """Find ``seed_everything`` without ``workers=True`` in a file whose loaders have workers."""
    if call.name != "lightning.seed_everything":
        return
    if call.read(1, "workers", default=False) is not False:
        return
    calls = call.tree.calls
    if any(one.name.startswith("lightning_d9m.") for one in calls):
        return  # the callback seeds the workers of every rank
    if any(
        one.name == "torch.utils.data.DataLoader"
        and one.read(5, "num_workers", default=0) != 0
        and "worker_init_fn" not in one.named
        for one in calls
    ):
        yield Report("D9M209", call.node, "depends")


def check_dataset(call: Call) -> Iterator[Report]:
    """Find a dataset that keeps a generator and draws from it for each sample."""
    enclosing = call.scope.enclosing_class
    if call.name not in _GENERATORS or not call.node.args or enclosing is None:
        return
    match call.parent, call.scope.node, enclosing.node:
        case (
            ast.Assign([ast.Attribute(attr=key), *_]),
            ast.FunctionDef("__init__"),
            ast.ClassDef(bases=bases, body=body),
        ) if any(read_last_name(base).endswith("Dataset") for base in bases):
            for function in body:
                match function:
                    case ast.FunctionDef("__getitem__" | "__iter__"):
                        if any(getattr(part, "attr", "") == key for part in ast.walk(function)):
                            yield Report("D9M208", call.node, "depends")


def check_training(call: Call) -> Iterator[Report]:
    """Find the training of a program whose file does not seed torch; imports are checked later."""
    match call.node.func:
        case ast.Attribute(attr="backward"):
            trains = True
        case ast.Attribute(owner, "fit"):
            values, _, _ = call.scope.follow(owner)
            trains = any(_makes(value, "lightning.Trainer", call.scope) for value in values)
        case _:
            return
    is_program = isinstance(call.scope.node, ast.Module) or runs(call.tree.module)
    if trains and is_program and not seeds(call.tree):
        yield Report("D9M210", call.node, "depends")


def check_environment(call: Call) -> Iterator[Report]:
    """Find the first reset and the first drawn action of an unseeded Gymnasium environment."""
    match call.node.func:
        case ast.Attribute(ast.Attribute(owner, "action_space"), "sample"):
            method, seeding, reason = "action_space.sample", "action_space.seed", _OF_ACTIONS
            fix = "Call action_space.seed() with one that is fixed."
        case ast.Attribute(owner, "reset"):
            method, seeding, reason, fix = "reset", "seed", "", ""
        case _:
            return
    values, area, key = call.scope.follow(owner)
    if not any(_makes_environment(value, call.scope) for value in values):
        return
    uses = call.tree.find_uses(area, key)
    found = [(name, one) for name, one in map(call.tree.find_method, uses) if one is not None]
    same = [one for name, one in found if name == method]
    resets = [Call(one, call.tree) for one in same if method == "reset"]
    takers = [Call(taker, call.tree) for use in uses if (taker := call.tree.find_taker(use))]
    words = [word for one in takers for word in (read_last_name(one.node.func), *one.named)]
    seeded = (
        any(name == seeding for name, _ in found)
        or any(one.unpacked or one.read(None, "seed") is not None for one in resets)
        or any("seed" in word.lower() for word in words)
    )
    first = min(same, key=lambda one: (one.lineno, one.col_offset), default=call.node)
    if call.node is first and not seeded:
        yield Report("D9M211", call.node, "depends" if takers else "certain", reason, fix)


def _makes_environment(value: ast.AST, scope: Scope) -> bool:
    """Return whether an expression makes an environment, wrapped or not."""
    return any(
        isinstance(part, ast.Call) and _ENVIRONMENTS.match(resolve(part.func, scope))
        for part in ast.walk(value)
    )
