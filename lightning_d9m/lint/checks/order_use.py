"""The effect of the order of an iterable on the code that uses it."""

import ast
from collections.abc import Iterable

from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.tree import (
    FUNCTION_NODES,
    Tree,
    is_named,
    list_targets,
    mentions,
    read_last_name,
)

_FREE = {
    "sorted", "len", "set", "frozenset", "any", "all", "max", "min", "sum", "Counter", "bool",
    "isinstance", "print", "natsorted", "unique", "sum_", "type", "repr", "str", "update",
    "issubset", "union", "intersection", "difference", "isdisjoint", "issuperset", "heapify",
    "fsum", "iter_sorted",
}  # fmt: skip
_PASSED_ON = {
    "list", "tuple", "iter", "map", "filter", "reversed", "chain", "tqdm", "array", "asarray",
    "from_iterable", "deque", "fspath", "islice",
}  # fmt: skip
_NUMBERED = {"enumerate", "zip"}
_COLLECTING = {
    "append", "extend", "insert", "appendleft", "put", "write", "writelines", "writerow",
    "add_module", "register_module", "register_buffer", "register_parameter", "send",
}  # fmt: skip
_SAYING = {"warn", "warning", "info", "debug", "rank_zero_warn", "rank_zero_info"}
# They pick or pair items by position, or keep them in their order as data.
_PLACING = {
    "shuffle", "sample", "choice", "choices", "permutation", "random_split", "Subset", "DataLoader",
    "array", "asarray", "fromiter", "tensor", "as_tensor", "stack", "cat", "concatenate", "vstack",
}  # fmt: skip
_DEPTH = 4  # most names and loops that are followed to what shows that its order matters
_DRAWING = ("random", "rand", "randn", "randint", "shuffle", "choice", "normal_", "uniform_")


def judge_order(  # noqa: C901, PLR0912 - one case for each kind of parent
    node: ast.AST, tree: Tree, *, numbered: bool = False, depth: int = _DEPTH
) -> Certainty | None:
    """Return how the order of an iterable affects the code that uses it; None if it does not.

    It does so certainly if the source shows what the order decides: its elements get numbers, are
    picked by position in ``__getitem__``, by a slice or at random, become an array, or random
    numbers are drawn for each of them. What leaves a function only depends: another one may sort
    it.

    Args:
        node: The iterable.
        tree: Its module.
        numbered: Whether numbers go with its elements, as ``enumerate`` gives them.
        depth: Most names and loops that are followed.
    """
    parent = tree.parent.get(node)
    judged: Certainty | None = None
    match parent:
        case ast.Call(function) if node is not function:
            judged = _judge_argument(parent, tree, numbered=numbered, depth=depth)
        case ast.comprehension(iter=values) if values is node:
            made = tree.parent[parent]
            if not isinstance(made, (ast.SetComp, ast.DictComp)):
                judged = judge_order(made, tree, numbered=numbered, depth=depth)
            elif numbered and isinstance(made, ast.DictComp):
                # The order decides only the numbers; otherwise keys find the values.
                judged = "certain"
        case ast.For(iter=values) | ast.AsyncFor(iter=values):
            if values is node and _collects(parent, numbered=numbered):
                placed = depth and _is_placed(parent, tree, numbered=numbered, depth=depth - 1)
                judged = "certain" if placed else "depends"
        case ast.Assign() | ast.AnnAssign():
            target = list_targets(parent)[0]
            judged = _judge_name(target, parent, tree, depth - 1) if depth else None
        case ast.Subscript(value, part) if value is node:
            functions = (one for one in tree.around(node) if isinstance(one, FUNCTION_NODES))
            given = getattr(next(functions, None), "name", "") == "__getitem__"
            judged = "certain" if given or isinstance(part, ast.Slice) else "depends"
        case ast.BoolOp() if _is_test(parent, tree.parent[parent]):
            pass
        case ast.BinOp() | ast.Starred() | ast.IfExp() | ast.NamedExpr() | ast.List() | ast.Tuple():
            judged = judge_order(parent, tree, numbered=numbered, depth=depth)
        case ast.BoolOp() | ast.Await() | ast.keyword() | ast.withitem():
            used = judge_order(parent, tree, numbered=numbered, depth=depth)
            judged = "depends" if used else None
        case ast.With(body=body) | ast.AsyncWith(body=body):
            used_within = any(isinstance(one, ast.For) and _collects(one) for one in body)
            judged = "depends" if used_within else None
        case ast.Return() | ast.YieldFrom() | ast.AugAssign():
            judged = "depends"
    return judged


def _judge_argument(call: ast.Call, tree: Tree, *, numbered: bool, depth: int) -> Certainty | None:
    """Judge the order of an argument of a call."""
    name = read_last_name(call.func)
    if name in _NUMBERED | _PASSED_ON:
        numbered |= name in _NUMBERED
        judged = judge_order(call, tree, numbered=numbered, depth=depth)
        if judged and name == "zip":  # it may pair the elements with those of an equal order
            judged = "depends"
    else:
        judged = None if name in _FREE or "sort" in name.lower() else "depends"
    return "certain" if judged and name in _PLACING else judged


