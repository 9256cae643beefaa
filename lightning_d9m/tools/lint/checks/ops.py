"""Calls of the catalog's ops, and the conditions under which they vary.

A condition is a function here, which ``calls.txt`` names without its underscore. It gets a call and
the words of its line there. It returns the catalog's name of the op that the call runs, or None
where the source shows that the call is deterministic, by modes, dtypes, sizes and which results are
used.
What it finds always depends: the source shows neither the device nor who needs the gradient.
"""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightning_d9m.ops.patches.catalog.catalog import FlagEffect, Op, find_op
from lightning_d9m.text import read_stanzas
from lightning_d9m.tools.lint.rules import RULES
from lightning_d9m.tools.lint.tree import (
    NAMES,
    UNKNOWN,
    Call,
    Report,
    Scope,
    Tree,
    find_value,
    read_constant,
    read_kind,
    read_last_name,
    resolve,
)

# A condition with the op and its other words in ``calls.txt``.
Condition: TypeAlias = tuple[Callable[..., str | None], list[Any]]

_PREFIXES = {"nn": "torch.nn", "F": "torch.nn.functional", "Tensor": "torch"}
_INTERPOLATIONS = {
    "linear": "upsample_linear1d_backward",
    "bilinear": "upsample_bilinear2d_backward",
    "bicubic": "upsample_bicubic2d_backward",
    "trilinear": "upsample_trilinear3d_backward",
}
_DEPTH = 8  # of expressions that are followed; `x = x.float()` would have no end
_RULES = {
    FlagEffect.RAISES: "D9M101",
    FlagEffect.NONE: "D9M102",
    FlagEffect.SWITCHES: "D9M103",
    FlagEffect.DECOMPOSES: "D9M103",
    FlagEffect.OUT_OF_REACH: "D9M104",
}


def rule_of(op: Op) -> str:
    """Return the id of the rule that finds an op; an op that never varies has none."""
    # The source does not show shapes. With the flag on, torch raises where the op varies.
    return "D9M103" if op.name in NAMES["by shape"] else _RULES[op.flag_effect]


def check_op(call: Call) -> Iterator[Report]:
    """Find a call of an op of the catalog."""
    name = call.name
    if name == "functools.partial" and call.node.args:
        name = resolve(call.node.args[0], call.scope)
        call = Call(call.node, call.tree, shift=1)
    conditions: Sequence[Condition] = FUNCTIONS.get(name, ())
    # A method may be called on an object, or by its full name on the class.
    if call.receiver is not None or (not conditions and name.startswith("torch.Tensor.")):
        method = METHODS.get(call.method or name.removeprefix("torch.Tensor."))
        conditions = () if method is None else (method,)
    if conditions and call.receiver is not None:
        kind = read_kind(call.receiver, call.scope)
        base = call.receiver.func if isinstance(call.receiver, ast.Call) else call.receiver
        # A method of that name of the program itself, or of an object that is not a tensor.
        if kind == "other" or read_last_name(base) in {"self", "cls", "super"}:
            return
        call = Call(call.node, call.tree, shift=-1, owned=kind != "unknown")
    # A module may run several ops, such as a convolution and its padding.
    for condition, given in conditions:
        found = condition(call, *given)
        if found is not None and not _is_spared(found, call, name):
            op, reason, fix = explain_op(found)
            yield Report(rule_of(op), call.node, "depends", reason, fix, op.name)


def _is_spared(op: str, call: Call, name: str) -> bool:
    """Return whether a call cannot vary: on a CPU, or without a gradient."""
    first = call.receiver or next(iter(call.node.args), None)
    # The catalog describes CUDA; on a CPU most of these ops have a fixed order.
    if op not in NAMES["on cpu too"] and read_kind(first, call.scope) == "cpu tensor":
        return True
    # A call that makes a module runs no op itself, and the module trains.
    if not op.endswith("_backward") or name.rpartition(".")[2][:1].isupper():
        return False
    match first:  # a new tensor has no gradient
        case ast.Call(function, keywords=words) if read_last_name(function) in NAMES["makers"]:
            if not any(word.arg == "requires_grad" for word in words):
                return True
    return _is_without_gradient(call.node, call.tree)


def _is_without_gradient(node: ast.AST, tree: Tree) -> bool:
    """Return whether a node is in code that turns gradients off."""
    for parent in tree.around(node):
        if isinstance(parent, (ast.With, ast.AsyncWith)):
            if any(_turns_off(item.context_expr, tree) for item in parent.items):
                return True
        elif isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return any(_turns_off(decorator, tree) for decorator in parent.decorator_list)
    return False


