"""Write the diagrams of the documentation: docs/images/*.svg, in a light and a dark setting.

Run it with: python docs/draw_diagrams.py
"""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "images"
_STYLE = """
text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1b1f24; }
.soft { fill: #59636e; font-size: 12px; }
.box { fill: #f6f8fa; stroke: #8c959f; } .hot { fill: #ffe9e6; stroke: #b3261e; }
line { stroke: #8c959f; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .soft { fill: #9aa4af; }
  .box { fill: #161b22; stroke: #6e7681; } .hot { fill: #3a1714; stroke: #ff8379; } }
"""


def element(tag: str, *content: str, **attributes: object) -> str:
    """Return an SVG element.

    Args:
        tag: Its name.
        content: Elements within it, already SVG.
        attributes: Its attributes, which are escaped; ``_`` stands for ``-``, and a trailing one
            is removed. Floats are rounded to a tenth.

    >>> element("circle", cx=1.25, cy=2, class_="a&b")
    '<circle cx="1.2" cy="2" class="a&amp;b"/>'
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="'
        f'{f"{value:.1f}" if isinstance(value, float) else escape(str(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{written}>{''.join(content)}</{tag}>" if content else f"<{tag}{written}/>"


def text(x: float, y: float, words: str, anchor: str = "start", **attributes: object) -> str:
    """Return a line of text; ``words`` are escaped."""
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    """Return a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def draw(name: str, width: int, height: int, label: str, *parts: str) -> None:
    """Write a diagram."""
    style = element("style", _STYLE)
    namespace = {"xmlns": "http://www.w3.org/2000/svg"}
    drawing = element(
        "svg",
        style,
        *parts,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
        **namespace,
    )
    (FOLDER / f"{name}.svg").write_text(drawing + "\n")


def box(x: int, y: int, width: int, words: str, below: str = "", kind: str = "box") -> str:
    """Return a box with a title and a line below it."""
    height = 48 if below else 32
    parts = [
        element("rect", x=x, y=y, width=width, height=height, rx=5, class_=kind),
        text(x + width / 2, y + 21, words, "middle"),
    ]
    if below:
        parts.append(text(x + width / 2, y + 39, below, "middle", class_="soft"))
    return "".join(parts)


def draw_locate() -> None:
    """Draw how `d9m locate` narrows from the run to the operation."""
    looks = (
        ("whole run", "weights, batch, loss, gradients", "step 57"),
        ("operations of that step", "every module and op", "aten.index_put, model.py:41"),
        ("that op alone, 20 times", "at once, in the program", "806 ulps; 20 different outputs"),
    )
    parts = []
    for number, (look, probes, found) in enumerate(looks):
        y, x = 10 + 66 * number, 10 + 26 * number
        parts.append(box(x, y, 260, look, probes))
        parts.append(box(400, y + 8, 290, found, kind="hot"))
        parts.append(line(x + 260, y + 24, 400, y + 24))
        if number:
            parts.append(line(x + 20, y - 18, x + 20, y))
    draw("locate", 700, 208, "Each look is a pair of runs and narrows to one place", *parts)


def draw_buckets() -> None:
    """Draw how fixed buckets sum gradients."""
    parts = [text(10, 20, "parameters, in their fixed order")]
    names = ("layer4.weight", "layer3.weight", "layer2.weight", "layer1.weight")
    for number, name in enumerate(names):
        x = 10 + 172 * number
        parts.append(box(x, 30, 160, name))
        parts.append(line(x + 80, 62, x + 80, 110))
    parts.append(box(10, 110, 332, "bucket 0", "fixed offsets, summed as soon as it is full"))
    parts.append(box(354, 110, 332, "bucket 1", "while the backward pass still runs"))
    parts += [line(x, 158, x, 196) for x in (176, 520)]
    parts.append(box(10, 196, 676, "sum over ranks", "the same order of additions in every run"))
    draw("buckets", 696, 256, "Gradients are summed in buckets with fixed offsets", *parts)


def draw_seeds() -> None:
    """Draw how the seed reaches a worker."""
    parts = [box(270, 10, 160, "seed", "seed=42")]
    for rank in range(2):
        x = 90 + 350 * rank
        parts += [line(350, 58, x + 80, 96), box(x, 96, 160, f"rank {rank}")]
        for worker in range(2):
            left = x - 80 + 170 * worker
            parts += [
                line(x + 80, 128, left + 75, 166),
                box(left, 166, 150, f"worker {worker}", "Python, NumPy, torch"),
                line(left + 75, 214, left + 75, 252),
                box(left, 252, 150, "its samples", "by epoch and index"),
            ]
    draw("seeds", 700, 312, "The seed, the rank, the epoch and the worker decide each draw", *parts)


if __name__ == "__main__":
    draw_locate()
    draw_buckets()
    draw_seeds()
