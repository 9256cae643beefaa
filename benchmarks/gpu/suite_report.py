"""The page of `gpu_suite.py`: what was measured, beside the goals."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from suite_journal import Journal, Row

GOAL_MEAN, GOAL_WORST, GOAL_SHARE = 1.5, 3.0, 0.8
COLUMNS = ("original", "torch_deterministic", "patched", "patched_fill_off")
SENTENCES = {
    "doctor": "A session opens; the digest kernel and both primitives have the CPU's bits.",
    "example": "Two trainings of a segmentation network on this device are equal bit for bit.",
    "tests": "The tests marked `cuda` pass.",
    "sizes": "Sums of more than 2**31 elements, a default device and bounded memory work.",
    "smoke": "Each patched op has torch's values, and two calls have equal bits.",
    "scans": "Scans of one row end in one output beside other work.",
    "steps": "The callback adds no wait for the device to a batch.",
    "portable": "Portable gradients and a step of AdamW have the CPU's bits.",
}


def render(journal: Journal, parts: Sequence[str]) -> str:
    """Return the results as Markdown: what failed and why, what was shown, then figures."""
    greeting = next((row for row in journal.rows if row["part"] == "suite"), {})
    lines = [f"# Measurements on {greeting.get('device', 'a device that is not known yet')}", ""]
    if greeting:
        named = {"torch": "torch", "date": "on", "rounds": "timed calls:", "calls": "compared:"}
        known = [f"{word} {greeting[name]}" for name, word in named.items() if name in greeting]
        stacks = [row["stack"] for row in journal.of_part("machine") if "stack" in row]
        if driver := stacks and stacks[0].get("device.driver"):
            known.append(f"driver: {driver}")
        lines += [f"{', '.join(known)}.", ""]
    lines += ["## Failed", ""]
    for row in _last_rows(journal):
        if row["task"] != "part" and "error" in row:
            lines.append(f"- {row['part']}, {row['task']}: {row['error']}")
        elif str(row.get("state", "")).startswith("failed"):
            lines.append(f"- {row['part']}: {row['state']}")
            if said := str(row.get("said", ""))[-1500:].strip():
                lines += ["", *(f"      {line}" for line in said.splitlines()), ""]
    ends = {part: journal.find_end(part) for part in parts}
    if lines[-2:] == ["## Failed", ""]:
        ended = sum(end["state"] == "complete" for end in ends.values())
        lines.append(f"Nothing, in {ended} of {len(parts)} parts.")
    lines += ["", "## Shown", "", *(f"- {finding}" for finding in list_findings(journal)), ""]
    lines += ["| part | state | rows | failed | seconds |", "| - | - | -: | -: | -: |"]
    for part, end in ends.items():
        rows = journal.of_tasks(part)
        failed = sum("error" in row for row in rows)
        seconds = f"{end['seconds']:.0f}" if "seconds" in end else ""
        lines.append(f"| {part} | {end['state']} | {len(rows)} | {failed} | {seconds} |")
    lines += ["", *_render_times(journal.of_tasks("speed"))]
    return "\n".join(lines) + "\n"


def list_findings(journal: Journal) -> Iterator[str]:
    """Yield what was shown, and figures compared with the goals; nothing of what did not run."""
    if any(row.get("dry") for row in journal.rows):
        yield "This was a dry run on a CPU: it shows only that the parts run."
        return
    for part, sentence in SENTENCES.items():
        if journal.find_end(part)["state"] == "complete":
            yield sentence
    counts = [row for row in journal.of_part("determinism") if "patched_outputs" in row]
    if counts:
        several = [row["op"] for row in counts if row["patched_outputs"] != 1]
        yield f"Patched ops with several outputs for one input: {_join(several)}."
        single = [row["op"] for row in counts if row["original_outputs"] == 1]
        yield f"Originals with one output, which cannot serve as a control: {_join(single)}."
    times = [row for row in journal.of_part("speed") if "ratio" in row]
    if ratios := [row["ratio"] for row in times if row["status"] != "exempt"]:
        yield (
            f"Patched over original: geometric mean {statistics.geometric_mean(ratios):.2f} (goal "
            f"{GOAL_MEAN}), worst {max(ratios):.2f} (goal {GOAL_WORST})."
        )
        slower = {
            row["op"]
            for row in times
            if "torch_deterministic" in row
            and row["patched"]["device_us"] >= row["torch_deterministic"]["device_us"]
        }
        yield f"Not faster than torch's deterministic version on a shape: {_join(slower)}."
    shares = [row["share_of_copy_rate"] for row in journal.of_part("digest") if _is_large(row)]
    if shares:
        yield (
            f"Digest: {min(shares):.2f} of the copy's read rate for the largest tensors (goal "
            f"{GOAL_SHARE})."
        )
    if said := {text for row in _last_rows(journal) for text in row.get("warnings", [])}:
        yield f"Warnings: {_join(said)}."


def _is_large(row: Row) -> bool:
    return "share_of_copy_rate" in row and row["bytes"] >= 2**28


def _last_rows(journal: Journal) -> list[Row]:
    return [*{(row["part"], row["task"]): row for row in journal.rows}.values()]


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"


def _render_times(rows: Sequence[Row]) -> list[str]:
    rows = [row for row in rows if COLUMNS[0] in row]
    if not rows:
        return []
    lines = [
        "## Ops",
        "",
        "Microseconds on the device / on the host / MB of new memory; medians.",
        "",
        f"| op | {' | '.join(column.replace('_', ' ') for column in COLUMNS)} | ratio |",
        f"| - |{' -: |' * (len(COLUMNS) + 1)}",
    ]
    for row in rows:
        cells = [_render_cell(row.get(column)) for column in COLUMNS]
        task = str(row["task"]).replace(" | ", ", ")
        lines.append(f"| {task} | {' | '.join(cells)} | {row['ratio']:.2f} |")
    return [*lines, ""]


def _render_cell(found: Row | None) -> str:
    if found is None:
        return ""
    if found["host_us"] is None:
        return f"{found['device_us']:.0f}"
    return f"{found['device_us']:.0f} / {found['host_us']:.0f} / {found['peak_mb']:.1f}"
