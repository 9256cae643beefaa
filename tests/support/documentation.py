"""The lists of ops in the docstring of ``torch.use_deterministic_algorithms``."""

import re
from typing import NamedTuple

NAME = r":\w+:`([\w.]+)`"


class DocumentedLine(NamedTuple):
    """One op of a line of the docstring: a line that names several ops becomes several."""

    kind: str  # "switches" to a deterministic implementation, or "raises"
    name: str  # such as "torch.nn.AvgPool3d"
    text: str  # the whole line
    devices: tuple[str, ...]  # that it is about; empty for all


def read_documentation(docstring: str) -> list[DocumentedLine]:
    """Read both lists of the docstring of ``torch.use_deterministic_algorithms``."""
    lines: list[DocumentedLine] = []
    # The text before the first list, and both: torch has no list of these ops but this text.
    parts = re.split(r"will (?:act|throw)\s[^*]*?when ``mode=True``:", docstring)
    for kind, part in zip(("switches", "raises"), parts[1:], strict=True):
        # A list ends with the first paragraph after it.
        listed = re.split(r"\n\s*\n(?=\s*[A-Z])", part)[0]
        for bullet in re.split(r"\n\s*\* ", listed)[1:]:
            text = " ".join(bullet.split())
            if head := re.match(rf"{NAME}(?:(?:, and|,| and) {NAME})*", text):
                devices = tuple(one for one in ("cpu", "cuda", "mps", "xpu") if one.upper() in text)
                names = re.findall(NAME, head[0])
                lines += [DocumentedLine(kind, name, text, devices) for name in names]
    return lines
