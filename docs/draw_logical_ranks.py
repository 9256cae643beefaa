"""Draw the tree of eight logical ranks on two, three and four processes.

python docs/draw_logical_ranks.py writes docs/images/logical-ranks.svg.
"""

from pathlib import Path

from lightning_d9m.integrations.strategies.sums.tree import Blocks, find_roots

LEAVES = 8
STEP = 36
ROW = 46
TOP = 52
PANEL = LEAVES * STEP + 40
COLORS = ("#4c78a8", "#e8833a", "#54a24b", "#b279a2")
STYLE = """<style>
text { font: 13px system-ui, "DejaVu Sans", sans-serif; text-anchor: middle; fill: #1b1f24; }
path { stroke: #8c959f; } circle { stroke: #8c959f; } .shared { fill: #fff; }
.sent { stroke: #1b1f24; stroke-width: 3; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .shared { fill: #161b22; }
  .sent { stroke: #fff; } }
</style>"""


def list_nodes() -> list[range]:
    """Return all nodes of the tree, level by level from the leaves."""
    return [
        range(start, start + width) for width in (1, 2, 4, 8) for start in range(0, LEAVES, width)
    ]


def place(node: range, left: float) -> tuple[float, float]:
    """Return the center of a node."""
    level = (node.stop - node.start).bit_length() - 1
    return left + STEP * (node.start + node.stop) / 2, TOP + ROW * (3 - level)


def draw_panel(processes: int, left: float) -> list[str]:
    """Draw the tree, with each node in the color of the process that computes it alone."""
    blocks = Blocks(LEAVES, processes)
    roots = [find_roots(blocks.of(process), LEAVES) for process in range(processes)]
    title = f"{processes} processes"
    parts = [f'<text x="{left + LEAVES * STEP / 2}" y="24">{title}</text>']
    nodes = list_nodes()
    for node in nodes:
        width = node.stop - node.start
        if width > 1:
            x, y = place(node, left)
            for start in (node.start, node.start + width // 2):
                cx, cy = place(range(start, start + width // 2), left)
                parts.append(f'<path d="M{x} {y}L{cx} {cy}" fill="none"/>')
    for node in nodes:
        x, y = place(node, left)
        owners = {
            process
            for process in range(blocks.processes)
            for leaf in range(node.start, node.stop)
            if leaf in blocks.of(process)
        }
        look = f'fill="{COLORS[min(owners)]}"' if len(owners) == 1 else 'class="shared"'
        if any(node in own for own in roots):
            look += ' class="sent"'
        parts.append(f'<circle cx="{x}" cy="{y}" r="11" {look}/>')
        if node.stop - node.start == 1:
            parts.append(f'<text x="{x}" y="{y + 30}">{node.start}</text>')
    return parts


def draw() -> str:
    """Return the picture."""
    width, height = 3 * PANEL, TOP + 3 * ROW + 50
    parts = [
        part
        for number, count in enumerate((2, 3, 4))
        for part in draw_panel(count, number * PANEL + 20)
    ]
    about = "One tree over eight logical ranks, computed by two, three and four processes"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{about}</title>",
            STYLE,
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_name("images").joinpath("logical-ranks.svg").write_text(draw())
