"""Orders of listings, times, hashes and completion, which differ from run to run."""

import ast
from collections.abc import Iterator

from lightning_d9m.lint.checks.order_use import (
    is_choice,
    is_message,
    judge_list,
    judge_order,
)
from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.tree import (
    Call,
    Report,
    Tree,
    read_constant,
    read_kind,
    read_last_name,
    resolve,
)

_LISTINGS = {"os.listdir", "os.scandir", "glob.glob", "glob.iglob"}
_WALKS = {"os.walk", "os.fwalk"}
_COMPLETIONS = {"concurrent.futures.as_completed", "asyncio.as_completed"}
_FILE_TIMES = {"getmtime", "getctime", "getatime"}
_STAT_TIMES = {f"st_{kind}time{unit}" for kind in "mca" for unit in ("", "_ns")}


def check_listing(call: Call) -> Iterator[Report]:
    """Find listings of folders whose order is used."""
    certainty: Certainty = "certain"
    if call.name in _WALKS:
        if _sorts_in_loop(call.parent):
            return
        certainty = "depends"
    elif call.name not in _LISTINGS:
        one_pattern = call.method == "glob" and len(call.node.args) == 1
        path_like = call.method in {"iterdir", "rglob"} or one_pattern
        if not path_like or read_kind(call.receiver, call.scope) == "tensor":
            return
    if _expects_one_file(call) or is_message(call.node, call.tree):
        return
    if judged := judge_order(call.node, call.tree):
        edit = "sorted({})" if certainty == "certain" else ""
        if call.name == "os.scandir":  # its entries have no order, and are closed by `with`
            named = edit and not isinstance(call.parent, ast.withitem)
            edit = "sorted({}, key=lambda entry: entry.name)" if named else ""
        weaker = max(judged, certainty)  # "depends" comes after "certain"
        yield Report("D9M302", call.node, weaker, edit=edit)


def _expects_one_file(call: Call) -> bool:
    """Return whether a pattern has no wildcard, or one name is unpacked: ``[only] = ...``."""
    match call.parent:
        case ast.Assign([ast.Tuple([_]) | ast.List([_]), *_]):
            return True
    takes_pattern = call.method or call.name.startswith("glob.")
    pattern = read_constant(call.get(0), call.scope) if takes_pattern else None
    return isinstance(pattern, str) and not any(mark in pattern for mark in "*?[")


def _sorts_in_loop(loop: ast.AST) -> bool:
    """Return whether the loop over ``os.walk`` sorts what it is given."""
    for node in ast.walk(loop) if isinstance(loop, ast.For) else ():
        match node:
            case ast.Call(ast.Name(name)) if "sort" in name:
                return True
            case ast.Call(ast.Attribute(attr="sort")):
                return True
    return False


def check_modification_time(call: Call) -> Iterator[Report]:
    """Find files that are sorted by time, and whose order is used.

    The newest file of a sorted list is a common way to find a checkpoint; it is not found.
    """
    key = call.named.get("key")
    if key is None or not _reads_file_time(key, call):
        return
    judged: Certainty | None = None
    if call.name == "builtins.sorted":
        if isinstance(call.parent, ast.Assign):
            judged = judge_list(call.parent.targets[0], call.parent, call.tree)
        elif not is_choice(call.parent):
            judged = judge_order(call.node, call.tree)
    elif call.receiver is not None and call.method == "sort":
        judged = judge_list(call.receiver, call.parent, call.tree)
    if judged:
        yield Report("D9M306", call.node, judged)


def _reads_file_time(key: ast.expr, call: Call) -> bool:
    if isinstance(key, ast.Lambda):
        names = map(read_last_name, ast.walk(key.body))
        return any(name in _FILE_TIMES | _STAT_TIMES for name in names)
    name = resolve(key, call.scope)
    return name.startswith("os.path.") and name.removeprefix("os.path.") in _FILE_TIMES


def check_completion(call: Call) -> Iterator[Report]:
    """Find results in order of completion, and loaders with ``in_order=False``."""
    unordered = call.name in _COMPLETIONS or call.method == "imap_unordered"
    if unordered and (judged := judge_order(call.node, call.tree)):
        yield Report("D9M305", call.node, judged)
    if call.read(None, "in_order") is False:
        reason = "With in_order=False batches come as the workers finish them."
        yield Report("D9M305", call.node, reason=reason, fix="Leave in_order at True.")


def check_hash(call: Call) -> Iterator[Report]:
    """Find ``hash()`` of a possible string whose number is used."""
    if call.name == "builtins.sorted" or read_last_name(call.node.func) == "sort":
        if resolve(call.named.get("key"), call.scope) == "builtins.hash":
            yield Report("D9M303", call.node, "depends")
    elif call.name == "builtins.hash" and len(call.node.args) == 1:
        methods = (one for one in call.tree.around(call.node) if isinstance(one, ast.FunctionDef))
        if getattr(next(methods, None), "name", "") in {"__hash__", "__eq__"}:
            return
        text = _is_text(call.node.args[0], call)
        if text is not False and _is_number_used(call):
            yield Report("D9M303", call.node, "certain" if text else "depends")


def _is_text(node: ast.expr, call: Call) -> bool | None:
    """Return whether an expression is, or contains, a string; None if that is unknown."""
    found: bool | None = None
    match node:
        case ast.JoinedStr():
            found = True
        case ast.Constant(value):
            found = isinstance(value, (str, bytes))
        case ast.Tuple(elements) | ast.List(elements):
            kinds = {_is_text(element, call) for element in elements}
            found = True if True in kinds else (None if None in kinds else False)
        case ast.Call(function):
            name = resolve(function, call.scope).removeprefix("builtins.")
            texts = name in {"str", "repr"}
            found = True if texts else False if name in {"int", "float", "id", "len"} else None
    return found


def _is_number_used(call: Call) -> bool:
    """Return whether the number itself is used: in arithmetic, as a seed, as an index."""
    match call.parent:
        case ast.BinOp(op=operator):
            return isinstance(operator, (ast.Mod, ast.BitAnd, ast.RShift, ast.Mult, ast.Add))
        case ast.Call(function):
            name = resolve(function, call.scope) or read_last_name(function)
            return name in {"builtins.abs", "builtins.divmod"} or "seed" in name.lower()
        case ast.keyword("seed"):
            return True
    return False


def check_hash_seed(node: ast.Assign, tree: Tree) -> Iterator[Report]:
    """Find ``os.environ["PYTHONHASHSEED"] = ...``."""
    for target in node.targets:
        match target:
            case ast.Subscript(owner, key) if _is_hash_seed(key, tree):
                if resolve(owner, tree.scope[node]) == "os.environ":
                    yield Report("D9M304", node)


def check_hash_seed_call(call: Call) -> Iterator[Report]:
    """Find PYTHONHASHSEED set in the program's own environment by a function."""
    keys: list[ast.expr | None] = []
    if call.name in {"os.environ.setdefault", "os.putenv"}:
        keys = [*call.node.args[:1]]
    elif call.name == "os.environ.update" and isinstance(call.get(0), ast.Dict):
        keys = call.node.args[0].keys  # type: ignore[attr-defined] # it is a dict
    named = call.name == "os.environ.update" and "PYTHONHASHSEED" in call.named
    if named or any(key is not None and _is_hash_seed(key, call.tree) for key in keys):
        yield Report("D9M304", call.node)


def _is_hash_seed(node: ast.expr, tree: Tree) -> bool:
    return read_constant(node, tree.scope[node]) == "PYTHONHASHSEED"
