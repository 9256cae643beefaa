"""Reader of the docstring of ``torch.use_deterministic_algorithms``. It does not import torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_d9m.errors import SettingError

DocumentedBehavior = Literal["switches", "raises"]

_HEADINGS: dict[DocumentedBehavior, str] = {
    "switches": r"will act\s+deterministically when ``mode=True``:",
    "raises": r"will throw a\s+:class:`RuntimeError` when ``mode=True``:",
}
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_NAME = r":\w+:`([\w.]+)`"
_NAMES = re.compile(rf"{_NAME}(?:(?:, and|,| and) {_NAME})*")
_MODE = re.compile(r"- ``(\w+)``")


@dataclass(frozen=True)
class Line:
    """One op of one line of the docstring of ``torch.use_deterministic_algorithms``.

    Attributes:
        kind: ``"switches"`` to a deterministic implementation, or ``"raises"``.
        name: Such as ``"torch.nn.AvgPool3d"``; a line that names several ops becomes several.
        text: The whole line.
        devices: The types of device that it is about; empty for all.
        modes: The modes of a list below it, such as ``"bilinear"``; empty for all.
    """

    kind: DocumentedBehavior
    name: str
    text: str
    devices: tuple[str, ...]
    modes: tuple[str, ...] = ()


def read_documentation(docstring: str) -> tuple[Line, ...]:
    """Read both lists of the docstring of ``torch.use_deterministic_algorithms``.

    Raises:
        SettingError: A list is missing.
    """
    lines: list[Line] = []
    for kind, heading in _HEADINGS.items():
        start = re.search(heading, docstring)
        rest = docstring[start.end() :] if start else ""
        listed = re.split(r"\n\s*\n(?=\s*[A-Z])", rest)[0]
        for bullet in re.split(r"\n\s*\* ", listed)[1:]:
            text = " ".join(bullet.split())
            if head := _NAMES.match(text):
                devices = tuple(kind for kind in _DEVICES if kind.upper() in text)
                modes = tuple(_MODE.findall(text))
                names = re.findall(_NAME, head[0])
                lines += [Line(kind, name, text, devices, modes) for name in names]
        if not lines or lines[-1].kind != kind:
            raise SettingError(
                f"The docstring of torch.use_deterministic_algorithms has no list of kind {kind!r} "
                "in the expected form, so the ops of this torch cannot be checked. Update "
                "read_documentation to the new form."
            )
    return tuple(lines)


def find_documented_lines(
    lines: Iterable[Line], names: Iterable[str], device: str
) -> tuple[Line, ...]:
    """Return the lines about an op, by its names and words of the line, on a type of device."""
    wanted = [name.partition(" ") for name in names]
    return tuple(
        line
        for line in lines
        if (not line.devices or device in line.devices)
        and any(line.name == name and words in line.text for name, _, words in wanted)
    )
