"""Functions, modules and tensor methods that call the catalog's ops."""

from collections.abc import Mapping
from types import MappingProxyType

from lightning_d9m.lint.checks.op_conditions import (
    Condition,
    always,
    convolved,
    counted,
    gathered,
    given,
    interpolated,
    multiplied,
    padded,
    pooled,
    put_by_index,
    reduced,
    repeated,
    scattered,
    selected,
    taken,
    unless,
)
from lightning_d9m.patches.catalog.catalog import find_op
from lightning_d9m.patches.catalog.op import FlagEffect, Op

_FUNCTIONAL = "torch.nn.functional."
_EVERY_DIM = (1, 2, 3)

_RULES = {
    FlagEffect.RAISES: "D9M101",
    FlagEffect.NONE: "D9M102",
    FlagEffect.SWITCHES: "D9M103",
    FlagEffect.DECOMPOSES: "D9M103",
    FlagEffect.OUT_OF_REACH: "D9M104",
}
ON_CPU_TOO = {
    "max_unpool2d",
    "max_unpool3d",
    "put_",
    "index_put",
    "index_put_accumulate",
    "index_copy",
}
"""Ops that vary, or raise, on a CPU as well."""


def rule_of(op: Op) -> str:
    """Return the id of the rule that finds an op; an op that never varies has none."""
    return _RULES[op.flag_effect]


def is_backward(op: str) -> bool:
    """Return whether only the gradient of an op varies."""
    return op.endswith("_backward")


def _list_layers() -> dict[str, tuple[Condition, ...]]:  # noqa: C901 - a table, written as loops
    """Return the conditions of modules and of the functions that belong to them."""
    table: dict[str, tuple[Condition, ...]] = {}

    def add(module: str, function: str, *conditions: Condition) -> None:
        table[f"torch.nn.{module}"] = conditions
        if function:
            table[_FUNCTIONAL + function] = conditions

    for dims in _EVERY_DIM:
        # In one dimension torch calls the two-dimensional op.
        planes = max(dims, 2)
        for kind in ("avg", "max"):
            op = f"adaptive_{kind}_pool{planes}d_backward"
            for module, function, context in (
                (f"Adaptive{kind.title()}Pool{dims}d", "", 0),
                ("", f"adaptive_{kind}_pool{dims}d", 1),
            ):
                name = f"torch.nn.{module}" if module else _FUNCTIONAL + function
                table[name] = (pooled(op, context) if kind == "avg" else always(op),)
        table[f"{_FUNCTIONAL}adaptive_max_pool{dims}d_with_indices"] = (always(op),)
        add(f"MaxUnpool{dims}d", f"max_unpool{dims}d", always(f"max_unpool{planes}d"))
        for kind in ("Reflection", "Replication"):
            add(f"{kind}Pad{dims}d", "", always(f"{kind.lower()}_pad{dims}d_backward"))
        for prefix in ("", "Lazy"):
            add(f"{prefix}Conv{dims}d", "", always("convolution"), convolved(dims))
            add(f"{prefix}ConvTranspose{dims}d", "", always("convolution"))
        for function in (f"conv{dims}d", f"conv_transpose{dims}d"):
            table[_FUNCTIONAL + function] = (always("convolution"),)
    for dims in (2, 3):
        op = f"fractional_max_pool{dims}d_backward"
        add(f"FractionalMaxPool{dims}d", f"fractional_max_pool{dims}d", always(op))
    add("AvgPool3d", "avg_pool3d", always("avg_pool3d_backward"))
    add("MaxPool3d", "max_pool3d", always("max_pool3d_backward"))
    add("Upsample", "", interpolated(2))
    add("UpsamplingBilinear2d", "upsample_bilinear", always("upsample_bilinear2d_backward"))
    for function in ("interpolate", "upsample"):
        table[_FUNCTIONAL + function] = (interpolated(3),)
    table[_FUNCTIONAL + "pad"] = (padded,)
    table[_FUNCTIONAL + "grid_sample"] = (always("grid_sampler_2d_backward"),)
    for name, context in (("torch.nn.NLLLoss", 4), (_FUNCTIONAL + "nll_loss", 6)):
        table[name] = (_of_unknown_shape(context),)
    add("NLLLoss2d", "", unless("nll_loss2d", "mean", 4, "reduction", fine={"none"}))
    add("CTCLoss", "ctc_loss", always("ctc_loss_backward", "depends"))
    for name, context in (("torch.nn.EmbeddingBag", 5), (_FUNCTIONAL + "embedding_bag", 6)):
        fine: set[object] = {"mean", "sum"}
        table[name] = (unless("embedding_bag_max_backward", "mean", context, "mode", fine=fine),)
    for module in ("RNN", "LSTM", "GRU"):
        add(module, "", always("rnn_cudnn", "depends"))
    attention = always("scaled_dot_product_attention_backward")
    table[_FUNCTIONAL + "scaled_dot_product_attention"] = (attention,)
    return table


