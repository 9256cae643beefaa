"""Tests whether the order of an iterable affects the code that uses it."""

import ast
from collections.abc import Iterable, Sequence

from lightning_d9m.lint.scopes import FUNCTION_NODES, read_last_name
from lightning_d9m.lint.walk import NodeContext, walk_whole

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
    "add_module", "register_module", "register_buffer", "register_parameter", "submit", "send",
}  # fmt: skip
_DRAWING = ("random", "rand", "randn", "randint", "shuffle", "choice", "normal_", "uniform_")


def is_order_used(node: ast.AST, context: NodeContext) -> bool:
    """Return whether the order of an iterable affects the code that uses it."""
    return _is_used(node, list(context.parents), context, numbered=False)


def is_list_order_used(target: ast.AST, context: NodeContext) -> bool:
    """Return whether the order of a list affects more than a choice of single items.

    The list is ``name`` or ``self.name``.
    """
    area, key = context.find_area(target)
    return area is not None and any(
        not isinstance(parents[-1], ast.Attribute)
        and not is_choice(parents[-1])
        and (isinstance(parents[-1], ast.Assign) or _is_used(use, parents, context, numbered=False))
        for use, parents in _find_uses(area, key, context.parents[-1])
    )


def is_settled_later(context: NodeContext) -> bool:
    """Return whether what an iterable gives is sorted, or counted as one, in the same function."""
    names = set(_list_collections(context.parents))
    for made in ast.walk(context.scope.node):  # what is made of them, in order of the source
        if isinstance(made, (ast.For, ast.Assign)):
            source = made.iter if isinstance(made, ast.For) else made.value
            names.update(_list_collections([made]) if _mentions(source, names) else ())
    for node in ast.walk(context.scope.node):
        given: Sequence[ast.AST] = ()
        if isinstance(node, ast.Call) and "sort" in read_last_name(node.func).lower():
            given = (node.func, *node.args)
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Call):
            one = ast.dump(node.comparators[0]) == ast.dump(ast.Constant(1))
            given = node.left.args if one and read_last_name(node.left.func) == "len" else ()
        if any(_mentions(each, names) for each in given):
            return True
    return False


def _list_collections(parents: Iterable[ast.AST]) -> Iterable[str]:
    """Yield the names that get the items: those assigned, and those that a loop adds to."""
    for parent in parents:
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(parent, (ast.For, ast.AsyncFor, ast.With, ast.AsyncWith, ast.Call)):
            for node in ast.walk(parent):
                if isinstance(node, ast.Attribute) and node.attr in _COLLECTING:
                    yield from (node.value.id,) if isinstance(node.value, ast.Name) else ()


def is_choice(node: ast.AST) -> bool:
    """Return whether an expression takes items at fixed positions, such as ``files[-1]``."""
    if not isinstance(node, ast.Subscript):
        return False
    return not any(isinstance(part, ast.Name) for part in ast.walk(node.slice))


def _is_used(  # noqa: C901, PLR0911 - one case for each kind of parent
    node: ast.AST, parents: Sequence[ast.AST], context: NodeContext, *, numbered: bool
) -> bool:
    if not parents:
        return False
    parent, around = parents[-1], parents[:-1]
    if isinstance(parent, ast.Call):
        return _is_used_by_call(node, parent, around, context, numbered=numbered)
    if isinstance(parent, ast.comprehension):
        if parent.iter is not node:
            return False
        made = around[-1]
        if isinstance(made, (ast.SetComp, ast.DictComp)):
            # The order decides only the numbers; otherwise keys find the values.
            return numbered and isinstance(made, ast.DictComp)
        return _is_used(made, around[:-1], context, numbered=False)
    if isinstance(parent, (ast.For, ast.AsyncFor)):
        return parent.iter is node and _collects(parent, numbered=numbered)
    if isinstance(parent, (ast.Assign, ast.AnnAssign)):
        return _is_name_used(parent, context)
    if isinstance(parent, ast.Subscript):
        return parent.value is node
    if isinstance(
        parent, (ast.BinOp, ast.Starred, ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Await)
    ):
        if isinstance(parent, ast.BoolOp) and _is_test(parent, around):
            return False
        return _is_used(parent, around, context, numbered=numbered)
    if isinstance(parent, (ast.List, ast.Tuple, ast.keyword, ast.withitem)):
        return _is_used(parent, around, context, numbered=numbered)
    if isinstance(parent, (ast.With, ast.AsyncWith)):
        return any(
            isinstance(each, ast.For) and _collects(each, numbered=False) for each in parent.body
        )
    return isinstance(parent, (ast.Return, ast.YieldFrom, ast.AugAssign))


