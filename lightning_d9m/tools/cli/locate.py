"""``d9m locate``: run a command several times and narrow down where its runs diverge.

Two runs train at once, are compared step by step, and end at the first step that differs. The step
is then run again from the last checkpoint before it, with probes of its modules and
operations. Environment variables control the runs, so the program is not edited. A divergence that
does not occur again in a narrower look is reported as far as it was narrowed down.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from lightning_d9m.engine.control.settings import RECORD_SAVES
from lightning_d9m.engine.ledger.differences import Divergence, describe_varying
from lightning_d9m.engine.ledger.kinds import STATE
from lightning_d9m.errors import SettingError
from lightning_d9m.text import escape
from lightning_d9m.tools.cli.arguments import COMMAND, STATUS, get_command
from lightning_d9m.tools.history.bundle import LOCATE_JSON, list_source
from lightning_d9m.tools.launch.runs import Runs, make_output
from lightning_d9m.tools.lint.rules import Finding
from lightning_d9m.tools.locate.cause_lines import explains, find_cause_lines
from lightning_d9m.tools.locate.runner import Runner, RunPair
from lightning_d9m.tools.locate.search import Search, SearchResult, describe_place
from lightning_d9m.tools.output.columns import Column, format_table, print_result
from lightning_d9m.tools.output.comparison_text import CUT, format_field, list_one_sided
from lightning_d9m.tools.output.repeat_text import describe_power
from lightning_d9m.tools.output.terminal import print_lines, wrap
from lightning_d9m.tools.segments.segment import RecordedRun

if TYPE_CHECKING:
    from lightning_d9m.tools.comparison.numeric_difference import Magnitude
    from lightning_d9m.tools.locate.op_evidence import OpFinding

_MOST_SUSPECTS = 5
_INDENT = " " * 10
# A float32 has 24 bits: two that are 2**16 units apart agree in about 8, as many as bfloat16 has.
_MOST_ULPS = 2**16
_EXAMPLES = 3
_EXAMPLE_COLUMNS = [
    Column[tuple[str, str, str]](title, itemgetter(number))
    for number, title in enumerate(("index", "reference", "this run"))
]
_PAIR = 2
# A line of the program, with its file's path, is shown in full.
_LONGEST = 400
ARGUMENTS = f"""
expected:REFERENCE?  ledger of a run that exists: only the part in which it differs from THIS_RUN is
    run again
actual:THIS_RUN?  ledger of another run
--no-determinism  seed and record, but leave the determinism settings alone: shows what differs
    without lightning_d9m
--tries N  most pairs of whole runs, until two differ (default: 2)
--one-by-one  run the second training after the first, not beside it: for a program that needs a
    device, a port or a file for itself
