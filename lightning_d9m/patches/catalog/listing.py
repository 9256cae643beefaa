"""The catalogue as text: for a terminal and for the documentation."""

from collections.abc import Iterable
from textwrap import fill

from lightning_d9m.patches.catalog.op import Op

_UNMEASURED = "not measured on a CUDA machine yet"
_OFFER = (
    "Applied only where asked for, by `patches_applied(include=[...])`: torch has a deterministic "
    "version, which stays until a measurement on a CUDA machine says that this one is faster."
)
_HEADINGS = {
    "patched": ("Patched", "Applied by `patch_ops=True`; `unpatched_ops` names those to leave."),
    "offered": ("Offered", _OFFER),
    "exempt": ("Without a patch", "Called nondeterministic elsewhere, and why not patched here."),
}
_INTRODUCTION = """\
# Ops

What torch leaves nondeterministic on CUDA, and what is done about it. This page is made from the
catalogue by `d9m ops --markdown`.

The replacements are registered in torch's dispatcher for CUDA, all or none, and taken back at the
end. They are proven on a CPU, under the CPU's dispatch key, against torch's own kernels; and each
op of torch that they call is held against a list of those whose CUDA kernel lets no two threads
race.
**None of them has run on a CUDA machine yet**: neither that one input gives one output there nor
what it costs has been measured. `benchmarks/gpu_suite.sh` measures both."""


def list_facts(op: Op) -> list[tuple[str, str]]:
    """Return what is known of an op, as pairs of a label and a sentence."""
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


def render_table(ops: Iterable[Op]) -> str:
    """Return one line for each op: its name, its status and what is done."""
    rows = [(op.name, op.status, op.instead or op.reason) for op in ops]
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"{name:{width}}  {status:8}{text}" for name, status, text in rows)


def render_op(op: Op) -> str:
    """Return all facts of one op, wrapped for a terminal."""
    facts = [("name", op.name), ("status", op.status), *list_facts(op)]
    width = max(len(label) for label, _ in facts) + 2
    return "\n".join(
        fill(
            text,
            100,
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
            parts.append("\n".join(f"- **{label}**: {text}" for label, text in list_facts(op)))
    return "\n\n".join(parts) + "\n"
