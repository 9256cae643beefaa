"""The report of ``d9m audit ops``: for a terminal, as JSON and Markdown."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from lightning_d9m.output.columns import Column, format_markdown_table, short
from lightning_d9m.text import pluralize

CONDITION_TITLES = {
    "default": "torch",
    "deterministic": "deterministic",
    "patched": "patched",
    "oracle": "oracle",
}
_Case: TypeAlias = tuple[Mapping[str, Any], str]
_INTRODUCTION = """\
Each case ran {runs} times (fewer if its time was over) in four conditions: torch as it is; torch
with `use_deterministic_algorithms(True)`; patched, which is a session with `patch_ops`; and the
oracle, which is one thread in float64. *outputs* is the number of distinct outputs; Vs, Vermv and
Vc are means over the runs against the first run in the same condition; *error* is Vermv against
the oracle; *time* is the ratio to torch as it is."""


def summarize(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the audit as one JSON object: settings, one entry for each op, and all rows."""
    by_op: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_op[row["op"]].append(row)
    ops = []
    for op, cases in by_op.items():
        entries = {name: [row["conditions"][name] for row in cases] for name in CONDITION_TITLES}
        ops.append(
            {
                "op": op,
                "cases": len(cases),
                "findings": judge_op(cases),
                "varied": {name: any(map(varies, found)) for name, found in entries.items()},
            }
        )
    return {"settings": dict(settings), "ops": ops, "rows": list(rows)}


def find_broken(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cases whose patched op gave more than one output."""
    return [row["key"] for row in rows if varies(row["conditions"]["patched"])]


def render_findings(summary: Mapping[str, Any]) -> str:
    """Return the findings for a terminal, the ops that vary first."""
    lines: list[str] = []
    quiet = 0
    for entry in sorted(summary["ops"], key=lambda entry: not entry["varied"]["default"]):
        if not entry["varied"]["default"] and entry["findings"] == ["As documented."]:
            quiet += 1
            continue
        mark = "varies" if entry["varied"]["default"] else "steady"
        lines.append(f"{entry['op']}: {mark}. {' '.join(entry['findings'])}")
    varied = sum(entry["varied"]["default"] for entry in summary["ops"])
    broken = find_broken(summary["rows"])
    verdict = f"{pluralize(len(broken), 'case')} of patched ops" if broken else "No patched op"
    head = (
        f"{verdict} varied. Ops: {len(summary['ops'])}, in {len(summary['rows'])} cases; varied: "
        f"{varied}; neither varied nor documented to vary: {quiet}."
    )
    return "\n".join([head, *(f"the patched op varied: {key}" for key in broken), "", *lines])


def render_markdown(summary: Mapping[str, Any]) -> str:
    """Return the whole audit as a page."""
    settings = summary["settings"]
    facts = ", ".join(f"{name} {settings[name]}" for name in ("torch", "device", "threads"))
    parts = [
        "# Audit of ops",
        f"{facts}.",
        _INTRODUCTION.format(runs=settings["runs"]),
        "## Findings",
        format_markdown_table(_OPS, summary["ops"]),
        "## Cases",
        format_markdown_table(
            _CASES, [(row, name) for row in summary["rows"] for name in CONDITION_TITLES]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _read_figure(case: _Case, *path: str) -> str:
    """Return a figure of a case in a condition; nothing where the case did not run."""
    found: Any = case[0]["conditions"][case[1]]
    if found["outcome"] == "ran":
        for key in path:
            found = found.get(key)
        return short(found)
    return f"{found['outcome']}: {found['reason']}" if path[-1] == "distinct" else ""


_OPS: tuple[Column[Mapping[str, Any]], ...] = (
    Column("op", lambda entry: f"`{entry['op']}`"),
    *(
        Column(title, lambda entry, name=name: "yes" if entry["varied"][name] else "no")  # type: ignore[misc]
        for title, name in (
            ("varies", "default"),
            ("with the flag", "deterministic"),
            ("patched varies", "patched"),
        )
    ),
    Column("finding", lambda entry: " ".join(entry["findings"])),
)
# A row, and one of its conditions.
_CASES: tuple[Column[_Case], ...] = (
    Column("case", lambda case: f"`{case[0]['key']}`" if case[1] == "default" else ""),
    Column("condition", lambda case: CONDITION_TITLES[case[1]]),
    *(
        Column(title, lambda case, path=path: _read_figure(case, *path))  # type: ignore[misc]
        for title, path in (
            ("outputs", ("spread", "distinct")),
            ("runs", ("spread", "runs")),
            ("Vs", ("spread", "vs")),
            ("Vermv", ("spread", "vermv")),
            ("Vc", ("spread", "vc")),
            ("error", ("error",)),
            ("µs", ("microseconds",)),
            ("time", ("ratio",)),
        )
    ),
)


def judge_op(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare the measured behavior of one op on one device with the documentation.

    Args:
        rows: The rows of the op; each has ``conditions``, and in ``documented`` the kinds of its
            lines.

    Returns:
        The findings as sentences. Without a difference the only one is ``"As documented."``.
    """
    kinds = {kind for row in rows for kind in row["documented"]}
    default = [row["conditions"]["default"] for row in rows]
    ran = [entry for entry in default if entry["outcome"] == "ran"]
    if not ran:
        reasons = sorted({entry["reason"] for entry in default})
        return [f"Not measured: {'; '.join(reasons)}"]
    flagged = [row["conditions"]["deterministic"] for row in rows]
    raised = [row for row in rows if row["conditions"]["deterministic"]["outcome"] == "raised"]
    varied = any(map(varies, ran))
    findings = []
    if varied and not kinds:
        findings.append("Varies, and torch does not document it.")
    if kinds and not varied:
        findings.append("Documented as nondeterministic, and did not vary here.")
    if any(map(varies, flagged)):
        findings.append("Varies although deterministic algorithms are on, and does not raise.")
    if raised and "raises" not in kinds:
        findings.append("Raises, and torch does not document it.")
    if "raises" in kinds and any(entry["outcome"] == "ran" for entry in flagged) and not raised:
        findings.append("Documented as raising, and ran.")
    patched = [row["conditions"]["patched"] for row in raised]
    if any(entry["outcome"] == "ran" and not varies(entry) for entry in patched):
        findings.append(
            "Raises, although a deterministic version exists: the patched op gave one output."
        )
    return findings or ["As documented."]


def varies(entry: Mapping[str, Any]) -> bool:
    """Return whether a case gave more than one output in a condition."""
    return bool(entry["outcome"] == "ran" and entry["spread"]["distinct"] > 1)
