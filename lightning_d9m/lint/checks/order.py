"""Orders of sets, listings, hashes and completion, which differ from run to run."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.checks.order_use import is_order_used, is_settled_later
from lightning_d9m.lint.checks.set_expressions import (
    has_one_element,
    is_alone,
    is_iterated,
    read_elements,
)
from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.scopes import read_last_name
from lightning_d9m.lint.values import read_constant, read_kind
from lightning_d9m.lint.walk import NodeContext, ReportFinding

_LISTINGS = {"os.listdir", "os.scandir", "glob.glob", "glob.iglob", "os.walk", "os.fwalk"}
_PATH_LISTINGS = {"iterdir", "rglob"}
_COMPLETIONS = {
    "concurrent.futures.as_completed",
    "asyncio.as_completed",
}
_UNORDERED_METHODS = {"imap_unordered"}


def check_set(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find sets whose order decides the order of something else."""
    site = is_iterated(node, context)
    if site is None:
        return
    elements = read_elements(node, context.scope)
    if elements is None or elements == "numbers":
        return
    if has_one_element(node) or is_alone(node, context):
        return
    if site != "popped" and not is_order_used(node, context):
        return
    certainty: Certainty = "certain" if elements == "strings" else "depends"
    reason = (
        ""
        if certainty == "certain"
        else "If its elements are strings, or hashed by address, the order of the set changes from "
        "run to run."
    )
    yield ReportFinding("D9M301", node, certainty, reason)


def check_listing(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find listings of folders whose order is used."""
    assert isinstance(node, ast.Call)
    name = context.resolve(node.func)
    certainty: Certainty = "certain"
    if name is None:
        if not isinstance(node.func, ast.Attribute):
            return
        method = node.func.attr
        path_like = method in _PATH_LISTINGS or (method == "glob" and len(node.args) == 1)
        if not path_like or read_kind(node.func.value, context.scope) == "tensor":
            return
    elif name not in _LISTINGS:
        return
    elif name in {"os.walk", "os.fwalk"}:
        if _sorts_in_walk(context):
            return
        certainty = "depends"
    if _names_one_file(node, name) or _is_unpacked_alone(context):
        return
    if is_order_used(node, context):
        settled = is_settled_later(context)
        yield ReportFinding("D9M302", node, "depends" if settled else certainty)


def check_completion(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find results in order of completion, and loaders with ``in_order=False``."""
    assert isinstance(node, ast.Call)
    name = context.resolve(node.func)
    unordered = (
        name is None
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _UNORDERED_METHODS
    )
    if (name in _COMPLETIONS or unordered) and is_order_used(node, context):
        yield ReportFinding("D9M305", node)
    for word in node.keywords:
        if word.arg == "in_order" and read_constant(word.value, context.scope) is False:
            yield ReportFinding(
                "D9M305",
                node,
                reason="With in_order=False batches come as the workers finish them.",
                fix="Leave in_order at True.",
            )


def check_hash(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find ``hash()`` of a possible string whose number is used."""
    assert isinstance(node, ast.Call)
    if context.resolve(node.func) == "builtins.sorted" or (
        isinstance(node.func, ast.Attribute) and node.func.attr == "sort"
    ):
        for word in node.keywords:
            if word.arg == "key" and context.resolve(word.value) == "builtins.hash":
                yield ReportFinding("D9M303", node, "depends")
        return
    if context.resolve(node.func) != "builtins.hash" or len(node.args) != 1:
        return
    method = context.find_enclosing(ast.FunctionDef)
    if isinstance(method, ast.FunctionDef) and method.name in {"__hash__", "__eq__"}:
        return
    text = _is_text(node.args[0], context)
    if text is not False and _is_number_used(context):
        yield ReportFinding("D9M303", node, "certain" if text else "depends")


def check_hash_seed(node: ast.AST, context: NodeContext) -> Iterator[ReportFinding]:
    """Find PYTHONHASHSEED set in the program's own environment."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if (
                isinstance(target, ast.Subscript)
                and _is_hash_seed(target.slice, context)
                and context.resolve(target.value) == "os.environ"
            ):
                yield ReportFinding("D9M304", node)
    elif isinstance(node, ast.Call) and node.args:
        name = context.resolve(node.func)
        if name in {"os.environ.setdefault", "os.putenv"} and _is_hash_seed(node.args[0], context):
            yield ReportFinding("D9M304", node)
        elif name == "os.environ.update":
            named = any(word.arg == "PYTHONHASHSEED" for word in node.keywords)
            keys = node.args[0].keys if isinstance(node.args[0], ast.Dict) else ()
            if named or any(key is not None and _is_hash_seed(key, context) for key in keys):
                yield ReportFinding("D9M304", node)


def _names_one_file(node: ast.Call, name: str | None) -> bool:
    """Return whether a pattern has no wildcard."""
    takes_pattern = name is None or name.startswith("glob.")
    pattern = node.args[0] if takes_pattern and node.args else None
    if isinstance(pattern, ast.Constant) and isinstance(pattern.value, str):
        return not any(mark in pattern.value for mark in "*?[")
    return False


def _is_unpacked_alone(context: NodeContext) -> bool:
    """Return whether exactly one file is expected: ``[only] = folder.glob(...)``."""
    parent = context.parents[-1]
    target = parent.targets[0] if isinstance(parent, ast.Assign) else None
    return isinstance(target, (ast.Tuple, ast.List)) and len(target.elts) == 1


def _is_hash_seed(node: ast.AST, context: NodeContext) -> bool:
    return read_constant(node, context.scope) == "PYTHONHASHSEED"


def _is_text(node: ast.AST, context: NodeContext) -> bool | None:
    """Return whether an expression is, or contains, a string; None if that is unknown."""
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (str, bytes))
    if isinstance(node, (ast.Tuple, ast.List)):
        kinds = {_is_text(element, context) for element in node.elts}
        return True if True in kinds else (None if None in kinds else False)
    if isinstance(node, ast.Call):
        name = context.resolve(node.func)
        if name in {"builtins.str", "builtins.repr"}:
            return True
        if name in {"builtins.int", "builtins.id", "builtins.len", "builtins.float"}:
            return False
    return None


def _is_number_used(context: NodeContext) -> bool:
    """Return whether the number itself is used: in arithmetic, as a seed, as an index."""
    parent = context.parents[-1]
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, (ast.Mod, ast.BitAnd, ast.RShift, ast.Mult, ast.Add))
    if isinstance(parent, ast.Call):
        name = context.resolve(parent.func) or read_last_name(parent.func)
        return name in {"builtins.abs", "builtins.divmod"} or "seed" in name.lower()
    return isinstance(parent, ast.keyword) and parent.arg == "seed"


def _sorts_in_walk(context: NodeContext) -> bool:
    """Return whether the loop over ``os.walk`` sorts what it is given."""
    loop = context.parents[-1]
    if not isinstance(loop, ast.For):
        return False
    return any(
        isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and "sort" in node.func.id)
            or (isinstance(node.func, ast.Attribute) and node.func.attr == "sort")
        )
        for statement in loop.body
        for node in ast.walk(statement)
    )
