"""Comparison of an op's measured behavior with torch's documentation. It does not import torch."""

from collections.abc import Mapping, Sequence
from typing import Any


def judge_op(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare the measured behavior of one op on one device with the documentation.

    Args:
        rows: The rows of the op; each has ``conditions``, and in ``documented`` the kinds of its
            lines.

    Returns:
        Findings, as sentences; ``"As documented."`` alone if there is no difference.
    """
    kinds = {kind for row in rows for kind in row["documented"]}
    default = [row["conditions"]["default"] for row in rows]
    ran = [entry for entry in default if entry["outcome"] == "ran"]
    if not ran:
        reasons = sorted({entry["reason"] for entry in default})
        return [f"Not measured: {'; '.join(reasons)}"]
    flagged = [row["conditions"]["deterministic"] for row in rows]
    raised = [row for row in rows if row["conditions"]["deterministic"]["outcome"] == "raised"]
    varied = any(map(varies, ran))
    findings = []
    if varied and not kinds:
        findings.append("Varies, and torch does not document it.")
    if kinds and not varied:
        findings.append("Documented as nondeterministic, and did not vary here.")
    if any(map(varies, flagged)):
        findings.append("Varies although deterministic algorithms are on, and does not raise.")
    if raised and "raises" not in kinds:
        findings.append("Raises, and torch does not document it.")
    if "raises" in kinds and any(entry["outcome"] == "ran" for entry in flagged) and not raised:
        findings.append("Documented as raising, and ran.")
    if any(_is_fixed(row["conditions"]["patched"]) for row in raised):
        findings.append(
            "Raises, although a deterministic version exists: the patched op gave one output."
        )
    return findings or ["As documented."]


def varies(entry: Mapping[str, Any]) -> bool:
    """Return whether a case gave more than one output in a condition."""
    return bool(entry["outcome"] == "ran" and entry["spread"]["distinct"] > 1)


def _is_fixed(entry: Mapping[str, Any]) -> bool:
    return bool(entry["outcome"] == "ran" and entry["spread"]["distinct"] == 1)