def _turns_off(node: ast.expr, tree: Tree) -> bool:
    scope = tree.scope[node]
    if not isinstance(node, ast.Call):
        return resolve(node, scope) in NAMES["no gradients"]
    name = resolve(node.func, scope)
    if name == "torch.set_grad_enabled":
        return bool(node.args) and read_constant(node.args[0], scope) is False
    return name in NAMES["no gradients"]


def explain_op(name: str) -> tuple[Op, str, str]:
    """Return the catalog's entry of an op, the reason and the fix."""
    op = find_op(name)
    backward = "Its gradient: " if name.endswith("_backward") else ""
    # The catalog has sentences, which become parts of one here.
    does = op.torch_does[0].lower() + op.torch_does[1:].replace("thing:", "thing about it:")
    if does.startswith("nothing"):
        does = f"does {does}"
    reason = f"{backward}{op.cause} With deterministic algorithms on, torch {does}"
    rule = rule_of(op)
    if rule in {"D9M101", "D9M102"} and op.kernels:
        fix = (
            f"Turn patch_ops on, which replaces it (`d9m ops {name}`), or use an op that is "
            "deterministic."
        )
    elif rule in {"D9M102", "D9M104"}:
        fix = op.reason
    elif op.status == "exempt" and not op.reason.startswith("torch itself"):
        fix = f"{op.reason} DeterminismCallback() sets it."
    else:
        fix = RULES[rule].fix
    return op, reason, fix


def _always(_: Call, op: str) -> str | None:
    """Accept any arguments."""
    return op


def _unless(
    call: Call, op: str, default: object, position: int, name: str, *fine: object
) -> str | None:
    """Accept a call unless an argument, or its default, has one of the ``fine`` values."""
    return None if call.read(position, name, default=default) in fine else op


def _given(call: Call, op: str, position: int, name: str) -> str | None:
    """Accept a call with an argument, such as weights, without which a count adds integers."""
    return op if call.read(position, name) is not None else None


def _interpolated(call: Call, unknown: str, position: int) -> str | None:
    """Choose the op by the mode of an interpolation; ``unknown`` if the source does not show it."""
    mode = call.read(position, "mode", default="nearest")
    if mode is UNKNOWN or mode == "area":
        # In this mode torch calls adaptive average pooling, of as many dimensions as the image has.
        return "adaptive_avg_pool2d_backward" if mode == "area" else unknown
    if call.read(None, "antialias", default=False) is True and mode != "linear":
        return f"upsample_{mode}2d_aa_backward"
    return _INTERPOLATIONS.get(str(mode))


