"""Calls of kernels that other packages, or the program, bring along; see docs/other-kernels.md."""

from collections.abc import Iterator

from lightning_d9m.tools.lint.checks.ops import report_op
from lightning_d9m.tools.lint.tree import Call, Report

_VISION = {
    "deform_conv2d": "DeformConv2d",
    "ps_roi_align": "PSRoIAlign",
    "ps_roi_pool": "PSRoIPool",
    "roi_pool": "RoIPool",
}
_SCATTERED = ("scatter_max", "scatter_min", "scatter_mul", "segment_max_coo", "segment_min_coo")
_MAMBA = (
    *("Mamba", "modules.mamba_simple.Mamba"),
    "ops.selective_scan_interface.selective_scan_fn",
)
_FLEX = "torch.nn.attention.flex_attention.flex_attention"
# The catalog's op of each.
CALLS = {
    **{
        f"torchvision.ops.{name}": f"torchvision_{function}_backward"
        for function, module in _VISION.items()
        for name in (function, module)
    },
    **dict.fromkeys((f"mamba_ssm.{name}" for name in _MAMBA), "mamba_selective_scan_backward"),
    **{f"torch_scatter.{name}": "torch_scatter_atomics" for name in _SCATTERED},
    _FLEX: "flex_attention_bias_backward",
    "triton.language.atomic_add": "triton_atomic_add",
}


def check_package(call: Call) -> Iterator[Report]:
    """Find a call of another package's kernel that varies."""
    # Only a bias that has a gradient is added to with atomics; without score_mod there is none.
    if call.name in CALLS and (call.name != _FLEX or call.get(3, "score_mod") is not None):
        yield report_op(CALLS[call.name], call)
