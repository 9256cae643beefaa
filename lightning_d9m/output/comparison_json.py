"""A comparison as JSON."""

from dataclasses import asdict

from lightning_d9m.comparison.ledgers import Comparison


def as_json(comparison: Comparison) -> dict[str, object]:
    """Return the comparison for ``--json``; the names are those of the attributes."""
    return {
        "verdict": comparison.verdict,
        **asdict(comparison),
        "expected": str(comparison.expected),
        "actual": str(comparison.actual),
    }
