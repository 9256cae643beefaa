"""Orders that differ from run to run, and whether the code that uses them depends on the order.

Listings of folders, sets, results as they complete, and hashes of strings. An order that is found
always depends: what leaves a function may be sorted by its caller.
"""

import ast
from collections.abc import Iterable, Iterator
from typing import Literal

from lightning_d9m.tools.lint.tree import (
    FUNCTION_NODES,
    NAMES,
    Call,
    Report,
    Scope,
    Tree,
    is_named,
    mentions,
    read_kind,
    read_last_name,
    resolve,
)

Elements = Literal["numbers", "strings", "unknown"]

_MIXED = (
    "If its elements are strings, or hashed by address, the order of the set changes from run to "
    "run."
)
# Functions that give a set an order.
_ORDERING = NAMES["passed on"] | NAMES["ordering"]
# Expressions that have the order of a part.
_PASSING = (
    *(ast.BinOp, ast.BoolOp, ast.Starred, ast.IfExp, ast.NamedExpr, ast.List, ast.Tuple),
    *(ast.Await, ast.keyword),
)
_DEPTH = 4  # most names and loops that are followed to what shows that its order matters


def check_listing(call: Call) -> Iterator[Report]:
    """Find listings of folders whose order is used."""
    walks = call.name in {"os.walk", "os.fwalk"}
    if walks:
        # os.walk yields names in lists, and a program sorts them within its loop: dirs.sort().
        loop = ast.walk(call.parent) if isinstance(call.parent, ast.For) else ()
        if any("sort" in read_last_name(one.func) for one in loop if isinstance(one, ast.Call)):
            return
    elif call.name not in NAMES["listings"]:
        # Path.glob and similar methods of any object, since its type is not known.
        one_pattern = call.method == "glob" and len(call.node.args) == 1
        path_like = call.method in {"iterdir", "rglob"} or one_pattern
        if not path_like or read_kind(call.receiver, call.scope) == "tensor":
            return
    match call.parent:
        case ast.Assign([ast.Tuple([_]) | ast.List([_]), *_]):
            return  # it has one element
    if not _is_message(call.node, call.tree) and _decides(call.node, call.tree):
        edit = "" if walks else _edit_order(call.node, call.tree)
        yield Report("D9M302", call.node, "depends", edit=edit)


def check_modification_time(call: Call) -> Iterator[Report]:
    """Find files that are sorted by time, unless one of them is chosen, such as the newest."""
    key = call.named.get("key")
    names = () if key is None else map(read_last_name, ast.walk(key))
    if not any(name in NAMES["file times"] for name in names):
        return
    ordered: ast.AST = call.node
    if call.receiver is not None and call.method == "sort":
        ordered = call.receiver
    elif call.name != "builtins.sorted":
        return
    target = call.parent.targets[0] if isinstance(call.parent, ast.Assign) else call.receiver
    uses = [use for use in call.tree.find_uses(target, call.scope) if use is not ordered]
    users = [call.tree.parent[use] for use in uses] if target else [call.parent]
    # A subscript that picks one end, such as the newest file.
    ends = ast.Constant | ast.UnaryOp | ast.Slice
    if all(isinstance(user, ast.Subscript) and isinstance(user.slice, ends) for user in users):
        return
    if (
        _name_decides(target, call.parent, call.tree, _DEPTH - 1)
        if target
        else _decides(call.node, call.tree)
    ):
        yield Report("D9M306", call.node, "depends")


def check_completion(call: Call) -> Iterator[Report]:
    """Find results in order of completion, and loaders with ``in_order=False``."""
    unordered = call.name in NAMES["completions"] or call.method == "imap_unordered"
    if unordered and _decides(call.node, call.tree):
        yield Report("D9M305", call.node, "depends")
    if call.read(None, "in_order") is False:
        reason = "With in_order=False batches come as the workers finish them."
        yield Report("D9M305", call.node, reason=reason, fix="Leave in_order at True.")


def check_hash(call: Call) -> Iterator[Report]:
    """Find ``hash()`` of a possible string whose number is used: in arithmetic, or as a seed."""
    if call.name != "builtins.hash" or len(call.node.args) != 1:
        return
    # __hash__ serves dicts and sets, whose order the rule of sets judges.
    methods = (one for one in call.tree.around(call.node) if isinstance(one, ast.FunctionDef))
    if getattr(next(methods, None), "name", "") in {"__hash__", "__eq__"}:
        return
    kind = _read_element(call.node.args[0])
    if kind != "numbers" and _is_computed(call.node, call.tree):
        yield Report("D9M303", call.node, "certain" if kind == "strings" else "depends")


