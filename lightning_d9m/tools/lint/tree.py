"""The syntax tree of a module: the parent, scope and full name of each node, and its values.

A name is followed through imports, aliases and assignments of the same file.
"""

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypeAlias

from lightning_d9m.text import read_stanzas
from lightning_d9m.tools.lint.rules import Certainty

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
ValueKind = Literal["tensor", "cpu tensor", "other", "unknown"]

_SCOPES = (*FUNCTION_NODES, ast.ClassDef)
_OTHER_NODES = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.JoinedStr, ast.ListComp)
# Python has one object for all uses of such a node, so it has no single parent.
_LEAVES = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
# Longest chain of aliases or values that is followed.
_DEPTH = 8

# Each pattern is a second path by which torch or Lightning exports the same objects.
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^torch\.nn\.modules\.\w+\.", "torch.nn."),
        (r"^torch\.nn\.modules\.(?=[A-Z])", "torch.nn."),
        (r"^torch\.functional\.", "torch."),
        (r"^torch\.(?:_C\._nn|_C\._VariableFunctions|_VF)\.", "torch."),
        (r"^torch\.(?:_tensor|nn\.parameter)\.Tensor\b", "torch.Tensor"),
        (r"^torch\.utils\.data\.(?:dataloader|dataset)\.", "torch.utils.data."),
        (r"^torch\.random\.(?=manual_seed|seed$)", "torch."),
        (r"^(?:pytorch_lightning|lightning\.pytorch|lightning_fabric|lightning\.fabric)\b",
         "lightning"),
        (r"^lightning\.(?:[a-z_]+\.)*(?=Trainer$|Fabric$|seed_everything$)", "lightning."),
    )
)  # fmt: skip
NAMES = {
    name: frozenset(" ".join(words).split())
    for stanza in read_stanzas(Path(__file__).with_name("names.txt"))
    for name, words in stanza.items()
}
"""The sets of names that checks look for."""
UNKNOWN: Final = object()
"""The value of an expression that the source does not show."""


@dataclass(frozen=True)
class Report:
    """A finding of a check at a node. Empty texts stand for the rule's texts.

    ``edit`` is code to write in the place of the node, with ``{}`` for its own code; empty if there
    is more than one right answer.
    """

    rule: str
    node: ast.AST
    certainty: Certainty = "certain"
    reason: str = ""
    fix: str = ""
    op: str = ""
    edit: str = ""


@dataclass(frozen=True)
class Binding:
    """A binding of a name.

    ``node`` is the value of an assignment, the annotation of a parameter, or the definition;
    ``name`` is the full name of an import.
    """

    kind: Literal["import", "assign", "parameter", "definition", "other"]
    node: ast.AST | None = None
    name: str = ""


class Scope:
    """A module, class or function: its bindings, and the values that a class's methods store.

    Attributes:
        node: The module, class or function.
        parent: The scope around it.
        bindings: By name.
        attributes: Of a class: the values that are assigned to an attribute, by its name.
        stars: The modules all of whose names are imported.
        enclosing_class: The class that the innermost method belongs to.
    """

    def __init__(self, node: ast.AST, parent: "Scope | None" = None) -> None:
        self.node, self.parent = node, parent
        self.bindings: dict[str, list[Binding]] = defaultdict(list)
        self.attributes: dict[str, list[ast.AST]] = defaultdict(list)
        self.stars: list[str] = []
        # A function within a method has the same self.
        above = None if parent is None else parent.enclosing_class
        self.enclosing_class: Scope | None = self if isinstance(node, ast.ClassDef) else above
        if isinstance(node, FUNCTION_NODES):
            for part in ast.iter_child_nodes(node.args):
                if isinstance(part, ast.arg):
                    self.bindings[part.arg].append(Binding("parameter", part.annotation))

    def find(self, name: str) -> tuple[list[Binding], "Scope"]:
        """Return the visible bindings of a name and their scope; without any, [] and the module."""
        scope: Scope = self
        while True:
            # Names of a class body are not visible in its methods, as in Python.
            hidden = scope is not self and isinstance(scope.node, ast.ClassDef)
            if not hidden and (found := scope.bindings.get(name)):
                return found, scope
            if scope.parent is None:
                return [], scope
            scope = scope.parent

    def follow(self, target: ast.AST | None) -> tuple[list[ast.AST], ast.AST | None, str]:
        """Return the possible values of an expression, where it is used, and its name there.

        A name is followed in its scope, ``self.name`` in its class, anything else nowhere.
        """
        enclosing = self.enclosing_class
        match target:
            case ast.Name(name):
                found, where = self.find(name)
                values = [one.node for one in found if one.kind == "assign" and one.node]
                return values, where.node, name
            case ast.Attribute(attr=name) if enclosing is not None:
                return enclosing.attributes.get(name, []), enclosing.node, name
        return [] if target is None else [target], None, ""

    def find_function(self, node: ast.AST) -> Function | None:
        """Return the definition of a function: a lambda, by name, or a method by ``self.name``."""
        enclosing = self.enclosing_class
        found: list[Binding] = []
        match node:
            case ast.Lambda():
                return node
            case ast.Name(name):
                found, _ = self.find(name)
            case ast.Attribute(ast.Name("self") | ast.Attribute(attr="self"), name) if enclosing:
                found = enclosing.bindings.get(name, [])
        return next((entry.node for entry in found if isinstance(entry.node, FUNCTION_NODES)), None)


