"""``d9m check``: run parts of a training again, and compare them with its ledger or its proof."""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import SystemRandom

from lightning_d9m.errors import SettingError
from lightning_d9m.text import printable
from lightning_d9m.tools.cli.arguments import (
    COMMAND,
    OUTPUT,
    SIGNER,
    STATUS,
    check_new_file,
    get_command,
    refuse_options,
    whole_number,
)
from lightning_d9m.tools.launch.jobs import run_jobs
from lightning_d9m.tools.launch.progress import describe_left
from lightning_d9m.tools.launch.runs import Runs, make_output
from lightning_d9m.tools.output.check_text import print_check
from lightning_d9m.tools.output.terminal import wrap
from lightning_d9m.tools.proof.training import (
    choose_segments,
    open_proof,
    try_to_sign,
    write_verdict,
)
from lightning_d9m.tools.segments.check import (
    CHECK_JSON,
    COMPILED,
    CheckedSegment,
    CheckReport,
    check_part,
    compile_again,
    follow_run,
    list_limits,
)
from lightning_d9m.tools.segments.segment import RecordedRun, Segment, name_other_command

_DEFAULT = 3
ARGUMENTS = f"""
ledger:RUN  ledger of the run: a folder fit-NNN, or a folder that holds exactly one; or a proof
    that d9m prove has written
--segments COUNT  how many segments to run, which are the parts of a run between its checkpoints,
    chosen at random; or all (default: {_DEFAULT})
| --only NUMBERS  run the segments with these numbers, such as 2,5
| --follow  run all segments of a training that still runs, as its checkpoints appear
--choose SEED  a number that chooses the segments of a proof, such as a stranger's
--jobs N  how many segments run at once, each in its own process (default: 1)
| --submit CLUSTER  run each segment in a job of a cluster, which submitit starts, such as
    slurm,slurm_partition=gpu,gpus_per_node=1,timeout_min=600, or local for a trial
| --print-commands  print a command for each segment, for a scheduler of jobs, and run nothing
--second-device NAME=VALUE ...  run a segment that differs in two runs once more with this variable,
    such as CUDA_VISIBLE_DEVICES=1; may be given several times
{SIGNER.strip()}
--verdict FILE  write the result on a proof, as a statement that a third party can check
--sign METHOD  sign the verdict with model_signing, see d9m prove
{OUTPUT.strip()}
{COMMAND}"""
EXAMPLE = "d9m check logs/d9m/fit-000 --segments 5 -- python train.py"


def _parse_count(text: str) -> int | None:
    return None if text == "all" else whole_number(1)(text)


def _parse_numbers(text: str) -> list[int]:
    return sorted({whole_number(0)(part) for part in text.split(",")})


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text} is not valid; allowed: NAME=VALUE.")
    return name, value


SETTINGS: dict[str, dict[str, object]] = {
    "ledger": {"type": Path},
    "second_device": {"type": _parse_variable, "default": []},
    "segments": {"type": _parse_count, "default": _DEFAULT},
    "only": {"type": _parse_numbers},
    "choose": {"type": whole_number(0)},
}


def run(arguments: argparse.Namespace) -> int:
    """Check the run.

    Returns:
        0 if all chosen segments are equal, 1 if some differ, 3 if none differs but some failed.
    """
    command = get_command(arguments)
    recorded, report = _open(arguments)
    numbers = _choose(arguments, recorded, report)
    if arguments.print_commands and not report.problems:
        for number in numbers:
            print(shlex.join(["d9m", *_make_job(arguments, number, arguments.output)]))
        return 0
    output = _make_folder(arguments.output)
    report.output = str(output)
    report.notes += filter(None, [name_other_command(recorded, command)])
    runs = Runs(command, output, arguments.timeout)

    def note_run(so_far: RecordedRun) -> None:
        report.note_run(so_far)
        report.limits = [*list_limits(so_far, follows=arguments.follow)]

    def check(
        so_far: RecordedRun, segment: Segment, place: str = "", later: int = 0
    ) -> CheckedSegment:
        note_run(so_far)  # that of --follow grows
        title = f"segment {segment.number}{place}"
        words = {"later": later, "second": dict(arguments.second_device)}
        report.checked.append(check_part(so_far, runs, segment, title, **words))
        if arguments.follow:
            report.there.append(segment.number)
        return report.checked[-1]

    note_run(recorded)
    chosen = [own for own in recorded.list_segments() if own.number in numbers]
    links = output / "checkpoints"
    with report.kept(links, partial(_show, arguments, report, command)):
        if report.problems:
            pass  # what follows would say nothing of this proof
        elif arguments.follow:
            note_run(follow_run(arguments.ledger, links, check, arguments.timeout))
        elif arguments.submit or (arguments.jobs or 1) > 1:
            # The longest first: one that begins last would run alone at the end.
            chosen.sort(key=lambda own: own.first - own.stop)
            sources = recorded.sources
            shared = {} if sources is None else compile_again(output, sources.used)
            compiled = shared.get("PYTHONPYCACHEPREFIX", "")
            _run_jobs(arguments, [own.number for own in chosen], report, compiled)
        else:
            _run_in_turn(chosen, partial(check, recorded), report)
        for path in recorded.list_changed():  # of a proof; the program runs as the same user
            report.problems.append(f"{path} was written or replaced while the check ran.")
    return STATUS[report.verdict]


def _show(arguments: argparse.Namespace, report: CheckReport, command: list[str]) -> None:
    """Write the verdict, if one is wanted, and print the result."""
    # Before it is printed, as the terminal may have been closed. A check that was interrupted has
    # no verdict: it leaves out what its choice demands.
    try:
        if arguments.verdict is not None and not report.interrupted:
            write_verdict(arguments.verdict, arguments.proof.name, report, arguments.sign)
    finally:
        print_check(report, arguments.format, command)


