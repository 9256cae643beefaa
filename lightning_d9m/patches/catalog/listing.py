"""The catalog as text, for a terminal and for the documentation."""

from collections.abc import Iterable
from textwrap import fill

from lightning_d9m.patches.catalog.op import Op

_UNMEASURED = "not measured on a CUDA machine yet"
_OFFER = (
    "Applied on request only, by `patches_applied(include=[...])`: torch's own version is "
    "deterministic, and no measurement on a CUDA machine shows that the replacement is faster."
)
_HEADINGS = {
    "patched": ("Patched", "Applied by `patch_ops`; `unpatched_ops` excludes ops by name."),
    "offered": ("Offered", _OFFER),
    "exempt": (
        "Without a patch",
        "Ops that torch or others call nondeterministic, with the reason.",
    ),
}
_INTRODUCTION = """\
# Ops

The ops that torch leaves nondeterministic on CUDA, and their deterministic replacements.
`d9m ops --markdown` makes this page from the catalog.

The replacements are registered in torch's dispatcher for CUDA, all or none, and removed at the
end. They are tested on a CPU, under the CPU's dispatch key, against torch's own kernels; and each
op of torch that they call is checked against a list of ops whose CUDA kernels have no race.
**None of them has run on a CUDA machine yet**: neither their determinism nor their cost there has
been measured. `benchmarks/gpu_suite.sh` measures both.

With deterministic algorithms on in the forward pass, torch replaces bilinear and trilinear
`F.interpolate`, `F.pad(mode="replicate")` and `F.max_pool3d(return_indices=True)` by Python
decompositions. While the patches are applied, these functions call their op again, so that its
patched gradient runs.

On CUDA,

- nearly all replacements are one of two [primitives](primitives.md), each of which has a version in
  torch ops and one in Triton, with the same bits. At the first use on a device a small example is
  computed by the Triton kernel there and by torch ops on the CPU; with a warning, torch ops take
  over from a kernel that differs or cannot run;
- the host waits for the device in `bincount` with weights, in `histc` with the default range and in
  the gradient of `CTCLoss` if its lengths are CUDA tensors, as in torch's own kernels;
- an index out of range is a device-side assertion, which surfaces as an error at a later call;
- the Triton kernels have run under Triton's interpreter, with the bits of the torch ops, and they
  compile for NVIDIA's architectures 8.0, 9.0 and 10.0;
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
        ("cost", (op.cost or _UNMEASURED) if op.kernels else ""),
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
    listed = list(ops)
    parts = [_INTRODUCTION]
    for status, (title, introduction) in _HEADINGS.items():
        chosen = [op for op in listed if op.status == status]
        if not chosen:
            continue
        parts += [f"## {title}", introduction]
        for op in chosen:
            parts.append(f"### `{op.name}`")
            parts.append("\n".join(f"- **{label}**: {text}" for label, text in list_op_facts(op)))
    return "\n\n".join(parts) + "\n"
