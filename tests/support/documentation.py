"""The lists of ops in the docstring of ``torch.use_deterministic_algorithms``."""

import re
from dataclasses import dataclass
from typing import Literal

NAME = r":\w+:`([\w.]+)`"


@dataclass(frozen=True)
class DocumentedLine:
    """One op of one line of the docstring of ``torch.use_deterministic_algorithms``.

    Attributes:
        kind: ``"switches"`` to a deterministic implementation, or ``"raises"``.
        name: Such as ``"torch.nn.AvgPool3d"``; a line that names several ops becomes several.
        text: The whole line.
        devices: The types of device that it is about; empty for all.
    """

    kind: Literal["switches", "raises"]
    name: str
    text: str
    devices: tuple[str, ...]


def read_documentation(docstring: str) -> tuple[DocumentedLine, ...]:
    """Read both lists of the docstring of ``torch.use_deterministic_algorithms``."""
    lines: list[DocumentedLine] = []
    kinds: tuple[Literal["switches", "raises"], ...] = ("switches", "raises")
    # The text before the first list, and both of them.
    # torch has no list of these ops but this text, and no tag on them.
    parts = re.split(r"will (?:act|throw)\s[^*]*?when ``mode=True``:", docstring)
    for kind, part in zip(kinds, parts[1:], strict=False):
        # A list ends with the first paragraph after it.
        listed = re.split(r"\n\s*\n(?=\s*[A-Z])", part)[0]
        for bullet in re.split(r"\n\s*\* ", listed)[1:]:
            text = " ".join(bullet.split())
            if head := re.match(rf"{NAME}(?:(?:, and|,| and) {NAME})*", text):
                devices = tuple(
                    kind for kind in ("cpu", "cuda", "mps", "xpu") if kind.upper() in text
                )
                names = re.findall(NAME, head[0])
                lines += [DocumentedLine(kind, name, text, devices) for name in names]
    assert {line.kind for line in lines} == {*kinds}, "the docstring has another form"
    return tuple(lines)