class Tree:
    """The nodes of a module in the order of the source.

    Attributes:
        nodes: All nodes but operators.
        parent: The parent of each node.
        scope: The innermost scope of each node; decorators and defaults belong to the outer one.
    """

    def __init__(self, module: ast.Module) -> None:
        self.nodes: list[ast.AST] = []
        self.parent: dict[ast.AST, ast.AST] = {}
        self.scope: dict[ast.AST, Scope] = {}
        # A stack in place of recursion: generated code is nested more deeply than Python's
        # recursion limit allows.
        waiting: list[tuple[ast.AST, Scope]] = [(module, Scope(module))]
        while waiting:
            node, scope = waiting.pop()
            self.nodes.append(node)
            self.scope[node] = scope
            self._bind(node, scope)
            # Decorators, defaults and annotations are evaluated outside of the scope that they
            # belong to.
            inner = Scope(node, scope) if isinstance(node, _SCOPES) else scope
            children: list[tuple[ast.AST, Scope]] = []
            for name, value in ast.iter_fields(node):
                for child in value if isinstance(value, list) else (value,):
                    if isinstance(child, ast.AST) and not isinstance(child, _LEAVES):
                        self.parent[child] = node
                        children.append((child, inner if name == "body" else scope))
            # The last one is taken first, so nodes come in the order of the source.
            waiting += reversed(children)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        """Note what a node binds in its scope, or stores in an attribute of its class."""
        match node:
            case ast.Import(aliases):
                for alias in aliases:
                    # `import a.b` binds a, and `import a.b as c` binds a.b.
                    top = alias.name if alias.asname else alias.name.partition(".")[0]
                    scope.bindings[alias.asname or top].append(Binding("import", name=top))
            case ast.ImportFrom(module, aliases, level):
                # A relative import is of the program's own modules, which are not read.
                source = "." * (level or 0) + (module or "")
                scope.stars += [source for alias in aliases if alias.name == "*"]
                for alias in aliases:
                    found = Binding("import", name=f"{source}.{alias.name}")
                    scope.bindings[alias.asname or alias.name].append(found)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                scope.bindings[name].append(Binding("definition", node))
            case ast.Name(name, ast.Store()):
                value, statement = self._find_stored(node)
                # A variable of a comprehension is not visible outside of it.
                if not isinstance(statement, ast.comprehension):
                    kind: Literal["assign", "other"] = "other" if value is None else "assign"
                    scope.bindings[name].append(Binding(kind, value))
            case ast.Attribute(attr=name, ctx=ast.Store()) if scope.enclosing_class is not None:
                value, statement = self._find_stored(node)
                if value is not None and getattr(statement, "value", None) is not None:
                    scope.enclosing_class.attributes[name].append(value)

    def _find_stored(self, target: ast.AST) -> tuple[ast.AST | None, ast.AST]:
        """Return the value that a target is given, None if it is not written, and by what."""
        outer = self.parent[target]
        match outer:
            case (
                ast.Assign(value=value)
                | ast.AnnAssign(value=ast.expr() as value)
                | ast.AnnAssign(annotation=value)
            ):
                return value, outer
            case ast.Tuple(targets) | ast.List(targets):
                whole, statement = self._find_stored(outer)
                values = whole.elts if isinstance(whole, (ast.Tuple, ast.List)) else []
                # A starred target or value shifts the others.
                paired = len(values) == len(targets)
                return values[targets.index(target)] if paired else None, statement  # type: ignore[arg-type] # it is one of them
            case ast.Starred():
                return None, self._find_stored(outer)[1]
        return None, outer

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the nearest first."""
        while (found := self.parent.get(node)) is not None:
            yield found
            node = found

    def find_uses(
        self, target: ast.AST | None, scope: Scope, skipped: ast.AST | None = None
    ) -> list[ast.AST]:
        """Return the loads of a target of a scope, without those within ``skipped``."""
        _, area, key = scope.follow(target)
        return [
            node
            for node in (() if area is None else ast.walk(area))
            if isinstance(getattr(node, "ctx", None), ast.Load)
            and is_named(node, key)
            and (skipped is None or skipped not in self.around(node))
        ]


class Call:
    """A call: its name, its receiver, and its arguments by position and name.

    Args:
        node: The call.
        tree: Its module.
        shift: Added to the position of an argument: 1 for ``functools.partial``; -1 for a method,
            whose receiver is the first argument.
        owned: Whether its receiver is known to be a tensor, or it is not a method.

    Attributes:
        name: The full name of the function; empty if it is not known.
        method: The name of a method of an unknown object; otherwise empty.
        receiver: Its object.
        starred: Whether positional arguments are unpacked.
        unpacked: Whether named arguments are unpacked.
    """

    def __init__(self, node: ast.Call, tree: Tree, shift: int = 0, owned: bool = True) -> None:
        self.node, self.tree, self.scope = node, tree, tree.scope[node]
        self.parent = tree.parent[node]
        self.name = resolve(node.func, self.scope)
        # A name that resolves is a function, or a method of a known class; otherwise only its last
        # part is known.
        self.method, self.receiver = "", None
        if not self.name and isinstance(node.func, ast.Attribute):
            self.method, self.receiver = node.func.attr, node.func.value
        self.shift, self.owned = shift, owned
        self.positional = node.args[max(shift, 0) :]
        self.named = {word.arg: word.value for word in node.keywords if word.arg is not None}
        self.starred = any(isinstance(argument, ast.Starred) for argument in self.positional)
        self.unpacked = any(word.arg is None for word in node.keywords)

    def get(self, position: int | None, *names: str) -> ast.expr | None:
        """Return an argument's expression; None if it is not given, or hidden by unpacking."""
        for name in names:
            if name in self.named:
                return self.named[name]
        index = -1 if position is None else position + min(self.shift, 0)
        fits = 0 <= index < len(self.positional) and not self.starred
        return self.positional[index] if fits else None

    def read(self, position: int | None, *names: str, default: object = None) -> object:
        """Return an argument's constant, its default if it is not given, or UNKNOWN."""
        given = self.get(position, *names)
        if given is not None:
            return read_constant(given, self.scope)
        # An argument may be among those that are unpacked, so its absence says nothing.
        hidden = self.unpacked or (self.starred and position is not None)
        return UNKNOWN if hidden else default


