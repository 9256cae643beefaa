"""Set expressions, their elements and their iteration."""

import ast
from collections.abc import Sequence
from typing import Literal

from lightning_d9m.lint.scopes import Scope, resolve
from lightning_d9m.lint.walk import NodeContext

Elements = Literal["numbers", "strings", "unknown"]

_MAKERS = {"builtins.set", "builtins.frozenset"}
_SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}
_ORDERING = {
    "list", "tuple", "enumerate", "iter", "zip", "map", "filter", "reversed", "array",
    "fromiter", "tensor", "join", "extend", "fromkeys", "deque", "Series", "DataFrame",
    "shuffle", "sample", "choice", "tqdm", "chain", "cycle", "Index", "Subset", "DataLoader",
    "writelines", "as_tensor", "asarray",
}  # fmt: skip
_TYPES = {"builtins.set", "builtins.frozenset", "typing.Set", "typing.FrozenSet"}
_TEXTS = {"str", "repr", "chr", "hex", "format", "basename", "strip", "lower", "upper", "split"}
_NUMBERS = {"range", "int", "len", "ord", "round", "arange"}
_DEPTH = 4


def read_elements(  # noqa: PLR0911 - one case for each kind of expression
    node: ast.AST, scope: Scope, depth: int = _DEPTH
) -> Elements | None:
    """Return the kind of a set's elements; None if the expression is not known to be a set."""
    if depth == 0:
        return None
    if isinstance(node, ast.Set):
        return _read_all(node.elts)
    if isinstance(node, ast.SetComp):
        return _read_all([node.elt])
    if isinstance(node, ast.Call):
        return _read_call(node, scope, depth)
    if isinstance(node, ast.BinOp) and isinstance(
        node.op, (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)
    ):
        left = read_elements(node.left, scope, depth - 1)
        right = read_elements(node.right, scope, depth - 1)
        if isinstance(node.op, ast.Sub):
            return left
        return left if left == right else (None if left is None or right is None else "unknown")
    if isinstance(node, ast.Name):
        return _read_bindings(node, scope, depth)
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ):
        return _read_attribute(node.attr, scope, depth)
    return None


def is_iterated(node: ast.AST, context: NodeContext) -> Literal["iterated", "popped"] | None:
    """Return whether a set expression is iterated or popped."""
    parent = context.parents[-1]
    if isinstance(parent, (ast.For, ast.comprehension)):
        return "iterated" if parent.iter is node else None
    if isinstance(parent, ast.Starred):
        outer = context.parents[-2]
        return None if isinstance(outer, ast.Set) else "iterated"
    if isinstance(parent, ast.YieldFrom):
        return "iterated"
    if isinstance(parent, ast.Call) and node is not parent.func:
        name = getattr(parent.func, "attr", getattr(parent.func, "id", ""))
        return "iterated" if name in _ORDERING else None
    if isinstance(parent, ast.Attribute) and parent.attr == "pop":
        call = context.parents[-2]
        called = isinstance(call, ast.Call) and not call.args and call.func is parent
        return "popped" if called else None
    return None


def has_one_element(node: ast.AST) -> bool:
    """Return whether a set is written with a single element."""
    if not isinstance(node, ast.Set):
        return False
    return len(node.elts) == 1 and not isinstance(node.elts[0], ast.Starred)


def is_alone(node: ast.AST, context: NodeContext) -> bool:
    """Return whether an enclosing or preceding test ensures a single element."""
    named = ast.dump(node)
    area = context.scope.node
    before = getattr(node, "lineno", 0)
    return any(
        isinstance(test, ast.Compare)
        and test.lineno <= before
        and isinstance(test.left, ast.Call)
        and getattr(test.left.func, "id", "") == "len"
        and [ast.dump(each) for each in test.left.args] == [named]
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value == 1
        for test in ast.walk(area)
    )


def _read_call(  # noqa: PLR0911 - one case for each kind of expression
    node: ast.Call, scope: Scope, depth: int
) -> Elements | None:
    if resolve(node.func, scope) in _MAKERS:
        if not node.args:
            return "unknown"
        given = node.args[0]
        if isinstance(given, (ast.GeneratorExp, ast.ListComp)):
            return _read_all([given.elt])
        if isinstance(given, (ast.List, ast.Tuple, ast.Set)):
            return _read_all(given.elts)
        if isinstance(given, ast.Constant):
            return "strings"
        name = getattr(given.func, "id", "") if isinstance(given, ast.Call) else ""
        if name == "range":
            return "numbers"
        if isinstance(given, ast.Call) and getattr(given.func, "attr", "") == "split":
            return "strings"
        return read_elements(given, scope, depth - 1) or "unknown"
    if isinstance(node.func, ast.Attribute) and node.func.attr in _SET_METHODS:
        return read_elements(node.func.value, scope, depth - 1)
    return None


def _read_bindings(node: ast.Name, scope: Scope, depth: int) -> Elements | None:
    found, where = scope.find(node.id)
    kinds: set[Elements | None] = set()
    for binding in found:
        if binding.kind == "assign" and binding.node is not None:
            if _is_annotation(binding.node, where):
                kinds.add("unknown")
            else:
                kinds.add(read_elements(binding.node, where, depth - 1))
        elif binding.kind == "parameter" and binding.node is not None:
            kinds.add("unknown" if _is_annotation(binding.node, where) else None)
        else:
            kinds.add(None)
    return _merge(kinds)


def _read_attribute(name: str, scope: Scope, depth: int) -> Elements | None:
    enclosing = scope.enclosing_class
    if enclosing is None:
        return None
    values = enclosing.attributes.get(name, [])
    return _merge({read_elements(value, scope, depth - 1) for value in values})


def _merge(kinds: set[Elements | None]) -> Elements | None:
    """Return the kind of a name with several bindings, all of which must be sets."""
    if not kinds or None in kinds:
        return None
    return kinds.pop() if len(kinds) == 1 else "unknown"


def _is_annotation(node: ast.AST, scope: Scope) -> bool:
    base = node.value if isinstance(node, ast.Subscript) else node
    return resolve(base, scope) in _TYPES


def _read_all(elements: Sequence[ast.AST]) -> Elements:
    kinds = {_read_element(element) for element in elements}
    if kinds <= {"numbers"}:
        return "numbers"
    return "strings" if "strings" in kinds else "unknown"


def _read_element(  # noqa: PLR0911 - one case for each kind of expression
    node: ast.AST,
) -> Elements:
    if isinstance(node, ast.Constant):
        return "strings" if isinstance(node.value, (str, bytes)) else "numbers"
    if isinstance(node, ast.JoinedStr):
        return "strings"
    if isinstance(node, ast.Tuple):
        return _read_all(node.elts)
    if isinstance(node, ast.UnaryOp):
        return _read_element(node.operand)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in _TEXTS:
            return "strings"
        if name in _NUMBERS:
            return "numbers"
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.FloorDiv)):
        return "numbers" if not isinstance(node.left, (ast.Constant, ast.JoinedStr)) else "strings"
    if isinstance(node, ast.Attribute) and node.attr in {"name", "stem", "suffix", "__name__"}:
        return "strings"
    return "unknown"
