"""Constants, kinds and call arguments of expressions, as far as the source shows them."""

import ast
from collections.abc import Sequence
from typing import Final, Literal

from lightning_d9m.lint.scopes import Scope, resolve

ValueKind = Literal["tensor", "cpu tensor", "other", "unknown"]


class _Unknown:
    """The value of an expression that the source does not show."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = _Unknown()

# Packages whose objects have methods with the same names as tensors.
_FOREIGN = [
    "asyncio",
    "cupy",
    "cv2",
    "dask",
    "jax",
    "keras",
    "matplotlib",
    "mxnet",
    "numba",
    "numpy",
    "os",
    "pandas",
    "plotly",
    "polars",
    "pyspark",
    "random",
    "re",
    "scipy",
    "seaborn",
    "sklearn",
    "statistics",
    "tensorflow",
    "xarray",
    "builtins",
    "itertools",
    "collections",
]
_FOREIGN_METHODS = {"numpy", "tolist", "item", "to_numpy", "to_pandas"}
_NO_TENSOR = (
    "torch.nn.",
    "torch.optim.",
    "torch.utils.",
    "torch.distributed.",
    "torch.distributions.",
    "torch.Generator",
    "torch.jit.",
    "torch.compile",
    "torch.cuda.",
    "torch.device",
    "torch.Size",
)
_DEPTH = 6


def read_constant(node: ast.AST | None, scope: Scope, depth: int = _DEPTH) -> object:
    """Return an expression's constant, through names that are bound once; otherwise UNKNOWN."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        values = [read_constant(element, scope, depth) for element in node.elts]
        return UNKNOWN if UNKNOWN in values else tuple(values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = read_constant(node.operand, scope, depth)
        return -value if isinstance(value, (int, float)) else UNKNOWN
    if isinstance(node, ast.Name) and depth:
        found, where = scope.find(node.id)
        if len(found) == 1 and found[0].kind == "assign":
            return read_constant(found[0].node, where, depth - 1)
    return UNKNOWN


def find_value(node: ast.AST, scope: Scope) -> ast.AST:
    """Return the value of a name that is bound once, or any other expression unchanged."""
    for _ in range(_DEPTH):
        if not isinstance(node, ast.Name):
            break
        found, scope = scope.find(node.id)
        if len(found) != 1 or found[0].kind != "assign" or found[0].node is None:
            break
        node = found[0].node
    return node


def list_values(node: ast.AST, scope: Scope) -> tuple[list[ast.AST], ast.AST]:
    """Return the possible values of an expression, and the node in which they are bound."""
    if isinstance(node, ast.Name):
        found, where = scope.find(node.id)
        return [binding.node for binding in found if binding.kind == "assign" and binding.node], (
            where.node
        )
    enclosing = scope.enclosing_class
    if isinstance(node, ast.Attribute) and enclosing is not None:
        return enclosing.attributes.get(node.attr, []), enclosing.node
    return [node], scope.node


def read_kind(  # noqa: PLR0911 - one case for each kind of expression
    node: ast.AST | None, scope: Scope, depth: int = _DEPTH
) -> ValueKind:
    """Return the kind of an expression's value."""
    if depth == 0 or node is None:
        return "unknown"
    if isinstance(node, ast.Name):
        return _kind_of_name(node, scope, depth)
    if isinstance(node, ast.Call):
        return _kind_of_call(node, scope, depth)
    if isinstance(node, ast.Attribute):
        name = resolve(node, scope)
        if name is not None:
            return "other"
        return (
            read_kind(node.value, scope, depth - 1)
            if node.attr in {"T", "data", "grad"}
            else "unknown"
        )
    if isinstance(node, ast.BinOp):
        kinds = {read_kind(side, scope, depth - 1) for side in (node.left, node.right)}
        return "tensor" if "tensor" in kinds else "unknown"
    if isinstance(node, ast.Subscript):
        return read_kind(node.value, scope, depth - 1)
    literal = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.JoinedStr, ast.ListComp)
    return "other" if isinstance(node, literal) else "unknown"


def _kind_of_name(node: ast.Name, scope: Scope, depth: int) -> ValueKind:
    found, where = scope.find(node.id)
    for binding in found:
        if binding.kind == "import":
            return "other"
        if binding.kind == "parameter" and binding.node is not None:
            name = _annotated(binding.node, where) or ""
            return "tensor" if name == "torch.Tensor" else _kind_of_package(name)
        if binding.kind == "assign":
            kind = read_kind(binding.node, where, depth - 1)
            if kind != "unknown":
                return kind
    return "unknown"


def _annotated(node: ast.AST, scope: Scope) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return None
    return resolve(node, scope)


def _kind_of_call(node: ast.Call, scope: Scope, depth: int) -> ValueKind:
    name = resolve(node.func, scope)
    if name is not None:
        if name.startswith("torch."):
            if name.startswith("torch.nn.functional.") or name == "torch.nn.Parameter":
                return "tensor"
            return "other" if name.startswith(_NO_TENSOR) else "tensor"
        return _kind_of_package(name)
    if isinstance(node.func, ast.Attribute):
        if node.func.attr in _FOREIGN_METHODS:
            return "other"
        kind = read_kind(node.func.value, scope, depth - 1)
        return "cpu tensor" if node.func.attr == "cpu" and kind != "other" else kind
    return "unknown"


def _kind_of_package(name: str) -> ValueKind:
    return "other" if name.partition(".")[0] in _FOREIGN else "unknown"


class Arguments:
    """The arguments of a call, by position and name.

    Args:
        call: The call.
        scope: The scope of the call.
        skipped: Number of leading positional arguments that are not the function's: 1 for
            ``functools.partial``; -1 for a method, whose receiver is the first argument.
    """

    def __init__(self, call: ast.Call, scope: Scope, skipped: int = 0) -> None:
        self.call = call
        self.scope = scope
        self.positional: Sequence[ast.expr] = call.args[max(skipped, 0) :]
        self._before = -min(skipped, 0)
        self.starred = any(isinstance(argument, ast.Starred) for argument in self.positional)
        self.named = {word.arg: word.value for word in call.keywords if word.arg is not None}
        self.unpacked = any(word.arg is None for word in call.keywords)

    def get(self, position: int | None, *names: str) -> ast.AST | None:
        """Return an argument's expression; None if it is not given, or hidden by unpacking."""
        for name in names:
            if name in self.named:
                return self.named[name]
        index = -1 if position is None else position - self._before
        if 0 <= index < len(self.positional) and not self.starred:
            return self.positional[index]
        return None

    def read(self, position: int | None, *names: str, default: object = None) -> object:
        """Return an argument's constant, its default if it is not given, or UNKNOWN."""
        given = self.get(position, *names)
        if given is not None:
            return read_constant(given, self.scope)
        hidden = self.unpacked or (self.starred and position is not None)
        return UNKNOWN if hidden else default

    def has(self, position: int | None, *names: str) -> bool | None:
        """Return whether an argument other than None is given; None if that is unknown."""
        value = self.read(position, *names)
        if value is not UNKNOWN:
            return value is not None
        return None if self.get(position, *names) is None else True