@cache
def canonical(name: str) -> str:
    """Return a single name for objects that torch and Lightning export under several names.

    >>> canonical("torch.nn.modules.pooling.AvgPool3d"), canonical("pytorch_lightning.Trainer")
    ('torch.nn.AvgPool3d', 'lightning.Trainer')
    """
    for pattern, replacement in _REWRITES:
        name = pattern.sub(replacement, name)
    return name


def resolve(node: ast.AST | None, scope: Scope, depth: int = _DEPTH) -> str:
    """Return the full name of an expression's value, such as ``torch.nn.Conv2d``.

    It is empty where it cannot be read: a parameter, the result of a call, a local definition.
    """
    if isinstance(node, ast.Attribute):
        base = resolve(node.value, scope, depth)
        return canonical(f"{base}.{node.attr}") if base else ""
    if not isinstance(node, ast.Name) or depth == 0:
        return ""
    found, where = scope.find(node.id)
    for binding in found:
        if binding.kind == "import":
            return canonical(binding.name)
        if binding.kind == "assign" and (name := resolve(binding.node, where, depth - 1)):
            return name
    if found or hasattr(builtins, node.id):
        # A local definition hides a built-in function.
        return "" if found else f"builtins.{node.id}"
    # The search for an unbound name ends in the module.
    stars = [star for star in where.stars if star.partition(".")[0] in {"torch", "lightning"}]
    return canonical(f"{stars[-1]}.{node.id}") if stars else ""


