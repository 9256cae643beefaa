"""The facts of a drift, as errors tell them."""

from typing import Any

from lightning_d9m.engine.ledger.differences import Divergence
from lightning_d9m.text import escape


def describe_groups(difference: Divergence) -> list[str]:
    """Return a line with the number of entries that differ in each group, if it is not one."""
    parts = [f"{escape(group)} {n} of {of}" for group, (n, of) in difference.by_kind.items()]
    return [f"In all: {', '.join(parts)}."] if parts[1:] else []


def list_facts(difference: Divergence) -> dict[str, Any]:
    """Return the facts of a difference that a ``DriftError`` has."""
    return {
        "moment": difference.moment,
        "epoch": difference.epoch,
        "step": difference.step,
        "group": difference.kind,
        "names": difference.names,
        "count": difference.count,
        "total": difference.compared,
        "expected": difference.expected,
        "actual": difference.actual,
    }
