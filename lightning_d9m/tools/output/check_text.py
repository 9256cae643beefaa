"""The result of a check of a run, and of a run that was resumed from its checkpoints."""

import shlex
from collections.abc import Sequence
from operator import attrgetter

from lightning_d9m.engine.ledger.differences import describe_varying
from lightning_d9m.text import pluralize, printable
from lightning_d9m.tools.output.columns import Column, format_table, print_result
from lightning_d9m.tools.output.terminal import wrap
from lightning_d9m.tools.segments.check import CheckedSegment, CheckReport


def print_check(
    report: CheckReport, chosen: str, command: Sequence[str], *, resumed: bool = False
) -> None:
    """Print the verdict, a row for each segment, and why segments are not equal.

    Args:
        report: The result.
        chosen: The format, as for ``print_result``.
        command: The command that trains.
        resumed: Whether the run was made now, to be resumed from its checkpoints.
    """
    columns: list[Column[CheckedSegment]] = [
        Column("segment", lambda own: str(own.number), is_number=True),
        *([Column("saved", attrgetter("label"))] if resumed else []),
        Column("steps", lambda own: f"{own.first:,} to {own.last:,}"),
        Column("verdict", attrgetter("verdict"), meaning=attrgetter("verdict")),
        Column("first difference", lambda own: own.where),
    ]
    lines = [line for text in report.problems for line in wrap(printable(text))]
    if report.checked:
        lines += [*format_table(columns, report.checked).splitlines(), ""]
    for own in report.checked:
        if own.reason:
            until = f"Equal until step {own.equal_until:,}. " if own.where else ""
            text = f"Segment {own.number}: {until}{own.reason}".splitlines()
            lines += [*wrap(text[0]), *text[1:], ""]
    lines += [line for note in (*report.limits, *report.notes) for line in wrap(note)]
    if report.is_drawn and report.checked:
        numbers = ",".join(str(own.number) for own in report.checked)
        # A seed chooses by the whole ledger, which may still grow; numbers of segments stay.
        again = f"--only {numbers}" if report.choice is None else f"--choose {report.choice}"
        lines.append(f"choice: {again}")
    lines.append(f"ledgers: {report.output}")
    steps = []
    if pairs := [[report.run, own.ledgers[0]] for own in report.checked if own.where]:
        steps.append((f"d9m compare {printable(shlex.join(pairs[0]))}", "shows what differs"))
    # Whole runs may well agree where a resumed one does not.
    if pairs and (not resumed or any(own.verdict == "program" for own in report.checked)):
        locate = f"d9m locate -- {printable(shlex.join(command))}"
        steps.append((locate, "finds the step, module and line, if the program is the cause"))
    verdict = _state_verdict(report, resumed=resumed)
    print_result(chosen, report.as_json(), lines, verdict, steps=steps)


def _state_verdict(report: CheckReport, *, resumed: bool) -> str:
    """Return the verdict in one or two sentences."""
    if report.problems and not report.checked:
        return "different: the proof does not hold, so nothing was run."
    share = report.steps / max(1, report.last_step)
    parts = f"{len(report.equal)} of {pluralize(len(report.there), 'segment')}"
    steps = f"{share:.1%} of {pluralize(report.last_step, 'step')}"
    said = f"{parts} ({steps}) are what the program computes."
    if resumed:
        said = f"{parts} that resume from checkpoints of the run are equal to it."
    if report.verdict == "equal" and report.missed:
        said += f" This choice misses one wrong segment with probability {report.missed:.1%}."
    return f"{report.verdict}: {said} {describe_varying(report.varying_ops)}".rstrip()
