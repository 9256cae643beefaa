"""Calls of kernels that other packages, or the program, bring along; see docs/other-kernels.md."""

from collections.abc import Iterator

from lightning_d9m.tools.lint.checks.ops import explain_op, rule_of
from lightning_d9m.tools.lint.rules import Certainty
from lightning_d9m.tools.lint.tree import Call, Report

_VISION = {
    "deform_conv2d": "DeformConv2d",
    "ps_roi_align": "PSRoIAlign",
    "ps_roi_pool": "PSRoIPool",
    "roi_pool": "RoIPool",
}
_SCATTERED = ("scatter_max", "scatter_min", "scatter_mul", "segment_max_coo", "segment_min_coo")
_MAMBA = ("Mamba", "ops.selective_scan_interface.selective_scan_fn")
_FLEX = "torch.nn.attention.flex_attention.flex_attention"
# The catalog's op, and whether the source shows all that matters.
CALLS: dict[str, tuple[str, Certainty]] = {
    **{
        f"torchvision.ops.{name}": (f"torchvision_{function}_backward", "certain")
        for function, module in _VISION.items()
        for name in (function, module)
    },
    **{f"mamba_ssm.{name}": ("mamba_selective_scan_backward", "certain") for name in _MAMBA},
    "mamba_ssm.modules.mamba_simple.Mamba": ("mamba_selective_scan_backward", "certain"),
    **{f"torch_scatter.{name}": ("torch_scatter_atomics", "certain") for name in _SCATTERED},
    _FLEX: ("flex_attention_bias_backward", "depends"),  # on what score_mod reads
    "triton.language.atomic_add": ("triton_atomic_add", "depends"),  # on the dtype
}


def check_package(call: Call) -> Iterator[Report]:
    """Find a call of another package's kernel that varies."""
    found = CALLS.get(call.name)
    # Only a bias that has a gradient is added to with atomics; without score_mod there is none.
    if found is None or (call.name == _FLEX and call.get(3, "score_mod") is None):
        return
    op, reason, fix = explain_op(found[0])
    yield Report(rule_of(op), call.node, found[1], reason, fix, op.name)