-o, --output DIR  new folder for ledgers, logs and values
-v, --verbose  show more values that differ, and their bits
{COMMAND}"""
EXAMPLE = "d9m locate -- python train.py"
SETTINGS = {"tries": {"default": 2}}


def run(arguments: argparse.Namespace) -> int:
    """Locate; return 0 if no runs differ, 1 if something was found, 3 if a run was cut off."""
    command = get_command(arguments)
    # Files that the program saves are recorded, too, so that a difference in them is found; the
    # user may turn that off.
    variables = {RECORD_SAVES: os.environ.get(RECORD_SAVES, "1")}
    variables |= {"LIGHTNING_D9M_CONTROL": "off"} if arguments.no_determinism else {}
    if arguments.no_determinism and "PYTHONHASHSEED" not in os.environ:
        variables["PYTHONHASHSEED"] = "random"  # Python's default; run_once sets 0 otherwise
    if arguments.expected is not None and arguments.actual is None:
        raise SettingError(
            f"One run is given, {arguments.expected}. Give two, whose difference is searched for, "
            "or none, which trains twice."
        )
    paths = arguments.expected, arguments.actual
    known = None if None in paths else (RecordedRun(paths[0]), RecordedRun(paths[1]))
    # A part that runs again needs what the runs had, such as their hash seed.
    variables |= {} if known is None else known[0].variables
    output = make_output(arguments.output)
    runs = Runs(command, output, arguments.timeout)
    runner = Runner(runs, variables, beside=not arguments.one_by_one)
    suspects = find_cause_lines(command, "")
    if suspects and arguments.format == "text":
        # What the source shows already, before the first of many trainings ends.
        print("Lines that can make runs differ; the first look tests whether they do:")
        for one in suspects[:_MOST_SUSPECTS]:
            print_lines(wrap(f"{one.location}: {one.code} ({one.reason})", "    ", "  "))
        # Python keeps the output of a pipe until there is a block of it, and trainings take hours.
        print(flush=True)
    found = Search(runner, arguments.tries).locate(known)
    lines = list(
        describe(found, determinism=not arguments.no_determinism, verbose=arguments.verbose)
    )
    # For `d9m bundle`.
    facts = found.as_json()
    facts |= {"report": lines, "source": [*list_source(facts)]}
    if found.pair is not None:
        ledgers = (found.pair.comparison.expected, found.pair.comparison.actual)
        # Relative, so that the folder can be moved or sent with its ledgers.
        facts["ledgers"] = [os.path.relpath(ledger, output) for ledger in ledgers]
    (output / LOCATE_JSON).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    shown = found.as_json() | {"output": str(output)}
    print_result(arguments.format, shown, [*lines, f"ledgers:  {output}"])
    return STATUS[found.verdict]


def describe(found: SearchResult, *, determinism: bool, verbose: bool = False) -> Iterator[str]:
    """Yield the lines of the report: the cause, where it is, the evidence, the advice."""
    if found.cause is None:
        said = "no two runs differ" if found.runs else "the runs do not differ"
        cut = f", as far as they go; {CUT}" if found.verdict == "incomplete" else "."
        yield from wrap(f"{found.verdict}: {said}{cut}")
        if found.runs:
            yield from wrap(describe_power(found.runs, "--tries", 2))
        if found.runs and determinism:
            yield "To see what differs without the determinism settings, add --no-determinism."
    else:
        yield from wrap(f"{found.verdict}: {found.cause.kind}. {found.cause.text}")
        yield ""
        yield from _describe_moment(found)
        named = [finding for finding in found.lines if explains(finding.rule, found.explained)]
        yield from _describe_lines(found, named)
        if found.op is not None:
            yield from describe_op(found.op)
        magnitude = found.magnitude if found.op is None else found.op.magnitude
        if magnitude is not None:
            yield from _describe_magnitude(magnitude, verbose=verbose)
        if found.op is not None and found.op.inputs_equal and found.op.generator_equal:
            yield from _describe_fix(found.op)
        yield from _label("new runs", found.agreement) if found.agreement else ()
        # What is certain, or has one right answer, was found: advice to look for it would not help.
        if found.advice and not any(one.certainty == "certain" or one.edit for one in named):
            yield from _label("advice", found.advice)
    yield from wrap(describe_varying(found.varying_ops)) if found.varying_ops else ()
    for number, look in enumerate(found.looks):
        yield from _label("" if number else "looks", look)


def _label(label: str, text: str) -> Iterator[str]:
    """Yield a text beside its label; without one, below the text of the label before."""
    yield from wrap(text, _INDENT, f"{label}:".ljust(len(_INDENT)) if label else None)


def _describe_moment(found: SearchResult) -> Iterator[str]:
    """Yield where the runs diverge, and the fields that make them incomparable."""
    pair = found.pair
    if found.divergences:
        first = found.divergences[0]
        yield from _label("where", describe_place(found.divergences))
        if found.ranks > 1:
            reference = found.reference_rank
            compared = "" if reference is None else f", compared with rank {reference} (reference)"
            ranks = ", ".join(str(entry.rank) for entry in found.divergences)
            named = f"{ranks} of {found.ranks}{compared}"
            if reference is not None and found.ranks == _PAIR:
                named = "0 and 1 differ from each other; two ranks do not show which one is wrong"
            yield from _label("rank", named)
        yield from _label("fit", _describe_fit(pair)) if pair is not None and pair.fits > 1 else ()
        differ = f"{first.count:,} of {first.compared:,} values recorded there"
        yield from _label("differ", differ)
        yield from _label("samples", found.samples) if found.samples else ()
        if written := _describe_writing(found, first):
            yield from _label("written", written)
    if pair is None:
        return
    if not found.divergences and pair.fits > 1:
        yield from _label("fit", _describe_fit(pair))
    for entry in (*pair.comparison.refusals, *pair.comparison.stack):
        yield from format_field(entry, len(pair.comparison.ranks))
    for sentence in () if found.divergences else list_one_sided(pair.comparison):
        yield from wrap(sentence, "  ")


def _describe_lines(found: SearchResult, named: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines of the program that a scan found, and those that read from outside.

    ``named`` are those of a rule that explains the cause: their fix is shown.
    """
    for finding in found.lines:
        label = "line" if finding in named else "suspect"
        place = escape(finding.location, _LONGEST)
        yield from _label(label, f"{place}: {escape(finding.code)}")
        yield from _label("", f"{finding.rule}: {finding.reason}")
        yield from _label("fix", finding.fix) if finding in named else ()
    if found.outside:
        yield "read from outside before it differed, the nearest first:"
    for read in found.outside:
        yield from _label("", f"{escape(read.location, _LONGEST)}: {escape(read.code)}")
        yield from _label("", escape(str(read), _LONGEST))


