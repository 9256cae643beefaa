"""``d9m check``: run parts of a training again, and compare them with its ledger or its proof."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from random import SystemRandom
from threading import Event, Lock
from typing import Any

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
from lightning_d9m.tools.launch.processes import share_cores
from lightning_d9m.tools.launch.run import Runs, make_output
from lightning_d9m.tools.output.check_text import print_check
from lightning_d9m.tools.output.terminal import wrap
from lightning_d9m.tools.proof.training import choose_segments, open_proof, write_verdict
from lightning_d9m.tools.segments.check import (
    CheckedSegment,
    CheckReport,
    check_part,
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
| --print-commands  print a command for each segment, for a scheduler of jobs, and run nothing
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


SETTINGS: dict[str, dict[str, object]] = {
    "ledger": {"type": Path},
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
    output = make_output(arguments.output)
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
        report.checked.append(check_part(so_far, runs, segment, title, later))
        if arguments.follow:
            report.there.append(segment.number)
        return report.checked[-1]

    note_run(recorded)
    links = output / "checkpoints"
    with report.kept(links, partial(print_check, report, arguments.format, command)):
        if report.problems:
            pass  # what follows would say nothing of this proof
        elif arguments.follow:
            note_run(follow_run(arguments.ledger, links, check, arguments.timeout))
        elif (arguments.jobs or 1) > 1:
            _run_jobs(arguments, numbers, report)
        else:
            chosen = [own for own in recorded.list_segments() if own.number in numbers]
            _run_in_turn(chosen, partial(check, recorded), report)
    # A check that was interrupted has no verdict: it leaves out what its choice demands.
    if arguments.verdict is not None:
        write_verdict(arguments.verdict, arguments.proof, report, arguments.sign)
    return STATUS[report.verdict]


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
    arguments.proof, path = None, arguments.ledger
    if arguments.follow:
        why = "--follow runs one segment at a time"
        refuse_options(arguments, ["jobs", "print_commands"], why)
    if arguments.follow or arguments.print_commands:
        refuse_options(arguments, ["verdict"], "it is for a check of chosen segments")
    if arguments.verdict is None:
        refuse_options(arguments, ["sign"], "it signs a verdict, and --verdict is not given")
    if not path.is_file() or path.suffix == ".jsonl":
        names = ("signer", "verdict", "choose")
        refuse_options(arguments, names, f"{path} is not a proof, which d9m prove writes")
        return RecordedRun(path), CheckReport()
    if arguments.verdict is not None:
        check_new_file(arguments.verdict)
    recorded, report = open_proof(path, arguments.signer)
    for text in (*report.problems, *report.notes):
        print("\n".join(wrap(printable(text))), file=sys.stderr)
    arguments.proof, arguments.ledger = path, recorded.ledger.path
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
    choice, proof = arguments.choose, arguments.proof
    if proof is None:  # numbers of segments repeat it
        return sorted(SystemRandom().sample(there, count))
    report.choice = SystemRandom().randrange(10**6) if choice is None else choice
    return choose_segments(proof, report.choice, there, count)


def _make_job(arguments: argparse.Namespace, number: int, output: Path | None) -> list[str]:
    """Return the arguments of ``d9m`` that check one segment."""
    folder = [] if output is None else ["--output", str(output / f"job-{number:03d}")]
    limit = [] if arguments.timeout is None else ["--timeout", f"{arguments.timeout:g}"]
    options = ["check", str(arguments.ledger), "--only", str(number), *folder, *limit]
    return [*options, "--json", "--", *arguments.argv]


def _run_jobs(arguments: argparse.Namespace, numbers: list[int], report: CheckReport) -> None:
    """Check each segment in its own process; a signal to this process ends all of them."""
    jobs, lock, has_ended = list[subprocess.Popen[str]](), Lock(), Event()

    def run_job(number: int) -> CheckedSegment:
        words = _make_job(arguments, number, Path(report.output))
        # In its own session, so that Ctrl-C reaches it once, by the signal below.
        options: dict[str, Any] = {"text": True, "errors": "replace", "start_new_session": True}
        options |= dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        options["env"] = {**os.environ, **share_cores()}
        with lock:  # a job that starts at the moment of a signal would outlive the check
            if has_ended.is_set():
                raise CancelledError
            job = subprocess.Popen([sys.executable, "-m", "lightning_d9m", *words], **options)
            jobs.append(job)
        out, errors = job.communicate()
        try:
            return CheckedSegment(**json.loads(out)["checked"][0])
        except ValueError:  # the other jobs run on: each is a segment that is checked or not
            said = errors.strip().rpartition("\n")[2]
            reason = f"Its job ended with exit status {job.returncode}. {said}"
            return CheckedSegment(number, 0, 0, verdict="failed", reason=reason)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            # As they end, so that a signal loses none of those that have.
            for ended in as_completed([pool.submit(run_job, number) for number in numbers]):
                report.checked.append(checked := ended.result())
                done = f"segment {checked.number} ({len(report.checked)} of {len(numbers)})"
                print(f"{done}: {checked.verdict}", file=sys.stderr)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            with lock:
                has_ended.set()
            for job in jobs:
                job.terminate()
            raise
        finally:
            report.checked.sort(key=lambda own: own.number)