def _padded(call: Call, _: str, position: int, name: str, dims: int | None = None) -> str | None:
    """Choose the op by the mode of a padding, reflection if unknown, and the padded dimensions."""
    mode = call.read(position, name, default="zeros")
    pad = None if dims else call.read(1, "pad")
    count = dims or (len(pad) // 2 if isinstance(pad, tuple) and len(pad) in {2, 4, 6} else 2)
    kinds = {"reflect": "reflection", "replicate": "replication"}
    kind = "reflection" if mode is UNKNOWN else kinds.get(str(mode))
    return f"{kind}_pad{count}d_backward" if kind else None


def _averaged(call: Call, op: str, position: int) -> str | None:
    """Accept a mean over windows unless its output has one element, for which torch adds no op."""
    size = call.read(position, "output_size", default=UNKNOWN)
    return None if size == 1 or (isinstance(size, tuple) and set(size) == {1}) else op


def _sparse_product(call: Call, op: str) -> str | None:
    """Accept a product of a sparse matrix; with another reduction it exists only on a CPU."""
    return op if call.get(2, "reduce") is None else None


def _added(call: Call, op: str, position: int, *names: str) -> str | None:
    """Accept an addition unless its source is seen to be ones or whole numbers.

    Their sums are exact in any order: those of ones as long as a float can count them.
    """
    source = call.get(position, *names)
    return None if source is not None and _is_whole(source, call.scope) else op


def _is_whole(value: ast.AST, scope: Scope, depth: int = _DEPTH) -> bool:
    """Return whether an expression is seen to be ones, whole numbers, or a mask."""
    value, scope = find_value(value, scope)
    match value:
        case _ if depth == 0:
            return False
        case ast.Compare():
            return True
        case ast.IfExp(body=one, orelse=other):
            return all(_is_whole(branch, scope, depth - 1) for branch in (one, other))
        case ast.Call(ast.Attribute(receiver, method)) if method in NAMES["keep numbers"]:
            return _is_whole(receiver, scope, depth - 1)
        case ast.Call(function):
            return read_last_name(function) in NAMES["ones"] | NAMES["integer casts"]
    return False


def _reduced(call: Call, op: str) -> str | None:
    """Choose the op by the reduction; of the greatest and the least the order does not matter."""
    reduction = call.read(4, "reduce", default=UNKNOWN)
    if reduction in {"sum", "mean"}:
        return "scatter_reduce_sum"
    return op if reduction is UNKNOWN or reduction == "prod" else None


def _put(call: Call, op: str) -> str | None:
    """Choose the op by whether values are added to those that are there."""
    adds = call.read(3, "accumulate", default=False) is True
    return _added(call, "index_put_accumulate", 2, "values") if adds else op


def _scattered(call: Call, op: str) -> str | None:
    """Accept a scatter unless its source is one number, as for one-hot vectors."""
    # A value that is one number is the same wherever it is written first.
    source = call.get(3, "src", "value")
    if source is None or "value" in call.named or not (call.owned or _is_indexed(call, 3)):
        return None
    number = isinstance(call.read(3, "src", default=UNKNOWN), (int, float))
    if number or read_kind(source, call.scope) == "other":
        return None
    return "scatter_with_reduce" if isinstance(call.read(None, "reduce"), str) else op


def _indexed(call: Call, op: str) -> str | None:
    """Accept a method of a tensor, or of an object whose arguments look like those of one."""
    return op if call.owned or _is_indexed(call, 2) else None


def _of_tensor(call: Call, op: str) -> str | None:
    """Accept a function, or a method of what is known to be a tensor."""
    return op if call.owned else None


def _repeated(call: Call, op: str) -> str | None:
    """Accept a repetition unless it repeats all elements equally, which torch expands."""
    return None if isinstance(call.read(1, "repeats", default=UNKNOWN), int) else op


def _of_sparse(call: Call, op: str) -> str | None:
    """Accept an op of a sparse tensor."""
    first = call.get(0, "input") or call.receiver
    parts = ast.walk(find_value(first, call.scope)[0]) if first is not None else ()
    sparse = any("sparse" in part.attr for part in parts if isinstance(part, ast.Attribute))
    return op if sparse else None


def _selected(call: Call, op: str) -> str | None:
    """Accept an op along a dimension unless its indices, which vary, are seen not to be used."""
    along = call.get(1, "dim") is not None or call.unpacked
    is_tensors = call.owned or "dim" in call.named
    return op if along and is_tensors and _may_use_indices(call.node, call) else None


def _may_use_indices(node: ast.AST, call: Call) -> bool:
    """Return whether the second of an op's two results may be used."""
    parent = call.tree.parent[node]
    match parent:
        case ast.Attribute(attr="values") | ast.Subscript(slice=ast.Constant(0)) | ast.Expr():
            return False
        case ast.Assign([ast.Tuple([_, ast.Name(last)]), *_]):
            return bool(last.strip("_"))
        case ast.Assign([ast.Name() as name], value) if value is node:
            # The result has a name: what is done with the name decides.
            uses = call.tree.find_uses(name, call.scope, parent)
            return any(_may_use_indices(use, call) for use in uses)
    return True


def _is_indexed(call: Call, least: int) -> bool:
    """Return whether a method's arguments begin with a dimension and an index."""
    if {"index", "src"} & set(call.named):
        return True
    dim = call.get(1, "dim")
    if dim is None or len(call.positional) + len(call.named) < least:
        return False
    # The type of the object is not known, so its arguments must look like those of a tensor's
    # method.
    named = isinstance(dim, ast.Name) and ("dim" in dim.id or "axis" in dim.id)
    return named or isinstance(call.read(1, "dim", default=UNKNOWN), int)


FUNCTIONS: dict[str, list[Condition]] = defaultdict(list)
"""The conditions of each function and module, by its full name."""
METHODS: dict[str, Condition] = {}
"""The condition of each method of a tensor; its receiver is the first argument."""


def _read_calls() -> None:
    """Fill the tables from ``calls.txt``."""
    # A name may have several conditions: a convolution may pad, and that is another op.
    for stanza in read_stanzas(Path(__file__).with_name("calls.txt")):
        for head, names in stanza.items():
            op, *words = head.split()
            kind, *words = words or ["always"]
            given = [int(word) if word.lstrip("-").isdigit() else word for word in words]
            condition = (globals()[f"_{kind}"], [op, *given])
            for name in " ".join(names).split():
                first, _, rest = name.partition(".")
                if first == "Tensor":
                    METHODS[rest] = condition
                FUNCTIONS[f"{_PREFIXES[first]}.{rest}" if first in _PREFIXES else name] += [
                    condition
                ]


_read_calls()
