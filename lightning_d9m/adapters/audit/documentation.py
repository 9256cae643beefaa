"""What torch documents of an op, and how what was measured stands to it. Imports no torch."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_d9m.errors import SettingError

Kind = Literal["switches", "raises"]

_HEADINGS: dict[Kind, str] = {
    "switches": r"will act\s+deterministically when ``mode=True``:",
    "raises": r"will throw a\s+:class:`RuntimeError` when ``mode=True``:",
}


@dataclass(frozen=True)
class Line:
    """One line of the docstring of ``torch.use_deterministic_algorithms``.

    Attributes:
        kind: ``"switches"`` to a deterministic implementation, or ``"raises"``.
        name: Such as ``"torch.nn.AvgPool3d"``.
        text: The whole line.
        devices: The kinds of device that it speaks of; empty for all.
    """

    kind: Kind
    name: str
    text: str
    devices: tuple[str, ...]


def read_documentation(docstring: str) -> tuple[Line, ...]:
    """Read both lists of the docstring of ``torch.use_deterministic_algorithms``.

    Raises:
        SettingError: A list is not there any more, so that nothing can be checked.
    """
    lines: list[Line] = []
    for kind, heading in _HEADINGS.items():
        start = re.search(heading, docstring)
        rest = docstring[start.end() :] if start else ""
        listed = re.split(r"\n\s*\n(?=\s*[A-Z])", rest)[0]
        for bullet in re.split(r"\n\s*\* ", listed)[1:]:
            text = " ".join(bullet.split())
            name = re.match(r":\w+:`([\w.]+)`", text)
            if name:
                devices = tuple(kind for kind in ("cpu", "cuda") if kind.upper() in text)
                lines.append(Line(kind, name[1], text, devices))
        if not lines or lines[-1].kind != kind:
            raise SettingError(
                "The docstring of torch.use_deterministic_algorithms no longer has the list of ops "
                f"that it calls {kind!r} here, in the form that is read. The audit cannot check "
                "the documentation of this torch."
            )
    return tuple(lines)


def find_lines(
    lines: Iterable[Line], names: Iterable[tuple[str, str]], device: str
) -> tuple[Line, ...]:
    """Return the lines that speak of an op on a kind of device.

    Args:
        lines: The documentation.
        names: Pairs of a name and of words that the line must hold.
        device: ``"cpu"``, ``"cuda"``, ...
    """
    wanted = tuple(names)
    return tuple(
        line
        for line in lines
        if (not line.devices or device in line.devices)
        and any(line.name == name and words in line.text for name, words in wanted)
    )


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