def _judge_name(
    target: ast.AST, statement: ast.AST, tree: Tree, depth: int = _DEPTH
) -> Certainty | None:
    """Judge the order of a named iterable: a name in its scope, an attribute in its class."""
    area, key = tree.scope[statement].find_area(target)
    if area is None:
        return "depends"
    uses = tree.find_uses(area, key, statement)
    # A name of a module or class without uses may be used elsewhere.
    judged: Certainty | None = None
    if not uses and not isinstance(area, FUNCTION_NODES):
        judged = "depends"
    followed = []
    for use in uses:
        parent = tree.parent[use]
        match parent:
            case ast.Attribute(attr="sort"):  # assume that it is sorted before it is used
                return None
            case ast.Attribute(attr="index" | "pop"):
                judged = "depends"
            case ast.Attribute():
                pass
            case ast.Call(function) if "sort" in read_last_name(function).lower():
                outer = tree.parent[parent]
                if isinstance(outer, ast.Assign) and is_named(outer.targets[0], key):
                    return None
            case _ if not is_message(use, tree):
                followed.append(use)
    return _judge_uses(followed, tree, depth) or judged


def judge_list(target: ast.AST, statement: ast.AST, tree: Tree) -> Certainty | None:
    """Judge the order of a named list as ``judge_order`` does; choices of single items are free."""
    area, key = tree.scope[statement].find_area(target)
    uses = [] if area is None else tree.find_uses(area, key, statement)
    return _judge_uses(
        (
            use
            for use in uses
            if not isinstance(parent := tree.parent[use], ast.Attribute) and not is_choice(parent)
        ),
        tree,
        _DEPTH,
    )


def _judge_uses(uses: Iterable[ast.AST], tree: Tree, depth: int) -> Certainty | None:
    """Judge the order of what has several uses; a further assignment counts as one."""
    found = {
        judge_order(use, tree, depth=depth)
        or ("depends" if isinstance(tree.parent[use], ast.Assign) else None)
        for use in uses
    }
    return "certain" if "certain" in found else "depends" if "depends" in found else None


def _is_placed(loop: ast.For | ast.AsyncFor, tree: Tree, *, numbered: bool, depth: int) -> bool:
    """Return whether a loop draws random numbers, stores a number, or fills a list that proves."""
    first = loop.target.elts[:1] if isinstance(loop.target, ast.Tuple) else []
    counts = {one.id for one in first if numbered and isinstance(one, ast.Name)}
    for part in (part for statement in loop.body for part in ast.walk(statement)):
        match part:
            case ast.Assign([ast.Subscript(), *_], value) if mentions(value, counts) or any(
                map(_is_drawn_or_counted, ast.walk(value))
            ):
                return True
            case ast.Call(ast.Attribute(owner, "append"), [_]):
                if depth and _judge_name(owner, loop, tree, depth - 1) == "certain":
                    return True
            case ast.Call(function) if read_last_name(function).startswith(_DRAWING):
                return True
    return False


def is_message(node: ast.AST, tree: Tree) -> bool:
    """Return whether a value is only said: in an exception, a warning or a log."""
    for outer in tree.around(node):
        if isinstance(outer, ast.Call) and read_last_name(outer.func) in _SAYING:
            return True
        if isinstance(outer, ast.stmt):
            return isinstance(outer, ast.Raise)
    return False


def is_choice(node: ast.AST) -> bool:
    """Return whether an expression takes items at fixed positions, such as ``files[-1]``."""
    return isinstance(node, ast.Subscript) and not any(
        isinstance(part, ast.Name) for part in ast.walk(node.slice)
    )


def _is_test(node: ast.AST, outer: ast.AST) -> bool:
    return isinstance(outer, (ast.If, ast.While, ast.Assert)) and outer.test is node


def _collects(loop: ast.For | ast.AsyncFor, *, numbered: bool = False) -> bool:
    """Return whether the body of a loop depends on the order of iterations."""
    names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    # What is made within the loop collects what one iteration gives.
    made = {
        node.id
        for statement in loop.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    waiting: list[ast.AST] = list(loop.body)
    while waiting and not numbered:
        node = waiting.pop()
        numbered = _shows_order(node, names, made)
        waiting += [] if isinstance(node, FUNCTION_NODES) else ast.iter_child_nodes(node)
    return numbered


def _shows_order(node: ast.AST, names: set[str], made: set[str]) -> bool:
    match node:
        case ast.Yield() | ast.YieldFrom():
            return True
        case ast.Return(ast.expr() as value):
            return mentions(value, names)
        case ast.AugAssign(op=operator, value=value):
            counts = isinstance(value, ast.Constant)
            counts |= isinstance(operator, (ast.BitOr, ast.BitAnd))
            return not counts and mentions(value, names)
        case ast.Assign([ast.Subscript(), *_], value):
            return any(map(_is_drawn_or_counted, ast.walk(value)))
        case ast.Call(function):
            name, owner = read_last_name(function), getattr(function, "value", None)
            collects = name in _COLLECTING and not (
                isinstance(owner, ast.Name) and owner.id in made
            )
            return collects or name.startswith(_DRAWING)
    return False


def _is_drawn_or_counted(node: ast.AST) -> bool:
    """Return whether a value is a length, or a module whose weights are drawn here."""
    match node:
        case ast.Call(ast.Name(name)):
            return name == "len"
        case ast.Call(ast.Attribute(owner)):
            return read_last_name(owner) == "nn"
    return False