def _is_computed(node: ast.AST, tree: Tree, depth: int = _DEPTH) -> bool:
    """Return whether a number, or a name that it is given, is in arithmetic or a seed."""
    parent = tree.parent[node]
    match parent:
        case ast.BinOp(op=ast.Mod() | ast.BitAnd() | ast.RShift() | ast.Mult() | ast.Add()):
            return True
        case ast.Call(function):
            name = resolve(function, tree.scope[node]) or read_last_name(function)
            return name in {"builtins.abs", "builtins.divmod"} or "seed" in name.lower()
        case ast.Assign([target, *_]) if depth:
            uses = tree.find_uses(target, tree.scope[node], parent)
            return any(_is_computed(use, tree, depth - 1) for use in uses)
    return False


def check_set(node: ast.expr, tree: Tree) -> Iterator[Report]:
    """Find sets whose order decides the order of something else."""
    site = _find_iteration(node, tree)
    elements = _read_elements(node, tree.scope[node]) if site else None
    if elements in {None, "numbers"} or _has_one_element(node, tree):
        return
    if site == "popped" or (not _is_message(node, tree) and _decides(node, tree)):
        texts = elements == "strings"
        edit = _edit_order(node, tree) if texts else ""
        yield Report("D9M301", node, "depends", "" if texts else _MIXED, edit=edit)


def _edit_order(node: ast.expr, tree: Tree) -> str:
    """Return the edit that sorts an iterable: a list anywhere, others where they are iterated.

    ``next`` and ``with`` take no list.
    """
    scope = tree.scope[node]
    is_list = isinstance(node, ast.Call) and resolve(node.func, scope) in NAMES["lists"]
    if resolve(ast.Name("sorted"), scope) != "builtins.sorted":
        return ""
    if is_list:
        return "sorted({})"
    # Entries of folders, paths in an archive, and None in a set of strings have no order, and paths
    # in an archive without a name have no str().
    return "sorted({}, key=repr)" if _find_iteration(node, tree) == "iterated" else ""


def _find_iteration(node: ast.expr, tree: Tree) -> Literal["iterated", "popped", ""]:
    """Return whether a set expression is iterated or popped."""
    parent = tree.parent[node]
    iterated = False
    match parent:
        case ast.For(iter=values) | ast.comprehension(iter=values, is_async=0):
            iterated = values is node
        case ast.Starred():
            iterated = not isinstance(tree.parent[parent], ast.Set)
        case ast.YieldFrom():
            iterated = True
        case ast.Call(function) if node is not function:
            iterated = read_last_name(function) in _ORDERING or _ties(parent)
        # A dict's pop takes a key, and a set's takes nothing.
        case ast.Attribute(attr="pop"):
            call = tree.parent[parent]
            popped = isinstance(call, ast.Call) and call.func is parent and not call.args
            return "popped" if popped else ""
    return "iterated" if iterated else ""


def _ties(call: ast.Call) -> bool:
    """Return whether a call compares by a key that often is equal; then the order decides.

    A key with a tuple names what decides then.
    """
    key = next((word.value for word in call.keywords if word.arg == "key"), None)
    parts = [] if key is None else list(ast.walk(key))
    tying = any(read_last_name(part) in NAMES["tying"] for part in parts)
    return tying and not any(isinstance(part, ast.Tuple) for part in parts)


def _has_one_element(node: ast.expr, tree: Tree) -> bool:
    """Return whether a set is written with one element, or tested to have one before its use."""
    if isinstance(node, ast.Set):
        return len(node.elts) == 1 and not isinstance(node.elts[0], ast.Starred)
    # Equal text, as the same names mean the same set within a function.
    written = ast.dump(node)
    for test in ast.walk(tree.scope[node].node):
        match test:
            case ast.Compare(
                ast.Call(ast.Name("len"), [measured]), comparators=[ast.Constant(1), *_]
            ) if test.lineno <= node.lineno and ast.dump(measured) == written:
                return True
    return False


