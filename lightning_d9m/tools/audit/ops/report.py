"""The report of ``d9m audit ops``: for a terminal, as JSON and Markdown."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_d9m.text import pluralize
from lightning_d9m.tools.output.columns import Column, format_markdown_table, short

CONDITIONS = ("oracle", "default", "deterministic", "patched")
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
    ops = [
        {
            "op": op,
            "cases": len(cases),
            "findings": judge_op(cases),
            "varied": {
                name: any(varies(row["conditions"][name]) for row in cases) for name in CONDITIONS
            },
        }
        for op, cases in by_op.items()
    ]
    return {"settings": dict(settings), "ops": ops, "rows": list(rows)}


def find_problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each case whose patched op varied, or failed where torch's op ran.

    An audit in which no patched op ran is a problem, too: it says nothing.
    """
    problems = []
    for row in rows:
        default, patched = (row["conditions"][name] for name in ("default", "patched"))
        if varies(patched):
            problems.append(f"the patched op varied: {row['key']}")
        elif default["outcome"] == "ran" and patched["outcome"] == "failed":
            problems.append(f"the patched op failed: {row['key']}: {patched['reason']}")
    if not any(row["conditions"]["patched"]["outcome"] == "ran" for row in rows):
        problems.append("no patched op ran, so nothing was measured")
    return problems


def list_findings(summary: Mapping[str, Any]) -> list[str]:
    """Return the findings for a terminal, the ops that vary first."""
    ops, problems = summary["ops"], find_problems(summary["rows"])
    # What varies is what the reader looks for.
    varied = [entry for entry in ops if entry["varied"]["default"]]
    steady = [entry for entry in ops if entry not in varied]
    odd = [entry for entry in steady if entry["findings"]]
    found = pluralize(len(problems), "problem") if problems else "No patched op varied or failed"
    return [
        (
            f"{found}. Ops: {len(ops)}, in {len(summary['rows'])} cases; varied: "
            f"{len(varied)}; neither varied nor refused: {len(steady) - len(odd)}."
        ),
        *problems,
        "",
        *(" ".join((f"{entry['op']}: varies.", *entry["findings"])) for entry in varied),
        *(f"{entry['op']}: steady. {' '.join(entry['findings'])}" for entry in odd),
    ]


def render_markdown(summary: Mapping[str, Any]) -> str:
    """Return the whole audit as a page."""
    settings = summary["settings"]
    facts = ", ".join(f"{name} {settings[name]}" for name in ("torch", "device", "threads"))
    figures = [(row, name) for row in summary["rows"] for name in CONDITIONS]
    parts = [
        *("# Audit of ops", f"{facts}.", _INTRODUCTION.format(runs=settings["runs"])),
        *("## Findings", format_markdown_table(_OPS, summary["ops"])),
        *("## Cases", format_markdown_table(_CASES, figures)),
    ]
    return "\n\n".join(parts) + "\n"


def _read(*path: str) -> Callable[[Any], str]:
    """Return what reads a figure of (row, condition); nothing where the case did not run."""

    def read(case: tuple[Mapping[str, Any], str]) -> str:
        found: Any = case[0]["conditions"][case[1]]
        if found["outcome"] != "ran":
            return f"{found['outcome']}: {found['reason']}" if path[-1] == "distinct" else ""
        for key in path:
            found = found.get(key)
        return short(found)

    return read


def _varied(condition: str) -> Callable[[Any], str]:
    return lambda entry: "yes" if entry["varied"][condition] else "no"


_OPS: tuple[Column[Any], ...] = (
    Column("op", lambda entry: f"`{entry['op']}`"),
    Column("varies", _varied("default")),
    Column("with the flag", _varied("deterministic")),
    Column("patched varies", _varied("patched")),
    Column("finding", lambda entry: " ".join(entry["findings"])),
)
_CASES: tuple[Column[Any], ...] = (
    Column("case", lambda case: f"`{case[0]['key']}`" if case[1] == CONDITIONS[0] else ""),
    Column("condition", lambda case: case[1]),
    Column("outputs", _read("spread", "distinct")),
    Column("runs", _read("spread", "runs")),
    Column("Vs", _read("spread", "vs")),
    Column("Vermv", _read("spread", "vermv")),
    Column("Vc", _read("spread", "vc")),
    Column("error", _read("error")),
    Column("µs", _read("microseconds")),
    Column("time", _read("ratio")),
)


def judge_op(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences about an op with torch's flag on, or the reason why it was not measured."""
    # Cases of one op differ in shape: one case that varies is enough.
    default, flagged, patched = (
        [row["conditions"][name] for row in rows] for name in CONDITIONS[1:]
    )
    if not any(entry["outcome"] == "ran" for entry in default):
        reasons = sorted({entry["reason"] for entry in default})
        return [f"Not measured: {'; '.join(reasons)}"]
    findings = []
    if any(map(varies, flagged)):
        findings.append("Varies although deterministic algorithms are on, and does not raise.")
    raised = [entry["outcome"] == "raised" for entry in flagged]
    pairs = zip(raised, patched, strict=True)
    if any(refused and one["outcome"] == "ran" and not varies(one) for refused, one in pairs):
        # A replacement that works shows that torch could have one.
        findings.append("Torch refuses it with the flag on, and the patched op gave one output.")
    elif any(raised):
        findings.append("Torch refuses it with the flag on.")
    return findings


def varies(entry: Mapping[str, Any]) -> bool:
    """Return whether a case gave more than one output in a condition."""
    return bool(entry["outcome"] == "ran" and entry["spread"]["distinct"] > 1)
