"""A walk of a syntax tree along the lines that may hold findings."""

import ast
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_d9m.lint.rules import Certainty
from lightning_d9m.lint.scopes import (
    FUNCTION_NODES,
    SCOPES,
    Binding,
    Function,
    Scope,
    read_last_name,
    resolve,
)

_LEAVES = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.Constant)
_DECORATED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class ReportFinding:
    """A finding of a check at a node. Empty texts stand for the rule's texts."""

    rule: str
    node: ast.AST
    certainty: Certainty = "certain"
    reason: str = ""
    fix: str = ""
    op: str = ""


@dataclass
class NodeContext:
    """The position of the walk.

    Attributes:
        parents: The nodes around the current one, the nearest last.
        scope: The innermost scope.
    """

    parents: list[ast.AST] = field(default_factory=list)
    scope: Scope = field(default_factory=lambda: Scope(ast.Module([], []), None, ""))

    _last: tuple[ast.AST | None, str | None] = (None, None)

    def resolve(self, node: ast.AST | None) -> str | None:
        """Return the full name of an expression's value at this position."""
        # Every check of a call resolves the same function.
        if node is not self._last[0] or node is None:
            self._last = (node, resolve(node, self.scope))
        return self._last[1]

    def find_enclosing(self, *kinds: type[ast.AST]) -> ast.AST | None:
        """Return the innermost enclosing node of some kinds."""
        return next((node for node in reversed(self.parents) if isinstance(node, kinds)), None)

    def find_area(self, target: ast.AST | None) -> tuple[ast.AST | None, str]:
        """Return where an assigned name or attribute is followed, and its name.

        A ``name`` is followed in its scope, ``self.name`` in its class.

        Returns:
            None for any other expression.
        """
        if isinstance(target, ast.Name):
            return self.scope.node, target.id
        enclosing = self.scope.enclosing_class
        if isinstance(target, ast.Attribute) and enclosing is not None:
            return enclosing.node, target.attr
        return None, ""

    def find_function(self, node: ast.AST) -> Function | None:
        """Return the definition of a function: a lambda, by name, or a method by ``self.name``."""
        if isinstance(node, ast.Lambda):
            return node
        found: Sequence[Binding] = ()
        enclosing = self.scope.enclosing_class
        if isinstance(node, ast.Name):
            found, _ = self.scope.find(node.id)
        elif isinstance(node, ast.Attribute) and read_last_name(node.value) == "self" and enclosing:
            found = enclosing.bindings.get(node.attr, ())
        return next((entry.node for entry in found if isinstance(entry.node, FUNCTION_NODES)), None)


Check: TypeAlias = Callable[[ast.AST, NodeContext], Iterator[ReportFinding]]


def walk_whole(
    area: ast.AST, skipped: ast.AST | None = None
) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """Yield each node of an area with the nodes around it, the nearest last.

    Of ``skipped`` no child is yielded.
    """
    stack: list[tuple[ast.AST, list[ast.AST]]] = [(area, [])]
    while stack:
        node, parents = stack.pop()
        yield node, parents
        if node is not skipped:
            inner = [*parents, node]
            stack.extend((child, inner) for child in ast.iter_child_nodes(node))


def walk(
    tree: ast.Module,
    lines: Sequence[int],
    checks: Mapping[type[ast.AST], Sequence[Check]],
    package: str,
) -> list[ReportFinding]:
    """Run checks on all nodes that touch some lines, whose numbers ascend."""
    context = NodeContext()
    context.scope = Scope(tree, None, package)
    found: list[ReportFinding] = []
    _descend(tree, context, lines, checks, found)
    return found


def _descend(
    node: ast.AST,
    context: NodeContext,
    lines: Sequence[int],
    checks: Mapping[type[ast.AST], Sequence[Check]],
    found: list[ReportFinding],
) -> None:
    for check in checks.get(type(node), ()):
        found.extend(check(node, context))
    outer = context.scope
    opens = isinstance(node, SCOPES) and not isinstance(node, ast.Module)
    inner = Scope(node, outer, outer.package) if opens else outer
    context.parents.append(node)
    for name in node._fields:
        value = getattr(node, name, None)
        # Decorators, defaults and bases are evaluated in the outer scope.
        context.scope = inner if name == "body" else outer
        if isinstance(value, list):
            for child in value:
                if isinstance(child, ast.AST) and _touches(child, lines):
                    _descend(child, context, lines, checks, found)
        elif (
            isinstance(value, ast.AST) and not isinstance(value, _LEAVES) and _touches(value, lines)
        ):
            _descend(value, context, lines, checks, found)
    context.parents.pop()
    context.scope = outer


def _touches(node: ast.AST, lines: Sequence[int]) -> bool:
    first = getattr(node, "lineno", 0)
    if not first:
        return True
    if isinstance(node, _DECORATED) and node.decorator_list:
        first = node.decorator_list[0].lineno
    index = bisect_left(lines, first)
    return index < len(lines) and lines[index] <= (node.end_lineno or first)  # type: ignore[attr-defined] # has lines