def _read_elements(  # noqa: C901 - one case for each kind of expression
    node: ast.AST | None, scope: Scope, depth: int = _DEPTH
) -> Elements | None:
    """Return the kind of a set's elements; None if the expression is not known to be a set."""
    found: Elements | None = None
    match node:
        case _ if depth == 0:
            pass
        case ast.Set(elements):
            found = _merge(map(_read_element, elements))
        case ast.SetComp():
            found = _read_element(node)
        case ast.Call(function, given) if resolve(function, scope) in NAMES["sets"]:
            first = given[0] if given else None
            found = _read_elements(first, scope, depth - 1) or _read_element(first)
        case ast.Call(ast.Attribute(value, method)) if method in NAMES["set methods"]:
            found = _read_elements(value, scope, depth - 1)
        case ast.BinOp(left, ast.BitOr() | ast.BitAnd() | ast.BitXor() | ast.Sub() as op, right):
            sides = (left,) if isinstance(op, ast.Sub) else (left, right)
            called = {read_last_name(side.func) for side in sides if isinstance(side, ast.Call)}
            # Of views of a dict Python makes a set, which does not have the dict's order.
            views = not called.isdisjoint({"keys", "items"})
            read = (_read_elements(side, scope, depth - 1) for side in sides)
            found = "unknown" if views else _merge(read)
        case ast.Name(name):
            bindings, where = scope.find(name)
            kinds: list[Elements | None] = []
            for one in bindings:
                base = one.node.value if isinstance(one.node, ast.Subscript) else one.node
                if resolve(base, where) in NAMES["set types"]:  # an annotation
                    kinds.append("unknown")
                else:
                    assigned = one.node if one.kind == "assign" else None
                    kinds.append(_read_elements(assigned, where, depth - 1))
            found = _merge(kinds)
        case ast.Attribute(ast.Name("self")) if scope.enclosing_class is not None:
            values = scope.follow(node)[0]
            found = _merge(_read_elements(value, scope, depth - 1) for value in values)
    return found


def _merge(found: Iterable[Elements | None]) -> Elements | None:
    """Return the kind of several values, all of which must be sets."""
    kinds = set(found)
    if not kinds or None in kinds:
        return None
    return kinds.pop() if len(kinds) == 1 else "unknown"


def _read_element(node: ast.AST | None) -> Elements:
    """Return the kind of a value, or of its elements if it has several."""
    found: Elements = "unknown"
    match node:
        case ast.Constant(value):
            found = "strings" if isinstance(value, (str, bytes)) else "numbers"
        case ast.JoinedStr() | ast.Attribute(attr="name" | "stem" | "suffix" | "__name__"):
            found = "strings"
        case ast.Tuple(elements) | ast.List(elements) | ast.Set(elements):
            kinds = set(map(_read_element, elements))
            if "strings" in kinds or kinds <= {"numbers"}:
                found = "strings" if "strings" in kinds else "numbers"
        case ast.GeneratorExp(element) | ast.ListComp(element) | ast.SetComp(element):
            found = _read_element(element)
        case ast.UnaryOp(operand=operand):
            found = _read_element(operand)
        case ast.Call(function):
            name = read_last_name(function)
            is_text, is_number = name in NAMES["texts"], name in NAMES["numbers"]
            found = "strings" if is_text else "numbers" if is_number else "unknown"
        # "a%s" % x is a text.
        case ast.BinOp(left, ast.Mod() | ast.FloorDiv()):
            text = isinstance(left, (ast.Constant, ast.JoinedStr))
            found = "strings" if text else "numbers"
    return found


def _decides(node: ast.AST, tree: Tree, *, numbered: bool = False, depth: int = _DEPTH) -> bool:
    """Return whether the order of an iterable decides anything in the code that uses it.

    ``numbered`` says whether numbers go with its elements, as ``enumerate`` gives them, and
    ``depth`` how many names and loops are followed at most.
    """
    # By what is around it and not by data flow: what the source does not show does not count, as a
    # finding that is mostly wrong would hide the others.
    parent = tree.parent.get(node)
    decides = False
    match parent:
        case ast.Call(function) if node is not function:
            name = read_last_name(function)
            decides = _ties(parent) or not (name in NAMES["free"] or "sort" in name.lower())
            if name in NAMES["passed on"]:
                numbered |= name in NAMES["numbered"]
                decides = _decides(parent, tree, numbered=numbered, depth=depth)
        case ast.comprehension(iter=values) if values is node and not _picks_one(parent):
            made = tree.parent[parent]
            # Of a dict the order decides only the numbers; otherwise keys find the values.
            decides = numbered and isinstance(made, ast.DictComp)
            if not isinstance(made, (ast.SetComp, ast.DictComp)):
                decides = _decides(made, tree, numbered=numbered, depth=depth)
        case ast.For(iter=values) | ast.AsyncFor(iter=values):
            decides = values is node and _loop_decides(parent, numbered=numbered)
        case (
            ast.Assign([target, *_])
            | ast.AnnAssign(target)
            | ast.withitem(optional_vars=ast.Name() as target)
        ):
            decides = bool(depth) and _name_decides(target, parent, tree, depth - 1)
        case ast.Subscript() | ast.Return() | ast.YieldFrom() | ast.AugAssign():
            decides = True
        case ast.BoolOp() if getattr(tree.parent[parent], "test", None) is parent:
            pass
        case _ if isinstance(parent, _PASSING):
            decides = _decides(parent, tree, numbered=numbered, depth=depth)
    return decides


