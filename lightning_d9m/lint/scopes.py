"""Name resolution: imports, aliases and assignments, by scope."""

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTION_NODES, ast.ClassDef, ast.Module)

# Longest chain of aliases that is followed.
_DEPTH = 8

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
        (
            r"^(?:pytorch_lightning|lightning\.pytorch|lightning_fabric|lightning\.fabric)\b",
            "lightning",
        ),
        (r"^lightning\.(?:[a-z_]+\.)*(?=Trainer$|Fabric$|seed_everything$)", "lightning."),
    )
)


@dataclass(frozen=True)
class Binding:
    """A binding of a name.

    Attributes:
        kind: How.
        name: The full name, for an import.
        node: The value of an assignment, the annotation of a parameter, or the definition.
    """

    kind: Literal["import", "assign", "parameter", "definition", "other"]
    name: str = ""
    node: ast.AST | None = None


class Scope:
    """A module, class or function with its bindings, which are read at their first use."""

    def __init__(self, node: ast.AST, parent: "Scope | None", package: str) -> None:
        self.node = node
        self.parent = parent
        self.package = package
        self.stars: list[str] = []
        self._bindings: dict[str, list[Binding]] | None = None
        self._attributes: dict[str, list[ast.AST]] | None = None

    @property
    def bindings(self) -> dict[str, list[Binding]]:
        """The bindings of the scope, by name."""
        if self._bindings is None:
            self._bindings = defaultdict(list)
            for name, binding in self._read(self.node):
                self._bindings[name].append(binding)
        return self._bindings

    @property
    def attributes(self) -> dict[str, list[ast.AST]]:
        """The values that a class's methods assign to attributes, by attribute."""
        if self._attributes is None:
            self._attributes = defaultdict(list)
            for node in ast.walk(self.node):
                if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        if isinstance(target, ast.Attribute):
                            self._attributes[target.attr].append(node.value)
        return self._attributes

    def find(self, name: str) -> tuple[list[Binding], "Scope"]:
        """Return the visible bindings of a name and their scope; without any, [] and the module."""
        scope: Scope = self
        while True:
            skipped = scope is not self and isinstance(scope.node, ast.ClassDef)
            if not skipped and (found := scope.bindings.get(name)):
                return found, scope
            if scope.parent is None:
                return [], scope
            scope = scope.parent

    @property
    def enclosing_class(self) -> "Scope | None":
        """The scope of the class that the innermost method belongs to."""
        scope: Scope | None = self
        while scope is not None and not isinstance(scope.node, ast.ClassDef):
            scope = scope.parent
        return scope

    def _read(self, node: ast.AST) -> Iterator[tuple[str, Binding]]:
        if isinstance(node, FUNCTION_NODES):
            arguments = node.args
            for argument in (
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
                *filter(None, (arguments.vararg, arguments.kwarg)),
            ):
                yield argument.arg, Binding("parameter", node=argument.annotation)
        if not isinstance(node, ast.Lambda):
            yield from self._read_body(node.body)  # type: ignore[attr-defined] # all others have one

    def _read_body(  # noqa: C901 - one case for each kind of statement
        self, body: Iterable[ast.AST]
    ) -> Iterator[tuple[str, Binding]]:
        for statement in body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                yield from self._read_import(statement)
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    yield from _read_target(target, statement.value)
            elif isinstance(statement, ast.AnnAssign):
                yield from _read_target(statement.target, statement.value or statement.annotation)
            elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield statement.name, Binding("definition", node=statement)
            elif isinstance(statement, ast.AugAssign):
                yield from _read_target(statement.target, None)
            else:
                for target in (
                    getattr(statement, "target", None),
                    *(item.optional_vars for item in getattr(statement, "items", ())),
                ):
                    if target is not None:
                        yield from _read_target(target, None)
                for block in ("body", "orelse", "finalbody", "handlers", "cases"):
                    yield from self._read_body(getattr(statement, block, ()))

    def _read_import(self, statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Binding]]:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, Binding("import", alias.name if alias.asname else top)
            return
        module = statement.module or ""
        if statement.level:
            parts = self.package.split(".")
            base = ".".join(parts[: len(parts) - statement.level + 1])
            module = f"{base}.{module}".strip(".")
        for alias in statement.names:
            if alias.name == "*":
                self.stars.append(module)
            else:
                yield alias.asname or alias.name, Binding("import", f"{module}.{alias.name}")


def _read_target(target: ast.AST, value: ast.AST | None) -> Iterator[tuple[str, Binding]]:
    if isinstance(target, ast.Name):
        yield target.id, Binding("assign", node=value) if value else Binding("other")
    elif isinstance(target, (ast.Tuple, ast.List)):
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        paired = len(values) == len(target.elts)
        for index, element in enumerate(target.elts):
            yield from _read_target(element, values[index] if paired else None)
    elif isinstance(target, ast.Starred):
        yield from _read_target(target.value, None)


def resolve(  # noqa: PLR0911 - one case for each kind of binding
    node: ast.AST | None, scope: Scope, depth: int = _DEPTH
) -> str | None:
    """Return the full name of an expression's value, such as ``torch.nn.Conv2d``.

    Returns:
        None where it cannot be read: a parameter, the result of a call, a local definition.
    """
    if isinstance(node, ast.Attribute):
        base = resolve(node.value, scope, depth)
        return None if base is None else canonical(f"{base}.{node.attr}")
    if not isinstance(node, ast.Name) or depth == 0:
        return None
    found, where = scope.find(node.id)
    for binding in found:
        if binding.kind == "import":
            return canonical(binding.name)
        if binding.kind == "assign" and (name := resolve(binding.node, where, depth - 1)):
            return name
    if found:
        return None
    if hasattr(builtins, node.id):
        return f"builtins.{node.id}"
    # The search for an unbound name ends in the module.
    stars = [star for star in where.stars if star.partition(".")[0] in {"torch", "lightning"}]
    return canonical(f"{stars[-1]}.{node.id}") if stars else None


def read_last_name(node: ast.AST) -> str:
    """Return the last name of ``a.b.c`` or ``c``; an empty string for any other expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def canonical(name: str) -> str:
    """Return a single name for objects that torch and Lightning export under several names.

    >>> canonical("torch.nn.modules.pooling.AvgPool3d"), canonical("pytorch_lightning.Trainer")
    ('torch.nn.AvgPool3d', 'lightning.Trainer')
    """
    for pattern, replacement in _REWRITES:
        name = pattern.sub(replacement, name)
    return name
