"""What ``d9m audit ops`` says of its rows: for a terminal, as JSON, Markdown and a plot."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_d9m.audit.ops.verdict import judge_op
from lightning_d9m.output.markdown import markdown_table, short
from lightning_d9m.output.svg_charts import draw_dots

CONDITION_TITLES = {
    "default": "torch",
    "deterministic": "deterministic",
    "ours": "ours",
    "oracle": "oracle",
}
_INTRODUCTION = """\
Each case ran {runs} times (fewer where its time was up) in four arms: torch as it is; torch with
`use_deterministic_algorithms(True)`; ours, which is a session with `patch_ops`; and as oracle one
thread in float64. *outputs* is the number of distinct outputs; Vs, Vermv and Vc are means over the
runs against the first run of the same arm; *error* is Vermv against the oracle; *time* is a ratio
to that of torch as it is."""


def summarise(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the audit as one JSON object: settings, one entry for each op, and all rows."""
    by_op: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_op[row["op"]].append(row)
    ops = []
    for op, cases in by_op.items():
        arms = {arm: [row["arms"][arm] for row in cases] for arm in CONDITION_TITLES}
        ops.append(
            {
                "op": op,
                "entry": cases[0].get("entry", op),
                "cases": len(cases),
                "findings": judge_op(cases),
                "varied": {arm: any(map(varies, entries)) for arm, entries in arms.items()},
                "ratio": {arm: _median_ratio(arms[arm]) for arm in ("deterministic", "ours")},
            }
        )
    return {"settings": dict(settings), "ops": ops, "rows": list(rows)}


def varies(arm: Mapping[str, Any]) -> bool:
    """Say whether an arm gave more than one output."""
    return bool(arm["outcome"] == "ran" and arm["spread"]["distinct"] > 1)


def find_broken(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cases in which ours gave more than one output."""
    return [row["key"] for row in rows if varies(row["arms"]["ours"])]


def render_findings(summary: Mapping[str, Any]) -> str:
    """Return what is to be said of the ops, the most telling first, for a terminal."""
    lines = []
    quiet = 0
    for entry in sorted(summary["ops"], key=lambda entry: not entry["varied"]["default"]):
        if not entry["varied"]["default"] and entry["findings"] == ["As documented."]:
            quiet += 1
            continue
        mark = "varies" if entry["varied"]["default"] else "steady"
        lines.append(f"{entry['op']}: {mark}. {' '.join(entry['findings'])}")
    varied = sum(entry["varied"]["default"] for entry in summary["ops"])
    lines.append("")
    lines.append(
        f"Ops: {len(summary['ops'])}, in {len(summary['rows'])} cases; varied: {varied}; neither "
        f"varied nor documented to vary: {quiet}."
    )
    return "\n".join(lines)


def render_markdown(summary: Mapping[str, Any]) -> str:
    """Return the whole audit as a page."""
    settings = summary["settings"]
    facts = ", ".join(f"{name} {settings[name]}" for name in ("torch", "device", "threads"))
    parts = [
        "# Audit of ops",
        f"{facts}.",
        _INTRODUCTION.format(runs=settings["runs"]),
        "## Findings",
        markdown_table(
            ("op", "varies", "with the flag", "ours varies", "finding"),
            [
                (
                    f"`{entry['op']}`",
                    *("yes" if entry["varied"][a] else "no" for a in list(CONDITION_TITLES)[:3]),
                    " ".join(entry["findings"]),
                )
                for entry in summary["ops"]
            ],
        ),
        "## Cases",
        markdown_table(
            ("case", "arm", "outputs", "runs", "Vs", "Vermv", "Vc", "error", "µs", "time"),
            [line for row in summary["rows"] for line in _lines(row)],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def render_plot(summary: Mapping[str, Any]) -> str:
    """Return the plot of each op's time in the deterministic arms over torch's default."""
    rows = [
        (
            entry["op"] + (" *" if entry["varied"]["default"] else ""),
            {CONDITION_TITLES[arm]: ratio for arm, ratio in entry["ratio"].items() if ratio},
        )
        for entry in summary["ops"]
    ]
    caption = "time over torch's default (median of the cases); * varied by default"
    title = f"Determinism's cost on {summary['settings']['device']}"
    return draw_dots(title, caption, rows, ("deterministic", "ours"))


def _median_ratio(arms: Sequence[Mapping[str, Any]]) -> float | None:
    ratios = sorted(arm["ratio"] for arm in arms if arm.get("ratio"))
    return ratios[len(ratios) // 2] if ratios else None


def _lines(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    lines = []
    for arm, name in CONDITION_TITLES.items():
        entry = row["arms"][arm]
        if entry["outcome"] != "ran":
            rest = (f"{entry['outcome']}: {entry['reason']}", *[""] * 7)
        else:
            spread = entry["spread"]
            figures = (spread["vs"], spread["vermv"], spread["vc"], entry.get("error"))
            rest = (
                str(spread["distinct"]),
                str(spread["runs"]),
                *(short(figure) for figure in figures),
                short(entry["microseconds"]),
                short(entry.get("ratio")),
            )
        lines.append((f"`{row['key']}`" if arm == "default" else "", name, *rest))
    return lines
