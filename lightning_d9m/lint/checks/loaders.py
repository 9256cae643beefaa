"""Workers of data loaders that draw the same numbers."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.checks.seeds import GENERATORS
from lightning_d9m.lint.scopes import Scope
from lightning_d9m.lint.values import UNKNOWN, Arguments, read_constant
from lightning_d9m.lint.walk import NodeContext, ReportFinding

_SEEDING = {"random.seed", "numpy.random.seed", "torch.manual_seed"}
_LOADER = "torch.utils.data.DataLoader"


def check_worker_seed(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find a ``worker_init_fn`` that gives every worker the same seed."""
    assert isinstance(node, ast.Call)
    for word in node.keywords:
        if word.arg != "worker_init_fn":
            continue
        function = context.find_function(word.value)
        if function is None:
            continue
        inner = Scope(function, context.scope, context.scope.package)
        body = function.body if isinstance(function.body, list) else [function.body]
        for statement in body:
            for call in ast.walk(statement):
                if isinstance(call, ast.Call) and _seeds_alike(call, inner):
                    yield ReportFinding("D9M207", call)


def check_rank_seeds(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find ``seed_everything`` without ``workers=True`` in a file whose loaders have workers."""
    assert isinstance(node, ast.Call)
    if context.resolve(node.func) != "lightning.seed_everything":
        return
    if Arguments(node, context.scope).read(1, "workers", default=False) is not False:
        return
    calls = [node for node in ast.walk(context.parents[0]) if isinstance(node, ast.Call)]
    if any((context.resolve(call.func) or "").startswith("lightning_d9m.") for call in calls):
        return  # the callback seeds the workers of every rank
    for other in calls:
        if context.resolve(other.func) != _LOADER:
            continue
        arguments = Arguments(other, context.scope)
        if (
            arguments.read(5, "num_workers", default=0) != 0
            and "worker_init_fn" not in arguments.named
        ):
            yield ReportFinding("D9M209", node, "depends")
            return


def check_dataset(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find a dataset that keeps a generator and draws from it for each sample."""
    assert isinstance(node, ast.Call)
    if context.resolve(node.func) not in GENERATORS or not node.args:
        return
    parent = context.parents[-1]
    enclosing = context.scope.enclosing_class
    if not isinstance(parent, ast.Assign) or enclosing is None:
        return
    target = parent.targets[0]
    method = context.scope.node
    if not isinstance(target, ast.Attribute) or getattr(method, "name", "") != "__init__":
        return
    if not _is_dataset(enclosing):
        return
    assert isinstance(enclosing.node, ast.ClassDef)
    for function in enclosing.node.body:
        if (
            isinstance(function, ast.FunctionDef)
            and function.name in {"__getitem__", "__iter__"}
            and any(getattr(part, "attr", "") == target.attr for part in ast.walk(function))
        ):
            yield ReportFinding("D9M208", node, "depends")


def _is_dataset(scope: Scope) -> bool:
    assert isinstance(scope.node, ast.ClassDef)
    names = [getattr(base, "attr", getattr(base, "id", "")) for base in scope.node.bases]
    return any(name.endswith("Dataset") for name in names)


def _seeds_alike(call: ast.Call, scope: Scope) -> bool:
    context = NodeContext(scope=scope)
    seed = Arguments(call, scope).get(0, "seed", "a")
    if context.resolve(call.func) not in _SEEDING or seed is None:
        return False
    return read_constant(seed, scope) not in (None, UNKNOWN)