def _describe_fit(pair: RunPair) -> str:
    count = pair.equal_fits
    some = "the fit before it agrees" if count == 1 else f"the {count} fits before it agree"
    equal = f"; {some}" if count else ""
    return f"{escape(pair.fit)}, one of {pair.fits}{equal}"


def _describe_writing(found: SearchResult, first: Divergence) -> str:
    """Return when the state that differs at the beginning of a batch was written."""
    if found.writer:
        return escape(found.writer, _LONGEST)
    if first.moment != "batch" or first.kind not in STATE or found.reference_rank is not None:
        return ""
    if found.pair is not None and found.pair.comparison.begins_late:
        return "in the forward pass of this step, or before it"
    if first.call:
        return f"in step {first.step}, before the optimizer's step"
    before = f"in step {first.step - 1}, or by a hook or thread before this one"
    return before if first.step else ""


def describe_op(found: "OpFinding") -> Iterator[str]:
    """Yield an operation, the line that calls it, and the evidence."""
    called = "in the backward pass of" if found.backward else "called at"
    source = f", {called} {escape(found.source, _LONGEST)}" if found.source else ""
    yield from _label("op", f"{found.op}{source}")
    if not found.inputs_equal:
        yield from _label("", "Its inputs differed, although no recorded operation wrote them.")
        return
    state = "" if found.generator_equal else ", but not the state of its generator"
    yield from _label("", f"Its inputs were equal in both runs{state}.")
    runs = f"alone {found.replays} times on these inputs, it"
    if found.obstacle:
        said = f"It could not be run alone: {escape(found.obstacle, _LONGEST)}"
    elif found.outcomes > 1:
        said = f"Confirmed: run {runs} gave {found.outcomes} different outputs."
    elif not found.generator_equal:
        said = (
            f"Confirmed: run alone {found.replays} times from one state of its generator, it "
            "always gave the same output."
        )
    else:
        said = (
            f"Run {runs} always gave the same output: the operation alone does not show why it "
            "differs."
        )
    yield from _label("", said)


def _describe_fix(found: "OpFinding") -> Iterator[str]:
    """Yield the catalog's entry of an operation, and the fix."""
    patch = found.patch
    if patch is not None:
        yield from _label("known", f"{patch.name} ({patch.status}). {patch.cause}")
        yield from _label("", f"With deterministic algorithms on, torch: {patch.torch_does}")
        fix = "On a CUDA machine, patch_ops=True (LIGHTNING_D9M_PATCH_OPS=1) replaces it."
        fix = fix if patch.status == "patched" else patch.reason
        yield from _label("fix", f"{fix} See `d9m ops {patch.name}`.")
    elif found.outcomes > 1:
        yield from _label(
            "fix",
            "torch.use_deterministic_algorithms(True), which lightning_d9m enables, picks "
            "a deterministic kernel or raises; --no-determinism leaves it off.",
        )


def _describe_magnitude(found: "Magnitude", *, verbose: bool) -> Iterator[str]:
    # Of values that have little in common, the number says nothing.
    close = found.ulps is not None and found.ulps < _MOST_ULPS
    ulps = f", {found.ulps:,} ulps" if close else ""
    yield from _label(
        "values",
        f"{found.count:,} of {found.total:,} elements differ, by at most {found.absolute:.3g} "
        f"({found.relative:.3g} relative{ulps})",
    )
    rows = []
    for at, expected, actual in found.examples[: None if verbose else _EXAMPLES]:
        rows.append((str(list(at)), repr(expected), repr(actual)))
        if verbose:
            rows.append(("", expected.hex(), actual.hex()))
    for line in format_table(_EXAMPLE_COLUMNS, rows).splitlines():
        yield f"{_INDENT}{line}"
