"""Sets whose order is used, and the kinds of their elements."""

import ast
from collections.abc import Iterator, Sequence
from typing import Literal

from lightning_d9m.lint.checks.order_use import is_message, judge_order
from lightning_d9m.lint.tree import Call, Report, Scope, Tree, read_last_name, resolve

Elements = Literal["numbers", "strings", "unknown"]

_MAKERS = {"builtins.set", "builtins.frozenset"}
_SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}
_ORDERING = {
    "list", "tuple", "enumerate", "iter", "zip", "map", "filter", "reversed", "array",
    "fromiter", "tensor", "join", "extend", "fromkeys", "deque", "Series", "DataFrame",
    "shuffle", "sample", "choice", "tqdm", "chain", "cycle", "Index", "Subset", "DataLoader",
    "writelines", "as_tensor", "asarray",
}  # fmt: skip
_TYPES = {*_MAKERS, "typing.Set", "typing.FrozenSet"}
_TEXTS = {"str", "repr", "chr", "hex", "format", "basename", "strip", "lower", "upper", "split"}
_NUMBERS = {"range", "int", "len", "ord", "round", "arange"}
_MIXED = (
    "If its elements are strings, or hashed by address, the order of the set changes from run to "
    "run."
)
_DEPTH = 4


def check_set(node: ast.expr, tree: Tree) -> Iterator[Report]:
    """Find sets whose order decides the order of something else."""
    site = _find_iteration(node, tree)
    elements = read_elements(node, tree.scope[node]) if site else None
    if elements in {None, "numbers"} or _has_one_element(node, tree):
        return
    judged = None if is_message(node, tree) else judge_order(node, tree)
    if judged or site == "popped":
        texts = elements == "strings"
        # A loop that pops all elements of a set mostly treats them alike.
        picked = site == "popped" and not any(isinstance(o, ast.While) for o in tree.around(node))
        certain = texts and (picked or judged == "certain")
        reason = "" if texts else _MIXED
        ordered = texts and site == "iterated" and _has_order(node, tree.scope[node])
        edit = "sorted({})" if ordered else ""
        yield Report("D9M301", node, "certain" if certain else "depends", reason, edit=edit)


def _has_order(node: ast.expr, scope: Scope) -> bool:
    """Return whether elements can be sorted: a text and a number cannot."""
    for value in scope.list_values(node)[0]:
        match value:
            case ast.Set(elements) | ast.Call(
                _, [ast.List(elements) | ast.Tuple(elements) | ast.Set(elements)]
            ) if set(map(_read_element, elements)) != {"strings"}:
                return False
    return True


def check_set_call(call: Call) -> Iterator[Report]:
    """Find sets that a call makes; see :func:`check_set`."""
    return check_set(call.node, call.tree)


def _find_iteration(node: ast.expr, tree: Tree) -> Literal["iterated", "popped", ""]:
    """Return whether a set expression is iterated or popped."""
    parent = tree.parent[node]
    iterated = popped = False
    match parent:
        case ast.For(iter=values) | ast.comprehension(iter=values):
            iterated = values is node
        case ast.Starred():
            iterated = not isinstance(tree.parent[parent], ast.Set)
        case ast.YieldFrom():
            iterated = True
        case ast.Call(function) if node is not function:
            iterated = read_last_name(function) in _ORDERING
        case ast.Attribute(attr="pop"):
            call = tree.parent[parent]
            popped = isinstance(call, ast.Call) and not call.args and call.func is parent
    return "iterated" if iterated else "popped" if popped else ""


def _has_one_element(node: ast.expr, tree: Tree) -> bool:
    """Return whether a set is written with one element, or tested to have one before its use."""
    if isinstance(node, ast.Set):
        return len(node.elts) == 1 and not isinstance(node.elts[0], ast.Starred)
    written = ast.dump(node)
    for test in ast.walk(tree.scope[node].node):
        match test:
            case ast.Compare(
                ast.Call(ast.Name("len"), [measured]), comparators=[ast.Constant(1), *_]
            ) if test.lineno <= node.lineno and ast.dump(measured) == written:
                return True
    return False


