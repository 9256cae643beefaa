"""The facts about an op, for ``d9m ops NAME`` and the documentation."""

from lightning_d9m.output.terminal import make_table, render
from lightning_d9m.patches.catalog.catalog import Op


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


def render_op(op: Op, width: int) -> str:
    """Return all facts of one op for a terminal of that width."""
    facts = [("name", op.name), ("status", op.status), *list_op_facts(op)]
    return render(make_table(["", ""], [(f"{label}:", text) for label, text in facts]), width)
