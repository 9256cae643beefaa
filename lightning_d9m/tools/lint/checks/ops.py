"""Calls of the catalog's ops, and the conditions under which they vary.

A condition gets a call and returns the catalog's name of the op that the call runs, or None where
the source shows that the call is deterministic, by modes, dtypes, sizes and which results are used.
What it finds always depends: the source shows neither the device nor who needs the gradient.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from lightning_d9m.ops.patches.catalog.catalog import FlagEffect, Op, find_op
from lightning_d9m.tools.lint.rules import RULES
from lightning_d9m.tools.lint.tree import (
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

Condition: TypeAlias = Callable[[Call], str | None]

_FUNCTIONAL = "torch.nn.functional."
_INTERPOLATIONS = {
    "linear": "upsample_linear1d_backward",
    "bilinear": "upsample_bilinear2d_backward",
    "bicubic": "upsample_bicubic2d_backward",
    "trilinear": "upsample_trilinear3d_backward",
}
# They return new tensors, which have no gradient without `requires_grad`.
_MAKERS = {"tensor", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn"}
# Sums of integers are exact in any order.
_INTEGER_CASTS = {"int", "long", "short", "byte", "bool"}
# Methods that return the same numbers. Those that round to 16 bits are missing: they count ones
# only up to 256 or 2048, and `to` is here although it may round.
_KEEP_NUMBERS = {
    *("clone", "contiguous", "double", "expand", "expand_as", "flatten", "float", "repeat"),
    *("reshape", "squeeze", "to", "type_as", "unsqueeze", "view"),
}
_DEPTH = 8  # of expressions that are followed; `x = x.float()` would have no end
# Within these, or below such a decorator, no backward pass runs.
_NO_GRADIENTS = {"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad"}
_RULES = {
    FlagEffect.RAISES: "D9M101",
    FlagEffect.NONE: "D9M102",
    FlagEffect.SWITCHES: "D9M103",
    FlagEffect.DECOMPOSES: "D9M103",
    FlagEffect.OUT_OF_REACH: "D9M104",
}
# Ops that vary, or raise, on a CPU as well.
_ON_CPU_TOO = {
    *("max_unpool2d", "max_unpool3d", "put_", "index_put", "index_put_accumulate", "index_copy")
}


def rule_of(op: Op) -> str:
    """Return the id of the rule that finds an op; an op that never varies has none."""
    return _RULES[op.flag_effect]


def check_op(call: Call) -> Iterator[Report]:
    """Find a call of an op of the catalog."""
    name = call.name
    if name == "functools.partial" and call.node.args:
        name = resolve(call.node.args[0], call.scope)
        call = Call(call.node, call.tree, shift=1)
    conditions = FUNCTIONS.get(name, ())
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
    for condition in conditions:
        found = condition(call)
        if found is not None and not _is_spared(found, call, name):
            yield report_op(found, call)


def report_op(name: str, call: Call) -> Report:
    """Return the finding of an op of the catalog."""
    op, reason, fix = explain_op(name)
    return Report(rule_of(op), call.node, "depends", reason, fix, op.name)


def _is_spared(op: str, call: Call, name: str) -> bool:
    """Return whether a call cannot vary: on a CPU, or without a gradient."""
    first = call.receiver or next(iter(call.node.args), None)
    on_cpu = read_kind(first, call.scope) == "cpu tensor" or _is_guarded(call.node, call.tree)
    # The catalog describes CUDA; on a CPU most of these ops have a fixed order.
    if op not in _ON_CPU_TOO and on_cpu:
        return True
    # A call that makes a module runs no op itself, and the module trains.
    if not op.endswith("_backward") or name.rpartition(".")[2][:1].isupper():
        return False
    match first:  # a new tensor has no gradient
        case ast.Call(function, keywords=words) if read_last_name(function) in _MAKERS:
            if not any(word.arg == "requires_grad" for word in words):
                return True
    return _is_without_gradient(call.node, call.tree)


def _is_guarded(node: ast.AST, tree: Tree) -> bool:
    """Return whether a node runs only if something is not on a CUDA device."""
    for parent in tree.around(node):
        if isinstance(parent, ast.If | ast.IfExp):
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            # The else branch is what runs on CUDA.
            within = node in body
            # `a and not x.is_cuda` excludes CUDA, and `a or not x.is_cuda` does not.
            tests = parent.test.values if isinstance(parent.test, ast.BoolOp) else [parent.test]
            every = not isinstance(parent.test, ast.BoolOp) or isinstance(parent.test.op, ast.And)
            for test in tests if within and every else ():
                match test:
                    case ast.UnaryOp(ast.Not(), ast.Attribute(attr="is_cuda")):
                        return True
                    case ast.UnaryOp(ast.Not(), ast.Call(ast.Attribute(attr="is_cuda"))):
                        return True
        node = parent
    return False


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
        return resolve(node, scope) in _NO_GRADIENTS
    name = resolve(node.func, scope)
    if name == "torch.set_grad_enabled":
        return bool(node.args) and read_constant(node.args[0], scope) is False
    return name in _NO_GRADIENTS


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


def _always(op: str) -> Condition:
    """Accept any arguments."""
    return lambda _: op


def _unless(op: str, default: object, position: int | None, name: str, *fine: object) -> Condition:
    """Accept a call unless an argument, or its default, has one of the ``fine`` values."""
    return lambda call: None if call.read(position, name, default=default) in fine else op


def _interpolated(position: int) -> Condition:
    """Choose the op by the mode of an interpolation."""

    def check(call: Call) -> str | None:
        mode = call.read(position, "mode", default="nearest")
        if mode is UNKNOWN or mode == "area":
            # In this mode torch calls adaptive average pooling, of as many dimensions as the image
            # has.
            return "adaptive_avg_pool2d_backward" if mode == "area" else _INTERPOLATIONS["bilinear"]
        if call.read(None, "antialias", default=False) is True and mode != "linear":
            return f"upsample_{mode}2d_aa_backward"
        return _INTERPOLATIONS.get(str(mode))

    return check


def _padded(default: str, position: int, name: str, dims: int | None = None) -> Condition:
    """Choose the op by the mode of a padding and the padded dimensions."""

    def check(call: Call) -> str | None:
        mode = call.read(position, name, default=default)
        pad = None if dims else call.read(1, "pad")
        count = dims or (len(pad) // 2 if isinstance(pad, tuple) and len(pad) in {2, 4, 6} else 2)
        kinds = {"reflect": "reflection", "replicate": "replication"}
        kind = "reflection" if mode is UNKNOWN else kinds.get(str(mode))
        return f"{kind}_pad{count}d_backward" if kind else None

    return check


def _averaged(op: str, position: int) -> Condition:
    """Accept a mean over windows unless its output has one element, for which torch adds no op."""

    def check(call: Call) -> str | None:
        size = call.read(position, "output_size", default=UNKNOWN)
        return None if size == 1 or (isinstance(size, tuple) and set(size) == {1}) else op

    return check


def _sparse_mm(call: Call) -> str | None:
    """Accept a product of a sparse matrix; with another reduction it exists only on a CPU."""
    return None if call.get(2, "reduce") is not None else "sparse_mm"


def _bincount(call: Call) -> str | None:
    """Accept ``bincount`` with weights: without them it counts integers."""
    return None if call.read(1, "weights") is None else "bincount"


def _added(op: str, position: int = 3, *names: str) -> Condition:
    """Accept an addition unless its source is seen to be ones or whole numbers.

    Their sums are exact in any order: those of ones as long as a float can count them.
    """

    def check(call: Call) -> str | None:
        source = call.get(position, *(names or ("src", "source")))
        return None if source is not None and _is_whole(source, call.scope) else op

    return check


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
        case ast.Call(ast.Attribute(receiver, method)) if method in _KEEP_NUMBERS:
            return _is_whole(receiver, scope, depth - 1)
        case ast.Call(function):
            return read_last_name(function) in {"ones", "ones_like", "new_ones", *_INTEGER_CASTS}
    return False


def _scatter_reduce(call: Call) -> str | None:
    reduction = call.read(4, "reduce", default=UNKNOWN)
    if reduction in {"sum", "mean"}:
        return "scatter_reduce_sum"
    return "scatter_reduce_prod" if reduction is UNKNOWN or reduction == "prod" else None


def _index_put(call: Call) -> str | None:
    if call.read(3, "accumulate", default=False) is not True:
        return "index_put"
    return _added("index_put_accumulate", 2, "values")(call)


def _scatter(call: Call) -> str | None:
    """Accept a scatter unless its source is one number, as for one-hot vectors."""
    # A value that is one number is the same wherever it is written first.
    source = call.get(3, "src", "value")
    if source is None or "value" in call.named or not (call.owned or _is_indexed(call, 3)):
        return None
    number = isinstance(call.read(3, "src", default=UNKNOWN), (int, float))
    if number or read_kind(source, call.scope) == "other":
        return None
    return "scatter_with_reduce" if isinstance(call.read(None, "reduce"), str) else "scatter"


def _repeat_interleave(call: Call) -> str | None:
    """Accept ``repeat_interleave`` unless it repeats all elements equally, which torch expands."""
    equally = isinstance(call.read(1, "repeats", default=UNKNOWN), int)
    return None if equally else "repeat_interleave_backward"


def _histc(call: Call) -> str | None:
    """Accept ``histc`` unless its input is cast to integers, which it counts exactly."""
    match _find_input(call):
        case ast.Call(ast.Attribute(attr=method), args, keywords):
            dtypes = [*args, *(word.value for word in keywords if word.arg == "dtype")]
            names = [dtype.attr for dtype in dtypes if isinstance(dtype, ast.Attribute)]
            if method in _INTEGER_CASTS or any(n.strip("u").startswith("int") for n in names):
                return None
    return "histc"


def _bmm(call: Call) -> str | None:
    """Accept ``bmm`` of a sparse tensor."""
    first = _find_input(call)
    parts = ast.walk(first) if first is not None else ()
    sparse = any("sparse" in part.attr for part in parts if isinstance(part, ast.Attribute))
    return "bmm_sparse" if sparse else None


def _find_input(call: Call) -> ast.AST | None:
    """Return the value of the first argument, or of the receiver."""
    first = call.get(0, "input") or call.receiver
    return None if first is None else find_value(first, call.scope)[0]


def _selected(op: str) -> Condition:
    """Accept an op along a dimension unless its indices, which vary, are seen not to be used."""

    def check(call: Call) -> str | None:
        along = call.get(1, "dim") is not None or call.unpacked
        is_tensors = call.owned or "dim" in call.named
        return op if along and is_tensors and _may_use_indices(call.node, call) else None

    return check


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
            _, area, key = call.scope.follow(name)
            uses = call.tree.find_uses(area, key, parent)
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


def _list_layers() -> dict[str, tuple[Condition, ...]]:
    """Return the conditions of modules and of the functions that belong to them."""
    # A module and its function differ in the position of arguments.
    table: dict[str, tuple[Condition, ...]] = {}

    def add(module: str, function: str, *conditions: Condition) -> None:
        table.update({f"torch.nn.{module}": conditions} if module else {})
        table.update({_FUNCTIONAL + function: conditions} if function else {})

    for dims in (1, 2, 3):
        # In one dimension torch calls the two-dimensional op.
        planes = max(dims, 2)
        average = f"adaptive_avg_pool{planes}d_backward"
        add(f"AdaptiveAvgPool{dims}d", "", _averaged(average, 0))
        add("", f"adaptive_avg_pool{dims}d", _averaged(average, 1))
        largest = _always(f"adaptive_max_pool{planes}d_backward")
        add(f"AdaptiveMaxPool{dims}d", f"adaptive_max_pool{dims}d", largest)
        add("", f"adaptive_max_pool{dims}d_with_indices", largest)
        add(f"MaxUnpool{dims}d", f"max_unpool{dims}d", _always(f"max_unpool{planes}d"))
        for kind in ("Reflection", "Replication"):
            add(f"{kind}Pad{dims}d", "", _always(f"{kind.lower()}_pad{dims}d_backward"))
        convolution, padding = _always("convolution"), _padded("zeros", 8, "padding_mode", dims)
        for prefix in ("", "Lazy"):
            add(f"{prefix}Conv{dims}d", "", convolution, padding)
            add(f"{prefix}ConvTranspose{dims}d", f"conv_transpose{dims}d", convolution)
        add("", f"conv{dims}d", convolution)
    for dims in (2, 3):
        pool = f"fractional_max_pool{dims}d"
        add(f"FractionalMaxPool{dims}d", pool, _always(f"{pool}_backward"))
    for kind in ("avg", "max"):
        add(f"{kind.title()}Pool3d", f"{kind}_pool3d", _always(f"{kind}_pool3d_backward"))
    add("Upsample", "", _interpolated(2))
    add("UpsamplingBilinear2d", "upsample_bilinear", _always("upsample_bilinear2d_backward"))
    add("", "interpolate", _interpolated(3))
    add("", "upsample", _interpolated(3))
    add("", "pad", _padded("constant", 2, "mode"))
    add("", "grid_sample", _always("grid_sampler_2d_backward"))
    # An NLL loss varies if its input has two spatial dimensions, which the source does not show.
    add("NLLLoss", "", _unless("nll_loss2d", "mean", 4, "reduction", "none"))
    add("NLLLoss2d", "", _unless("nll_loss2d", "mean", 4, "reduction", "none"))
    add("", "nll_loss", _unless("nll_loss2d", "mean", 6, "reduction", "none"))
    add("CTCLoss", "ctc_loss", _always("ctc_loss_backward"))
    for module, function, position in (("EmbeddingBag", "", 5), ("", "embedding_bag", 6)):
        bag = _unless("embedding_bag_max_backward", "mean", position, "mode", "mean", "sum")
        add(module, function, bag)
    for module in ("RNN", "LSTM", "GRU"):
        add(module, "", _always("rnn_cudnn"))
    attention = "scaled_dot_product_attention"
    add("", attention, _always(f"{attention}_backward"))
    return table


# Functions of torch that are methods of tensors, too.
_TENSOR_OPS: dict[str, Condition] = {
    "bincount": _bincount,
    "bmm": _bmm,
    "gather": lambda call: "gather_backward" if call.owned or _is_indexed(call, 2) else None,
    "histc": _histc,
    "index_select": _always("index_select_backward"),
    "median": _selected("median"),
    "nanmedian": _selected("nanmedian"),
    "repeat_interleave": _repeat_interleave,
    "take": lambda call: "put_" if call.owned else None,  # its gradient
    "take_along_dim": _always("gather_backward"),
}
# These also exist with a trailing underscore.
_IN_PLACE: dict[str, Condition] = {
    "index_add": _added("index_add"),
    "index_copy": _always("index_copy"),
    "index_put": _index_put,
    "index_reduce": _always("index_reduce"),
    "put": _always("put_"),
    "scatter": _scatter,
    "scatter_add": _added("scatter_add"),
    "scatter_reduce": _scatter_reduce,
}
_ALL_TENSOR_OPS = {
    **_TENSOR_OPS, **_IN_PLACE, **{f"{name}_": check for name, check in _IN_PLACE.items()}
}  # fmt: skip
_SCATTERING = [
    *(f"torch_scatter.{name}"
      for name in ("scatter", "scatter_add", "scatter_sum", "scatter_mean", "segment_coo")),
    "torch_geometric.utils.scatter",
    "torch_geometric.nn.global_add_pool",
    "torch_geometric.nn.global_mean_pool",
]  # fmt: skip
_ATTENTION = [
    f"flash_attn.{module}flash_attn_{kind}func"
    for module in ("", "flash_attn_interface.")
    for kind in ("", "varlen_", "qkvpacked_", "kvpacked_", "varlen_qkvpacked_")
]

_ATTENTION_OP = _unless("flash_attn_package_backward", 0, None, "deterministic", 1)
FUNCTIONS: Mapping[str, tuple[Condition, ...]] = {
    **_list_layers(),
    "torch.sparse.mm": (_sparse_mm,),
    "torch.sparse.addmm": (_always("sparse_mm"),),
    **dict.fromkeys(_SCATTERING, (_always("scatter_add"),)),
    **dict.fromkeys(_ATTENTION, (_ATTENTION_OP,)),
    **{f"torch.{name}": (condition,) for name, condition in _ALL_TENSOR_OPS.items()},
}
"""The conditions of each function and module, by its full name."""

# NumPy's arrays have `put`, too, so it counts only as a function of torch.
METHODS: Mapping[str, Condition] = {
    name: condition for name, condition in _ALL_TENSOR_OPS.items() if name != "put"
}
"""The condition of each method of a tensor; its receiver is the first argument."""