def read_elements(  # noqa: C901 - one case for each kind of expression
    node: ast.AST, scope: Scope, depth: int = _DEPTH
) -> Elements | None:
    """Return the kind of a set's elements; None if the expression is not known to be a set."""
    found: Elements | None = None
    match node:
        case _ if depth == 0:
            pass
        case ast.Set(elements):
            found = _read_all(elements)
        case ast.SetComp(element):
            found = _read_all([element])
        case ast.Call(function, [given, *_]) if resolve(function, scope) in _MAKERS:
            found = _read_made(given, scope, depth)
        case ast.Call(function, []) if resolve(function, scope) in _MAKERS:
            found = "unknown"
        case ast.Call(ast.Attribute(value, method)) if method in _SET_METHODS:
            found = read_elements(value, scope, depth - 1)
        case ast.BinOp(left, ast.BitOr() | ast.BitAnd() | ast.BitXor(), right):
            found = _merge({read_elements(side, scope, depth - 1) for side in (left, right)})
        case ast.BinOp(left, ast.Sub()):
            found = read_elements(left, scope, depth - 1)
        case ast.Name():
            found = _read_bindings(node, scope, depth)
        case ast.Attribute(ast.Name("self"), name) if scope.enclosing_class is not None:
            values = scope.enclosing_class.attributes.get(name, [])
            found = _merge({read_elements(value, scope, depth - 1) for value in values})
    return found


def _read_made(given: ast.expr, scope: Scope, depth: int) -> Elements:
    """Return the kind of the elements of ``set(given)``."""
    match given:
        case ast.GeneratorExp(element) | ast.ListComp(element):
            return _read_all([element])
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            return _read_all(elements)
        case ast.Constant() | ast.Call(ast.Attribute(attr="split")):
            return "strings"
        case ast.Call(ast.Name("range")):
            return "numbers"
    return read_elements(given, scope, depth - 1) or "unknown"


def _read_bindings(node: ast.Name, scope: Scope, depth: int) -> Elements | None:
    found, where = scope.find(node.id)
    kinds: set[Elements | None] = set()
    for binding in found:
        kind: Elements | None = None
        if binding.kind in {"assign", "parameter"} and binding.node is not None:
            base = binding.node.value if isinstance(binding.node, ast.Subscript) else binding.node
            if resolve(base, where) in _TYPES:  # an annotation
                kind = "unknown"
            elif binding.kind == "assign":
                kind = read_elements(binding.node, where, depth - 1)
        kinds.add(kind)
    return _merge(kinds)


def _merge(kinds: set[Elements | None]) -> Elements | None:
    """Return the kind of several values, all of which must be sets."""
    if not kinds or None in kinds:
        return None
    return kinds.pop() if len(kinds) == 1 else "unknown"


def _read_all(elements: Sequence[ast.AST]) -> Elements:
    kinds = set(map(_read_element, elements))
    if kinds <= {"numbers"}:
        return "numbers"
    return "strings" if "strings" in kinds else "unknown"


def _read_element(node: ast.AST) -> Elements:
    found: Elements = "unknown"
    match node:
        case ast.Constant(value):
            found = "strings" if isinstance(value, (str, bytes)) else "numbers"
        case ast.JoinedStr():
            found = "strings"
        case ast.Tuple(elements):
            found = _read_all(elements)
        case ast.UnaryOp(operand=operand):
            found = _read_element(operand)
        case ast.Call(function) if (name := read_last_name(function)) in _TEXTS | _NUMBERS:
            found = "strings" if name in _TEXTS else "numbers"
        case ast.BinOp(left, ast.Mod() | ast.FloorDiv()):
            text = isinstance(left, (ast.Constant, ast.JoinedStr))
            found = "strings" if text else "numbers"
        case ast.Attribute(attr="name" | "stem" | "suffix" | "__name__"):
            found = "strings"
    return found
