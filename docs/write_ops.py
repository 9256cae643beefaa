"""Write docs/ops.md: the catalog of operations.

``python docs/write_ops.py`` writes the page; ``tests/docs/test_pages.py`` compares it with
the catalog.
"""

from collections.abc import Sequence
from pathlib import Path

from lightning_d9m.ops.patches.catalog.catalog import OPS, Op
from lightning_d9m.tools.cli.machine.ops import list_op_facts

PAGE = Path(__file__).with_name("ops.md")
_HEADINGS = {
    "patched": "Patched\n\nApplied by `patch_ops`; `unpatched_ops` excludes ops by name.",
    "exempt": (
        "Without a patch\n\nOps that torch or others call nondeterministic, with the reason."
    ),
}
_INTRODUCTION = """\
# Ops

The ops that torch leaves nondeterministic on CUDA, and their deterministic replacements, in groups
of one replacement or one reason. `d9m ops NAME` prints all facts about one of them.

The replacements are registered in torch's dispatcher for CUDA, all or none, and removed at the
end. Nearly all are one of two [primitives](#primitives). They are tested on a CPU against torch's
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
  Torch ops, which run its text, take over with a warning if it differs or cannot run;
- taps take one launch for each dimension, and an exact sum one fill and three launches; the
  gradient of `grid_sample` starts one kernel more, copies inputs that are not contiguous, and fills
  four new tensors with `fill_uninitialized_memory` (torch itself starts one kernel);
- the host waits for the device in `bincount` with weights, in `histc` with the default range and in
  the gradient of `CTCLoss` if its lengths are CUDA tensors, as in torch's own kernels;
- an index out of range is a device-side assertion, which surfaces as an error at a later call;
- a step with patches has to run once before a CUDA graph captures it, because kernels are compiled
  and taps are copied from the host at the first use. Taps that a graph uses are kept.
"""

_PRIMITIVES = """\
## Primitives

A kernel is deterministic if the order of its threads cannot change a bit. Nearly all
replacements are one of two primitives, each of one text, which Triton compiles or torch ops run.

### Taps

Interpolation, average pooling and padding are linear, and work on one dimension after the
other. In the gradient, each input is a weighted sum of the few outputs that have read it, its
*taps*. One thread writes each input, and adds its taps in the order of a list: those of the
last dimension, then these sums along the dimension before it.

The list comes from torch's own forward pass on a CPU, so a different CPU may round a weight
differently.

### Exact sums

Everything else that races adds terms to places, in any order, and each addition rounds. Here no
addition rounds.

1. **Find the greatest exponent of each place.** A maximum is the same in any order.
2. **Cut each term into pieces.** `piece = (x + c) - c` rounds `x` to a multiple of the last
   place of `c`; `x - piece` is the rest, exactly. `c` depends only on the greatest exponent and
   on the number of terms.
3. **Add the pieces in float64.** They are multiples of one power of two, and so small that any
   sum of them has at most 53 bits. It is exact; atomics may add in any order.
4. **Round once**, to nearest, ties to even.

The pieces hold 40 bits below the last place of the greatest term, or 24 in max pooling; what is
below is rounded off in step 2. If the terms span less, the sum is the exact one, rounded once.
The bits are the same on every device. Infinities, NaN and -0.0 are pieces themselves; all NaNs
become one.

Maxima, minima and "the last value is written" need neither: they compare numbers without -0.0.
Factors are sorted by place and multiplied by one thread.
"""


def format_page() -> str:
    """Return the page."""
    parts = [_INTRODUCTION.rstrip()]
    for status, heading in _HEADINGS.items():
        parts.append(f"## {heading}")
        groups: dict[tuple[str, ...], list[Op]] = {}
        for op in OPS:
            if op.status == status:
                groups.setdefault((op.cause, op.instead, op.bits, op.reason), []).append(op)
        parts += [_format_group(ops) for ops in groups.values()]
    parts.append(_PRIMITIVES.rstrip())
    parts.append("<!-- `python docs/write_ops.py` writes this page from the catalog. -->")
    return "\n\n".join(parts) + "\n"


def _format_group(ops: Sequence[Op]) -> str:
    """Return the facts that all ops of a group share, and those of each that differ."""
    facts = {op.name: dict(list_op_facts(op)) for op in ops}
    labels = dict.fromkeys(label for own in facts.values() for label in own)
    shared = {
        label: texts.pop()
        for label in labels
        if len(texts := {own.get(label, "") for own in facts.values()}) == 1
    }
    names = " and ".join([f"`{ops[0].name}`", *([f"{len(ops) - 1} more"] if ops[1:] else [])])
    lines = [f"### {names}", "", *(f"- **{label}**: {text}" for label, text in shared.items())]
    for name, own in facts.items():
        differing = [f"{label}: {text}" for label, text in own.items() if label not in shared]
        if differing:
            lines.append(f"- `{name}`: {'; '.join(text.rstrip('.') for text in differing)}.")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(format_page(), encoding="utf-8")
