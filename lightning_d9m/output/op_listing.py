"""The catalog as text, for a terminal and for the documentation."""

from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from lightning_d9m.patches.catalog.catalog import Op

_HEADINGS = {
    "patched": "Patched\n\nApplied by `patch_ops`; `unpatched_ops` excludes ops by name.",
    "exempt": (
        "Without a patch\n\nOps that torch or others call nondeterministic, with the reason."
    ),
}
_INTRODUCTION = Path(__file__).with_name("op_introduction.md")


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
    listed, parts = list(ops), [_INTRODUCTION.read_text(encoding="utf-8").rstrip()]
    for status, heading in _HEADINGS.items():
        chosen = [op for op in listed if op.status == status]
        parts += [f"## {heading}"] if chosen else []
        for op in chosen:
            facts = "\n".join(f"- **{label}**: {text}" for label, text in list_op_facts(op))
            parts.append(f"### `{op.name}`\n\n{facts}")
    return "\n\n".join(parts) + "\n"
