"""The catalog as text, for a terminal and for the documentation."""

from collections.abc import Iterable
from textwrap import fill

from lightning_d9m.patches.catalog.op import Op

_HEADINGS = {
    "patched": "Patched\n\nApplied by `patch_ops`; `unpatched_ops` excludes ops by name.",
    "exempt": (
        "Without a patch\n\nOps that torch or others call nondeterministic, with the reason."
    ),
}
_INTRODUCTION = """\
# Ops

The ops that torch leaves nondeterministic on CUDA, and their deterministic replacements.
`d9m ops --markdown` makes this page from the catalog.

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
- the host waits for the device in `bincount` with weights, in `histc` with the default range and in
  the gradient of `CTCLoss` if its lengths are CUDA tensors, as in torch's own kernels;
- an index out of range is a device-side assertion, which surfaces as an error at a later call;
- a step with patches has to run once before a CUDA graph captures it, because kernels are compiled
  and taps are copied from the host at the first use. Taps that a graph uses are kept."""


def list_op_facts(op: Op) -> list[tuple[str, str]]:
    """Return the facts about an op, as pairs of a label and a sentence."""
    facts = [
        ("torch's name", ", ".join(op.documented)),
        ("with the flag on, torch", op.torch_does),
        ("why", op.cause),
        ("instead", op.instead),
        ("bits", op.bits),
        ("no patch because", op.reason),
        ("needed", f"from torch {op.since}" + (f" until {op.until}" if op.until else "")),
        ("overloads", ", ".join(f"aten::{overload}" for overload in sorted(op.kernels))),
    ]
    return [(label, text) for label, text in facts if text]


def render_op(op: Op, columns: int = 100) -> str:
    """Return all facts of one op, wrapped for a terminal of that many columns."""
    facts = [("name", op.name), ("status", op.status), *list_op_facts(op)]
    width = max(len(label) for label, _ in facts) + 2
    return "\n".join(
        fill(
            text,
            columns,
            initial_indent=f"{label}:".ljust(width),
            subsequent_indent=" " * width,
            break_on_hyphens=False,
        )
        for label, text in facts
    )


def render_markdown(ops: Iterable[Op]) -> str:
    """Return the documentation's page."""
    listed, parts = list(ops), [_INTRODUCTION]
    for status, heading in _HEADINGS.items():
        chosen = [op for op in listed if op.status == status]
        parts += [f"## {heading}"] if chosen else []
        for op in chosen:
            facts = "\n".join(f"- **{label}**: {text}" for label, text in list_op_facts(op))
            parts.append(f"### `{op.name}`\n\n{facts}")
    return "\n\n".join(parts) + "\n"
