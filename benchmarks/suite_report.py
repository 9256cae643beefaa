"""The page of `gpu_suite.py`: what was measured, beside the goals."""

import math
import statistics
from collections.abc import Iterable, Sequence

from suite_client import Journal, Row

GOAL_MEAN, GOAL_WORST, GOAL_MODEL, GOAL_SHARE = 1.5, 3.0, 1.05, 0.8
COLUMNS = ("original", "torch_deterministic", "patched", "patched_fill_off")
MODEL_COLUMNS = ("plain", "fill_on", "fill_off")


def render(journal: Journal, parts: Sequence[str]) -> str:
    """Return the results as Markdown."""
    greeting = next((row for row in journal.rows if row["part"] == "suite"), {})
    lines = [
        f"# Measurements on {greeting.get('device', 'an unknown device')}",
        "",
        (
            f"torch {greeting.get('torch')}, {greeting.get('date')}; "
            f"{greeting.get('rounds')} timed and {greeting.get('calls')} compared calls."
        ),
        "",
        "| part | state | rows | failed | seconds | host MB | device MB |",
        "| - | - | -: | -: | -: | -: | -: |",
    ]
    for part in parts:
        rows = [row for row in journal.of_part(part) if row["task"] != "part"]
        failed = sum("error" in row for row in rows)
        ended = next((row for row in journal.of_part(part) if row["task"] == "part"), {})
        sizes = [ended.get(name) for name in ("seconds", "host_mb", "device_mb")]
        cells = " | ".join("" if size is None else f"{size:.0f}" for size in sizes)
        lines.append(f"| {part} | {find_state(journal, part)} | {len(rows)} | {failed} | {cells} |")
    lines += ["", *(f"- {finding}" for finding in list_findings(journal)), ""]
    lines += _render_times(journal.of_part("speed"), COLUMNS, "op")
    lines += _render_times(journal.of_part("models"), MODEL_COLUMNS, "model")
    lines += ["## Failed", ""]
    for row in _last_rows(journal):
        if "error" in row:
            lines.append(f"- {row['part']}, {row['task']}: {row['error']}")
    return "\n".join(lines) + "\n"


def find_state(journal: Journal, part: str) -> str:
    """Return whether a part has ended, and how."""
    ended = [row for row in journal.of_part(part) if row["task"] == "part"]
    if not ended:
        return "not reached"
    return str(ended[0]["state"])


def list_findings(journal: Journal) -> list[str]:
    """Return speed and repeatability compared with the goals."""
    times = [row for row in journal.of_part("speed") if "ratio" in row]
    ratios = [row["ratio"] for row in times if row["status"] != "exempt"]
    counts = [row for row in journal.of_part("determinism") if "patched_outputs" in row]
    found = journal.of_part("models")
    models = [row["fill_on_ratio"] for row in found if "fill_on_ratio" in row]
    shares = [row["share_of_copy_rate"] for row in journal.of_part("digest") if _is_large(row)]
    mean = statistics.geometric_mean(ratios) if ratios else math.nan
    slower = {
        row["op"]
        for row in times
        if "torch_deterministic" in row
        and row["patched"]["device_us"] >= row["torch_deterministic"]["device_us"]
    }
    return [
        (
            f"Patched over original: geometric mean {mean:.2f} (goal {GOAL_MEAN}), worst "
            f"{max(ratios, default=math.nan):.2f} (goal {GOAL_WORST})."
        ),
        (f"Whole models: worst {max(models, default=math.nan):.2f} (goal {GOAL_MODEL})."),
        (
            f"Digest: {min(shares, default=math.nan):.2f} of the copy's read rate for the largest "
            f"tensors (goal {GOAL_SHARE})."
        ),
        (
            "Patched ops with several outputs for one input: "
            f"{_join(row['op'] for row in counts if row['patched_outputs'] != 1)}."
        ),
        (
            "Originals with one output, which cannot serve as a control: "
            f"{_join(row['op'] for row in counts if row['original_outputs'] == 1)}."
        ),
        (f"Not faster than torch's deterministic version on a shape: {_join(slower)}."),
        (
            "Warnings: "
            f"{_join(text for row in _last_rows(journal) for text in row.get('warnings', []))}."
        ),
    ]


def _is_large(row: Row) -> bool:
    return "share_of_copy_rate" in row and row["bytes"] >= 2**28


def _last_rows(journal: Journal) -> list[Row]:
    return [*{(row["part"], row["task"]): row for row in journal.rows}.values()]


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"


def _render_times(rows: Sequence[Row], columns: Sequence[str], kind: str) -> list[str]:
    lines = [
        f"## {kind.capitalize()}s",
        "",
        "Microseconds on the device / on the host / MB of new memory; medians.",
        "",
        f"| {kind} | {' | '.join(column.replace('_', ' ') for column in columns)} | ratio |",
        f"| - |{' -: |' * (len(columns) + 1)}",
    ]
    for row in rows:
        if row["task"] == "part" or columns[0] not in row:
            continue
        cells = [_render_cell(row.get(column)) for column in columns]
        ratio = row.get("ratio", row.get("fill_on_ratio", math.nan))
        task = str(row["task"]).replace(" | ", ", ")
        lines.append(f"| {task} | {' | '.join(cells)} | {ratio:.2f} |")
    return [*lines, ""]


def _render_cell(found: Row | None) -> str:
    if found is None:
        return ""
    if found["host_us"] is None:
        return f"{found['device_us']:.0f}"
    return f"{found['device_us']:.0f} / {found['host_us']:.0f} / {found['peak_mb']:.1f}"
