"""``d9m repeat --interrupt``: compare runs that are killed and resumed with a straight run.

The user's program is not changed: variables control the callback in it (see
``lightning.fault_injection``) or the recorder of its loop (``loop.interruption``). The straight run
reports the points at which it can be interrupted. For each chosen point, one run is killed there,
and another resumes from its checkpoint.
"""

import shutil
import time
from datetime import datetime
from pathlib import Path

from lightning_d9m.errors import CommandError, LedgerError
from lightning_d9m.launch.fit_pairs import pair_fits
from lightning_d9m.launch.interruption_points import (
    CHECKPOINT,
    FOLDER,
    INTERRUPT,
    MARK,
    RESUME,
    SURVEY,
    InterruptionPoint,
    choose_points,
    measure_shares,
    read_survey,
)
from lightning_d9m.launch.run import Run, make_run_folder, read_fits, run_once
from lightning_d9m.output.repeat_text import FailedRun, RepeatReport

_CHECKPOINTS = "checkpoints"
# torch reads the first only where the caller of `torch.load` leaves weights_only at its default,
# as Lightning does, and raises if the second is set beside it.
_ALLOW_OBJECTS = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "0"}
# By words in the log of a run that cannot resume.
_REMEDIES = {
    "InexactResumeError": (
        "To resume anyway and compare the result, set LIGHTNING_D9M_ON_INEXACT_RESUME=warn before "
        "the command. If the program passes its own DeterminismCallback, give it "
        'on_inexact_resume="warn" instead.'
    ),
    "Weights only load failed": (
        "The checkpoint holds Python objects. To load them, add --allow-objects, or call "
        "fit(..., weights_only=False) in the program."
    ),
    "from run.next_epoch": (
        "The program begins at epoch 0 again. Let its loop count from the recorder's next_epoch: "
        "for epoch in range(run.next_epoch, epochs)."
    ),
}


def interrupt_and_resume(
    argv: list[str], output: Path, *, timeout: float | None, allow_objects: bool
) -> RepeatReport:
    """Run the command straight, and once for each point at which it can be interrupted.

    Returns:
        The straight run compared with those that were resumed. A point whose runs fail is part of
        it and stops no other.

    Raises:
        CommandError: When the straight run fails or has no point at which it can be interrupted.
    """
    folder = make_run_folder(output, "run-001")
    survey = {INTERRUPT: SURVEY, FOLDER: str(folder)}
    began = time.time()
    run_once(argv, folder, title="run 1, straight", timeout=timeout, variables=survey)
    seconds = time.time() - began
    straight = Run(read_fits(folder, argv), "straight")
    epochs = read_survey(folder)
    points = list(choose_points(epochs))
    start = _measure_start(straight, began)
    if not points:
        raise CommandError(
            "The command's first fit has no point at which it can be interrupted: it has one epoch "
            "of one batch, and no validation. Train for more batches."
        )
    runs, failures = {1: straight}, []
    for number, (point, label) in enumerate(points, start=2):
        title = f"run {number} of {len(points) + 1}"
        folder = output / f"run-{number:03d}"
        shares = measure_shares(point, epochs)
        to_kill, to_resume = (start + share * (seconds - start) for share in shares)
        try:
            killed = make_run_folder(output, f"run-{number:03d}-killed")
            checkpoints = _kill(argv, killed, point, f"{title}, to be killed", timeout, to_kill)
            make_run_folder(output, folder.name)
            variables = {RESUME: str(checkpoints / CHECKPOINT)}
            variables |= _ALLOW_OBJECTS if allow_objects else {}
            run_once(
                argv,
                folder,
                title=f"{title}, resumed",
                timeout=timeout,
                variables=variables,
                expected_seconds=to_resume,
            )
            fits = pair_fits(straight.fits, read_fits(folder, argv))
            run = Run(fits, f"{label}, resumed")
            if RepeatReport({1: straight, number: run}, output, argv).verdict == "equal":
                # A checkpoint that leads to a different run is kept.
                shutil.rmtree(checkpoints, ignore_errors=True)
            runs[number] = run
        except (CommandError, LedgerError) as error:
            text = "\n".join([str(error), *_find_remedies(folder / "output.log")])
            failures.append(FailedRun(number, f"{label}, failed", text))
    return RepeatReport(runs, output, argv, failures, resumed=True)


def _measure_start(run: Run, began: float) -> float:
    """Return the seconds until a run's first fit began; 0 if its ledger does not say."""
    created = next(iter(run.fits.values())).header.created
    try:
        return max(0.0, datetime.fromisoformat(created).timestamp() - began)
    except ValueError:
        return 0.0


def _kill(
    argv: list[str],
    folder: Path,
    point: InterruptionPoint,
    title: str,
    timeout: float | None,
    expected_seconds: float,
) -> Path:
    """Run the command until it is killed at a point; return the folder with its checkpoint."""
    checkpoints = make_run_folder(folder, _CHECKPOINTS)
    mark = checkpoints / MARK
    run_once(
        argv,
        folder,
        title=title,
        timeout=timeout,
        variables={INTERRUPT: str(point), FOLDER: str(checkpoints)},
        killed_when=mark.exists,
        expected_seconds=expected_seconds,
    )
    if not mark.exists():
        raise CommandError(
            "The command ended without reaching the point at which it should be killed, which the "
            f"straight run had reached: its runs differ. Log: {folder / 'output.log'}."
        )
    return checkpoints


def _find_remedies(log: Path) -> list[str]:
    """Return what helps a run that could not resume, by what it printed."""
    try:
        text = log.read_text(errors="replace")
    except OSError:  # it did not start
        return []
    return [remedy for words, remedy in _REMEDIES.items() if words in text]