def _picks_one(made: ast.comprehension) -> bool:
    """Return whether only an element that is equal to a value is taken."""
    for test in made.ifs:
        match test:
            case ast.Compare(ast.Name(name), [ast.Eq()], [_]) | ast.Compare(
                _, [ast.Eq()], [ast.Name(name)]
            ) if is_named(made.target, name):
                return True
    return False


def _name_decides(target: ast.AST, statement: ast.AST, tree: Tree, depth: int) -> bool:
    """Judge the order of a named iterable: a name in its scope, an attribute in its class.

    Uses within the statement that makes the iterable do not count.
    """
    _, area, key = tree.scope[statement].follow(target)
    if area is None:
        return True
    # Flow is not followed: any use after a sort, or before it, is taken for one of the sorted list.
    uses = tree.find_uses(target, tree.scope[statement], statement)
    # A name of a module or class without uses may be used elsewhere.
    decides = not uses and not isinstance(area, FUNCTION_NODES)
    for use in uses:
        parent = tree.parent[use]
        match parent:
            case ast.Attribute(attr=name):
                if name == "sort":  # assume that it is sorted before it is used
                    return False
                decides |= name in {"index", "pop"}
            case ast.Call(function) if "sort" in read_last_name(function).lower():
                outer = tree.parent[parent]
                if isinstance(outer, ast.Assign) and is_named(outer.targets[0], key):
                    return False
            case _ if not _is_message(use, tree):
                # A further assignment counts as a use.
                decides |= isinstance(parent, ast.Assign) or _decides(use, tree, depth=depth)
    return decides


def _loop_decides(  # noqa: C901 - one case for each kind of node
    loop: ast.For | ast.AsyncFor, *, numbered: bool = False
) -> bool:
    """Judge the order of iterations of a loop, by what its body does."""
    names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    first = loop.target.elts[:1] if isinstance(loop.target, ast.Tuple) else []
    counts = {one.id for one in first if numbered and isinstance(one, ast.Name)}
    # A function that the body defines runs elsewhere.
    nodes: list[ast.AST] = list(loop.body)
    for node in nodes:  # grows
        nodes += [] if isinstance(node, FUNCTION_NODES) else ast.iter_child_nodes(node)
    # What is made within the loop collects what one iteration gives.
    stored = (n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    made = {node.id for node in stored}
    for node in nodes:
        match node:
            case ast.Yield() | ast.YieldFrom():
                return True
            case ast.Return(ast.expr() as value) if mentions(value, names):
                return True
            case ast.AugAssign(op=operator, value=value) if mentions(value, names):
                if not isinstance(operator, (ast.BitOr, ast.BitAnd)):
                    return True
            case ast.Assign([ast.Subscript(), *_], value):
                drawn = any(_is_drawn_or_counted(part, names) for part in ast.walk(value))
                if drawn or mentions(value, counts):
                    return True
            case ast.Call(function):
                name, owner = read_last_name(function), getattr(function, "value", None)
                collects = name in NAMES["collecting"] and getattr(owner, "id", None) not in made
                if collects or name.startswith(tuple(NAMES["drawing"])):
                    return True
    return numbered


def _is_message(node: ast.AST, tree: Tree) -> bool:
    """Return whether a value is only said: in an exception, a warning or a log."""
    for outer in tree.around(node):
        if isinstance(outer, ast.Call) and read_last_name(outer.func) in NAMES["saying"]:
            return True
        if isinstance(outer, ast.stmt):
            return isinstance(outer, ast.Raise)
    return False


def _is_drawn_or_counted(node: ast.AST, names: Iterable[str]) -> bool:
    """Return whether a value is a length, or a module whose weights are drawn here.

    The length of what belongs to one element, which has a name of these, counts no iterations.
    """
    match node:
        case ast.Call(ast.Name("len"), given):
            return not any(mentions(one, names) for one in given)
        case ast.Call(ast.Attribute(owner)):
            return read_last_name(owner) == "nn"
    return False