def read_last_name(node: ast.AST) -> str:
    """Return the last name of ``a.b.c`` or ``c``; an empty string for any other expression."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def is_named(node: ast.AST, key: str) -> bool:
    """Return whether a node is a name, or an attribute of any object, with this name."""
    return isinstance(node, (ast.Name, ast.Attribute)) and read_last_name(node) == key


def mentions(node: ast.AST, names: Iterable[str]) -> bool:
    """Return whether one of some names occurs in an expression."""
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def find_value(node: ast.AST, scope: Scope) -> tuple[ast.AST, Scope]:
    """Follow a name that is bound once, by an assignment; return its value and that one's scope."""
    # Of several bindings the source does not say which one counts. `x = x` would be followed
    # without an end.
    for _ in range(_DEPTH):
        found, where = scope.find(node.id) if isinstance(node, ast.Name) else ([], scope)
        if len(found) != 1 or found[0].kind != "assign" or found[0].node is None:
            break
        node, scope = found[0].node, where
    return node, scope


def read_constant(node: ast.AST | None, scope: Scope, depth: int = _DEPTH) -> object:
    """Return an expression's constant, through names that are bound once; otherwise UNKNOWN."""
    value, scope = (None, scope) if node is None or not depth else find_value(node, scope)
    match value:
        case ast.Constant(constant):
            return constant
        case ast.Tuple(elements) | ast.List(elements):
            values = [read_constant(element, scope, depth - 1) for element in elements]
            return UNKNOWN if UNKNOWN in values else tuple(values)
        case ast.UnaryOp(ast.USub(), operand):
            number = read_constant(operand, scope, depth - 1)
            return -number if isinstance(number, (int, float)) else UNKNOWN
    return UNKNOWN


def read_kind(  # noqa: C901, PLR0912 - one case for each kind of expression
    node: ast.AST | None, scope: Scope, depth: int = _DEPTH
) -> ValueKind:
    """Return the kind of an expression's value."""
    kind: ValueKind = "unknown"
    match node:
        case _ if depth == 0:
            pass
        case ast.Name(name):
            found, where = scope.find(name)
            for binding in found:
                if binding.kind == "import":
                    return "other"
                if binding.kind == "parameter" and binding.node is not None:
                    annotated = resolve(binding.node, where)
                    return "tensor" if annotated == "torch.Tensor" else _read_package(annotated)
                if binding.kind == "assign":
                    kind = read_kind(binding.node, where, depth - 1)
                    if kind != "unknown":
                        break
        case ast.Call(function):
            name = resolve(function, scope)
            if name.startswith("torch."):
                # Most of torch.nn makes modules.
                made = name.startswith("torch.nn.functional.") or name == "torch.nn.Parameter"
                return "other" if name.startswith(tuple(NAMES["other"])) and not made else "tensor"
            if name or not isinstance(function, ast.Attribute):
                return _read_package(name)
            if function.attr in NAMES["foreign methods"]:
                return "other"
            kind = read_kind(function.value, scope, depth - 1)
            if function.attr == "cpu" and kind != "other":
                kind = "cpu tensor"
        case ast.Attribute() if resolve(node, scope):
            kind = "other"
        case _ if isinstance(node, _OTHER_NODES):
            kind = "other"
    return kind


def _read_package(name: str) -> ValueKind:
    return "other" if name.partition(".")[0] in NAMES["foreign"] else "unknown"
