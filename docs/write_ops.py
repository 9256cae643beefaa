"""Write docs/ops.md: the catalog of operations.

``python docs/write_ops.py`` writes the page; ``tests/docs/test_pages.py`` compares it with
the catalog.
"""

from pathlib import Path

from lightning_d9m.cli.ops import list_op_facts
from lightning_d9m.patches.catalog.catalog import OPS

PAGE = Path(__file__).with_name("ops.md")
_HEADINGS = {
    "patched": "Patched\n\nApplied by `patch_ops`; `unpatched_ops` excludes ops by name.",
    "exempt": (
        "Without a patch\n\nOps that torch or others call nondeterministic, with the reason."
    ),
}
_INTRODUCTION = """\
# Ops

The ops that torch leaves nondeterministic on CUDA, and their deterministic replacements.
`python docs/write_ops.py` makes this page from the catalog.

The replacements are registered in torch's dispatcher for CUDA, all or none, and removed at the
end. Nearly all are one of two [primitives](primitives.md). They are tested on a CPU against torch's
own kernels; and each op of torch that they call is checked against a list of ops whose CUDA kernels
have no race. **None of them has run on a CUDA machine yet**, and their cost there is not measured.
`benchmarks/gpu_suite.sh` measures both.

An op that torch makes deterministic by a sort is patched where the exact sum moves at most 3 times
the bytes of a kernel with atomics, by counting: `index_add`, `scatter_add` and `index_put`.

With deterministic algorithms on in the forward pass, torch replaces bilinear and trilinear
`F.interpolate`, `F.pad(mode="replicate")` and `F.max_pool3d(return_indices=True)` by Python
decompositions. While the patches are applied, these functions call their op again, so that its
patched gradient runs.

On CUDA,

- the first use of a primitive on a device compares its Triton kernel with torch ops on the CPU.
  Torch ops, with the same bits, take over with a warning from a kernel that differs or cannot run;
- an exact sum takes one fill and three launches, or one launch for few terms; the gradient of
  `grid_sample` starts 87 operations of torch in 2 dimensions, 129 in 3 and 103 in bicubic mode
  beside them (torch's own one kernel), and some more for over 4 million elements;
- the host waits for the device in `bincount` with weights, in `histc` with the default range and in
  the gradient of `CTCLoss` if its lengths are CUDA tensors, as in torch's own kernels;
- an index out of range is a device-side assertion, which surfaces as an error at a later call;
- a step with patches has to run once before a CUDA graph captures it, because kernels are compiled
  and taps are copied from the host at the first use. Taps that a graph uses are kept.
"""


def format_page() -> str:
    """Return the page."""
    parts = [_INTRODUCTION.rstrip()]
    for status, heading in _HEADINGS.items():
        parts.append(f"## {heading}")
        for op in (op for op in OPS if op.status == status):
            facts = "\n".join(f"- **{label}**: {text}" for label, text in list_op_facts(op))
            parts.append(f"### `{op.name}`\n\n{facts}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(format_page(), encoding="utf-8")