def _is_used_by_call(
    node: ast.AST,
    call: ast.Call,
    around: Sequence[ast.AST],
    context: NodeContext,
    *,
    numbered: bool,
) -> bool:
    name = read_last_name(call.func)
    if node is call.func or name in _FREE or "sort" in name.lower():
        return False
    if name in _NUMBERED or name in _PASSED_ON:
        return _is_used(call, around, context, numbered=numbered or name in _NUMBERED)
    return True


def _is_test(node: ast.AST, around: Sequence[ast.AST]) -> bool:
    outer = around[-1] if around else None
    return isinstance(outer, (ast.If, ast.While, ast.Assert)) and outer.test is node


def _is_name_used(statement: ast.Assign | ast.AnnAssign, context: NodeContext) -> bool:
    """Follow an assigned name through its scope, or an attribute through its class."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    area, key = context.find_area(target)
    if area is None:
        return True
    # A module-level name without uses may be imported elsewhere.
    used, uses = False, 0
    for use, parents in _find_uses(area, key, statement):
        parent = parents[-1]
        uses += 1
        if isinstance(parent, ast.Attribute):
            # Assume that it is sorted in place before it is used.
            if parent.attr == "sort":
                return False
            if parent.attr in {"index", "pop"}:
                used = True
            continue
        if isinstance(parent, ast.Call) and "sort" in read_last_name(parent.func).lower():
            reassigned = isinstance(parents[-2], ast.Assign) and _is_key(
                parents[-2].targets[0], key
            )
            if reassigned:
                return False
        # A further assignment counts as a use; chains of names are not followed.
        used = (
            used
            or isinstance(parent, ast.Assign)
            or _is_used(use, parents, context, numbered=False)
        )
    return used or (uses == 0 and not isinstance(area, FUNCTION_NODES))


def _is_key(node: ast.AST, key: str) -> bool:
    return key in {getattr(node, "id", None), getattr(node, "attr", None)}


def _find_uses(
    area: ast.AST, key: str, skipped: ast.AST
) -> Iterable[tuple[ast.AST, list[ast.AST]]]:
    for node, parents in walk_whole(area, skipped):
        loaded = isinstance(getattr(node, "ctx", None), ast.Load)
        if loaded and _is_key(node, key) and parents:
            yield node, parents


def _collects(loop: ast.For | ast.AsyncFor, *, numbered: bool) -> bool:
    """Return whether the body of a loop depends on the order of iterations."""
    if numbered:
        return True
    names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    return any(
        _shows_order(node, names) for statement in loop.body for node in _walk_body(statement)
    )


def _walk_body(statement: ast.AST) -> Iterable[ast.AST]:
    stack = [statement]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, FUNCTION_NODES):
            stack.extend(ast.iter_child_nodes(node))


def _shows_order(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, (ast.Yield, ast.YieldFrom)):
        return True
    if isinstance(node, ast.Return):
        return node.value is not None and _mentions(node.value, names)
    if isinstance(node, ast.AugAssign):
        counts = isinstance(node.value, ast.Constant) or isinstance(
            node.op, (ast.BitOr, ast.BitAnd)
        )
        return not counts and _mentions(node.value, names)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        # A number from the length of the target, or a module whose weights are drawn here.
        return any(
            isinstance(part, ast.Call)
            and (
                (isinstance(part.func, ast.Name) and part.func.id == "len")
                or (
                    isinstance(part.func, ast.Attribute) and read_last_name(part.func.value) == "nn"
                )
            )
            for part in ast.walk(node.value)
        )
    if isinstance(node, ast.Call):
        name = read_last_name(node.func)
        return name in _COLLECTING or name.startswith(_DRAWING)
    return False


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))
