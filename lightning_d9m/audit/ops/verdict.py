"""How what was measured of an op stands to what torch documents of it. Imports no torch."""

from collections.abc import Mapping, Sequence
from typing import Any


def judge_op(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hold what was measured of one op on one device against the documentation.

    Args:
        rows: The rows of the op; each has ``arms`` and ``documented``, the kinds of its lines.

    Returns:
        Findings, as sentences; the one ``"As documented."`` where there is nothing else to say.
    """
    kinds = {kind for row in rows for kind in row["documented"]}
    default = [row["arms"]["default"] for row in rows]
    ran = [arm for arm in default if arm["outcome"] == "ran"]
    if not ran:
        reasons = sorted({arm["reason"] for arm in default})
        return [f"Not measured: {'; '.join(reasons)}"]
    flagged = [row["arms"]["deterministic"] for row in rows]
    raised = [row for row in rows if row["arms"]["deterministic"]["outcome"] == "raised"]
    varied = any(_varied(arm) for arm in ran)
    findings = []
    if varied and not kinds:
        findings.append("Varies, and torch does not document it.")
    if kinds and not varied:
        findings.append("Documented as nondeterministic, and did not vary here.")
    if any(_varied(arm) for arm in flagged):
        findings.append("Stays silent: varies although deterministic algorithms are on.")
    if raised and "raises" not in kinds:
        findings.append("Raises, and torch does not document it.")
    if "raises" in kinds and any(arm["outcome"] == "ran" for arm in flagged) and not raised:
        findings.append("Documented as raising, and ran.")
    if any(_is_fixed(row["arms"]["ours"]) for row in raised):
        findings.append("Raises, though a deterministic version exists: ours gave one output.")
    return findings or ["As documented."]


def _varied(arm: Mapping[str, Any]) -> bool:
    return bool(arm["outcome"] == "ran" and arm["spread"]["distinct"] > 1)


def _is_fixed(arm: Mapping[str, Any]) -> bool:
    return bool(arm["outcome"] == "ran" and arm["spread"]["distinct"] == 1)
