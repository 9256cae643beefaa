"""Tests whether the order of an iterable affects the code that uses it."""

import ast

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
_DEPTH = 6  # most steps from an iterable to what shows that its order matters
_DRAWING = ("random", "rand", "randn", "randint", "shuffle", "choice", "normal_", "uniform_")


def is_order_used(  # noqa: C901, PLR0912 - one case for each kind of parent
    node: ast.AST, tree: Tree, *, numbered: bool = False
) -> bool:
    """Return whether the order of an iterable affects the code that uses it.

    ``numbered`` is true if numbers go with its elements, as ``enumerate`` gives them.
    """
    parent = tree.parent.get(node)
    used = False
    match parent:
        case ast.Call(function):
            name = read_last_name(function)
            if name in _NUMBERED | _PASSED_ON and node is not function:
                numbered = numbered or name in _NUMBERED
                used = is_order_used(parent, tree, numbered=numbered)
            else:
                used = node is not function and name not in _FREE and "sort" not in name.lower()
        case ast.comprehension(iter=values):
            made = tree.parent[parent]
            if values is node and isinstance(made, (ast.SetComp, ast.DictComp)):
                # The order decides only the numbers; otherwise keys find the values.
                used = numbered and isinstance(made, ast.DictComp)
            elif values is node:
                used = is_order_used(made, tree)
        case ast.For(iter=values) | ast.AsyncFor(iter=values):
            used = values is node and _collects(parent, numbered=numbered)
        case ast.Assign() | ast.AnnAssign():
            used = _is_name_used(parent, tree)
        case ast.Subscript(value):
            used = value is node
        case ast.BoolOp() if _is_test(parent, tree.parent[parent]):
            pass
        case (
            ast.BinOp()
            | ast.Starred()
            | ast.IfExp()
            | ast.BoolOp()
            | ast.NamedExpr()
            | ast.Await()
            | ast.List()
            | ast.Tuple()
            | ast.keyword()
            | ast.withitem()
        ):
            used = is_order_used(parent, tree, numbered=numbered)
        case ast.With(body=body) | ast.AsyncWith(body=body):
            used = any(isinstance(one, ast.For) and _collects(one) for one in body)
        case ast.Return() | ast.YieldFrom() | ast.AugAssign():
            used = True
    return used


def proves_order(node: ast.AST, tree: Tree, *, numbered: bool = False, depth: int = _DEPTH) -> bool:
    """Return whether the source shows that the order of an iterable decides a result.

    Its elements get numbers, are picked by position in ``__getitem__``, by a slice or at random,
    become an array, or random numbers are drawn for each of them. What leaves a function proves
    nothing: another one may sort it.
    """
    parent = tree.parent.get(node)
    outer = found = False
    match parent:
        case _ if depth == 0:
            pass
        case ast.Call(function) if node is not function:
            name = read_last_name(function)
            numbered |= name == "enumerate"
            found = name in _PLACING
            outer = name in _PASSED_ON or name == "enumerate"
        case ast.comprehension(iter=values) if values is node:
            parent = tree.parent[parent]
            found = numbered and isinstance(parent, ast.DictComp)
            outer = isinstance(parent, (ast.ListComp, ast.GeneratorExp))
        case ast.For(iter=values) if values is node:
            found = _is_placed(parent, tree, numbered=numbered, depth=depth - 1)
        case ast.Assign([target]) | ast.AnnAssign(target):
            found = proves_name(target, parent, tree, depth - 1)
        case ast.Subscript(value, part) if value is node:
            functions = (one for one in tree.around(node) if isinstance(one, FUNCTION_NODES))
            given = getattr(next(functions, None), "name", "") == "__getitem__"
            found = given or isinstance(part, ast.Slice)
        case ast.BinOp() | ast.Starred() | ast.IfExp() | ast.NamedExpr() | ast.List() | ast.Tuple():
            outer = True
    if outer and parent is not None:
        found |= proves_order(parent, tree, numbered=numbered, depth=depth - 1)
    return found


def proves_name(target: ast.AST, statement: ast.AST, tree: Tree, depth: int = _DEPTH) -> bool:
    """Return whether uses of an assigned name or attribute prove that its order matters."""
    area, key = tree.scope[statement].find_area(target)
    uses = [] if area is None else tree.find_uses(area, key, statement)
    parents = [tree.parent[use] for use in uses]
    # What is sorted in place was meant to be.
    in_place = any(
        isinstance(parent, ast.Attribute) and parent.attr == "sort" for parent in parents
    )
    return not in_place and any(proves_order(use, tree, depth=depth) for use in uses)


def _is_placed(loop: ast.For, tree: Tree, *, numbered: bool, depth: int) -> bool:
    """Return whether a loop draws random numbers, stores a number, or fills a list that proves."""
    first = loop.target.elts[:1] if isinstance(loop.target, ast.Tuple) else []
    counts = {one.id for one in first if numbered and isinstance(one, ast.Name)}
    for part in (part for statement in loop.body for part in ast.walk(statement)):
        match part:
            case ast.Assign([ast.Subscript(), *_], value) if mentions(value, counts) or any(
                map(_is_drawn_or_counted, ast.walk(value))
            ):
                return True
            case ast.Call(ast.Attribute(owner, "append"), [_]) if proves_name(
                owner, loop, tree, depth
            ):
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


def is_list_order_used(target: ast.AST, tree: Tree, statement: ast.AST) -> bool:
    """Return whether the order of a list affects more than a choice of single items.

    The list is ``name`` or ``self.name``; uses within ``statement`` do not count.
    """
    area, key = tree.scope[statement].find_area(target)
    uses = [] if area is None else tree.find_uses(area, key, statement)
    return any(
        isinstance(parent, ast.Assign) or is_order_used(use, tree)
        for use in uses
        if not isinstance(parent := tree.parent[use], ast.Attribute) and not is_choice(parent)
    )


def is_choice(node: ast.AST) -> bool:
    """Return whether an expression takes items at fixed positions, such as ``files[-1]``."""
    return isinstance(node, ast.Subscript) and not any(
        isinstance(part, ast.Name) for part in ast.walk(node.slice)
    )


def _is_test(node: ast.AST, outer: ast.AST) -> bool:
    return isinstance(outer, (ast.If, ast.While, ast.Assert)) and outer.test is node


def _is_name_used(statement: ast.Assign | ast.AnnAssign, tree: Tree) -> bool:
    """Follow an assigned name through its scope, or an attribute through its class."""
    area, key = tree.scope[statement].find_area(list_targets(statement)[0])
    if area is None:
        return True
    uses = tree.find_uses(area, key, statement)
    # A module-level name without uses may be imported elsewhere.
    used = not uses and not isinstance(area, FUNCTION_NODES)
    for use in uses:
        parent = tree.parent[use]
        match parent:
            case ast.Attribute(attr="sort"):  # assume that it is sorted before it is used
                return False
            case ast.Attribute(attr=name):
                used |= name in {"index", "pop"}
            case ast.Call(function) if "sort" in read_last_name(function).lower():
                outer = tree.parent[parent]
                if isinstance(outer, ast.Assign) and is_named(outer.targets[0], key):
                    return False
            case _:  # a further assignment counts as a use; chains of names are not followed
                said = is_message(use, tree)
                used |= not said and (isinstance(parent, ast.Assign) or is_order_used(use, tree))
    return used


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