def _make_folder(chosen: Path | None) -> Path:
    """Make the folder of the check; a job that Slurm has begun again finds that of the attempt."""
    again = os.environ.get("SLURM_RESTART_COUNT", "0")
    return make_output(chosen and (chosen if again == "0" else Path(f"{chosen}-{again}")))


def _run_in_turn(
    segments: list[Segment], check: Callable[..., object], report: CheckReport
) -> None:
    for place, segment in enumerate(segments, start=1):
        check(segment, f" ({place} of {len(segments)})", len(segments) - place)
        if segments[place:] and report.checked[0].verdict == "failed":
            report.notes.append("The other segments were not run.")  # they would fail, too
            break


def _open(arguments: argparse.Namespace) -> tuple[RecordedRun, CheckReport]:
    """Return the run, and a report with what contradicts its proof and what that limits.

    Raises:
        SettingError: If an option has no effect beside the others.
    """
    path = arguments.ledger
    is_proof = path.is_file() and path.suffix != ".jsonl"
    for applies, names, why in (
        (arguments.follow, ("jobs", "submit", "print_commands"), "--follow runs one at a time"),
        (arguments.follow or arguments.print_commands, ("verdict",), "it is for chosen segments"),
        (arguments.verdict is None, ("sign",), "it signs a verdict, and --verdict is not given"),
        (not is_proof, ("signer", "verdict", "choose"), f"{path} is not a proof of d9m prove"),
    ):
        if applies:
            refuse_options(arguments, names, why)
    arguments.proof = path if is_proof else None
    if not is_proof:
        return RecordedRun(path), CheckReport()
    if arguments.verdict is not None:
        check_new_file(arguments.verdict)
        try_to_sign(arguments.sign)
    recorded, report = open_proof(path, arguments.signer)
    for text in (*report.problems, *report.notes):
        print("\n".join(wrap(printable(text))), file=sys.stderr)
    arguments.ledger = recorded.ledger.path
    return recorded, report


def _choose(arguments: argparse.Namespace, recorded: RecordedRun, report: CheckReport) -> list[int]:
    """Return the numbers of segments that are run; note in the report how they were chosen.

    Raises:
        SettingError: If the run lacks a segment that is named, or a setting has no effect.
    """
    there = [segment.number for segment in recorded.list_segments()]
    report.there = [] if arguments.follow else there
    if unknown := [number for number in arguments.only or () if number not in there]:
        raise SettingError(
            f"The run has no segment {unknown[0]}: no checkpoint of this number is there. "
            f"Segments: {', '.join(map(str, there))}."
        )
    count = arguments.segments or len(there)
    report.is_drawn = not (arguments.only or arguments.follow or count >= len(there))
    if not report.is_drawn:
        refuse_options(arguments, ["choose"], "nothing is left to choose")
        return arguments.only or there
    choice = arguments.choose
    if not report.proof:  # numbers of segments repeat it
        return sorted(SystemRandom().sample(there, count))
    report.choice = SystemRandom().randrange(10**6) if choice is None else choice
    return choose_segments(report.proof, report.choice, there, count)


def _make_job(arguments: argparse.Namespace, number: int, output: Path | None) -> list[str]:
    """Return the arguments of ``d9m`` that check one segment."""
    options = ["check", str(arguments.ledger), "--only", str(number)]
    for name, value in (
        ("--output", None if output is None else output / f"job-{number:03d}"),
        ("--timeout", arguments.timeout and f"{arguments.timeout:g}"),
        *(("--second-device", "=".join(own)) for own in arguments.second_device),
    ):
        options += [] if value is None else [name, str(value)]
    return [*options, "--json", "--", *arguments.argv]


def _run_jobs(
    arguments: argparse.Namespace, numbers: list[int], report: CheckReport, compiled: str
) -> None:
    """Check each segment in its own process or job, and merge what they report.

    ``compiled`` is the folder that those of a proof share for compiled code.
    """
    output, start = Path(report.output), time.monotonic()
    d9m = ["env", f"{COMPILED}={compiled}", sys.executable, "-m", "lightning_d9m"]
    commands = {number: [*d9m, *_make_job(arguments, number, output)] for number in numbers}

    def read_result(number: int) -> CheckedSegment | None:
        # A listing lets a file system of a network look again. A job that was begun again has its
        # own folder, see `_make_folder`: the last one counts.
        name = f"job-{number:03d}"
        again = {int(own.name[len(name) + 1 :]): own for own in output.glob(f"{name}-[0-9]*")}
        for _, folder in sorted({0: output / name, **again}.items(), reverse=True):
            with suppress(OSError, ValueError, LookupError):  # it was interrupted
                text = (folder / CHECK_JSON).read_text("utf-8")
                return CheckedSegment(**json.loads(text)["checked"][0])
        return None

    def note(number: int, log: str) -> None:
        # The other jobs run on: each is a segment that is checked or not.
        reason = f"Its job has left no result. {log}"
        failed = CheckedSegment(number, 0, 0, verdict="failed", reason=reason)
        checked = read_result(number) or failed
        report.checked = sorted([*report.checked, checked], key=lambda own: own.number)
        count = len(report.checked)
        left = (time.monotonic() - start) / count * (len(numbers) - count)
        done = f"segment {number} ({count} of {len(numbers)}): {checked.verdict}"
        print(f"{done}{describe_left(left)}", file=sys.stderr)

    jobs = {"at_once": arguments.jobs or 1, "submit": arguments.submit}
    run_jobs(commands, output, note, has_result=lambda own: bool(read_result(own)), **jobs)