def _of_unknown_shape(context: int) -> Condition:
    """Accept an NLL loss, which varies if its input has two spatial dimensions (unknown here)."""
    check = unless("nll_loss2d", "mean", context, "reduction", fine={"none"})
    return lambda spelled: ("nll_loss2d", "depends") if check(spelled) else None


_METHODS: dict[str, Condition] = {
    "bincount": given("bincount", 1, "weights"),
    "bmm": multiplied,
    "gather": gathered,
    "histc": counted,
    "index_add": always("index_add"),
    "index_copy": always("index_copy"),
    "index_put": put_by_index,
    "index_reduce": always("index_reduce"),
    "index_select": always("index_select_backward"),
    "median": selected("median"),
    "nanmedian": selected("nanmedian"),
    "put": always("put_"),
    "repeat_interleave": repeated,
    "scatter": scattered,
    "scatter_add": always("scatter_add"),
    "scatter_reduce": reduced,
    "take": taken,
    "take_along_dim": always("gather_backward"),
}
_IN_PLACE = (
    "index_add",
    "index_copy",
    "index_put",
    "index_reduce",
    "put",
    "scatter",
    "scatter_add",
    "scatter_reduce",
)
# NumPy's arrays have this method too, so it counts only as a function of torch.
_PLAIN_ONLY_AS_FUNCTION = {"put"}

_PACKAGES: dict[str, Condition] = {
    **{
        f"torch_scatter.{name}": always("scatter_add", "depends")
        for name in ("scatter", "scatter_add", "scatter_sum", "scatter_mean", "segment_coo")
    },
    "torch_geometric.utils.scatter": always("scatter_add", "depends"),
    "torch_geometric.nn.global_add_pool": always("scatter_add", "depends"),
    "torch_geometric.nn.global_mean_pool": always("scatter_add", "depends"),
    **{
        f"flash_attn.{module}flash_attn_{kind}func": unless(
            "flash_attn_package_backward", 0, None, "deterministic", fine={True}
        )
        for module in ("", "flash_attn_interface.")
        for kind in ("", "varlen_", "qkvpacked_", "kvpacked_", "varlen_qkvpacked_")
    },
}

FUNCTIONS: Mapping[str, tuple[Condition, ...]] = MappingProxyType(
    {
        **_list_layers(),
        **{name: (condition,) for name, condition in _PACKAGES.items()},
        **{
            f"torch.{name}{mark}": (condition,)
            for name, condition in _METHODS.items()
            for mark in (("", "_") if name in _IN_PLACE else ("",))
        },
    }
)
"""The conditions of each function and module, by its full name."""

METHODS: Mapping[str, Condition] = MappingProxyType(
    {
        name + mark: condition
        for name, condition in _METHODS.items()
        for mark in (("", "_") if name in _IN_PLACE else ("",))
        if mark or name not in _PLAIN_ONLY_AS_FUNCTION
    }
)
"""The condition of each method of a tensor; its receiver is the first argument."""


def explain_op(name: str) -> tuple[Op, str, str]:
    """Return the catalog's entry of an op, the reason and the fix."""
    op = find_op(name)
    backward = "Its gradient: " if is_backward(name) else ""
    does = op.torch_does[0].lower() + op.torch_does[1:].replace("thing:", "thing about it:")
    if does.startswith("nothing"):
        does = f"does {does}"
    reason = f"{backward}{op.cause} With deterministic algorithms on, torch {does}"
    rule = rule_of(op)
    if rule in {"D9M101", "D9M102"}:
        fix = (
            f"Turn patch_ops on, which replaces it (`d9m ops {name}`), or use an op that is "
            "deterministic."
        )
    elif rule == "D9M104":
        fix = op.reason
    else:
        fix = (
            "Turn deterministic algorithms on: DeterminismCallback(), Trainer(deterministic=True) "
            "or torch.use_deterministic_algorithms(True)."
        )
        if not op.reason.startswith("torch itself") and op.status == "exempt":
            fix = f"{op.reason} DeterminismCallback() sets it."
    return op, reason, fix
