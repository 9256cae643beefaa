"""``d9m repeat --interrupt``: runs that are killed and resumed, held against a straight one.

The user's program is not changed: variables steer the callback in it (see ``interruption``). A
first run goes straight and says where it could be interrupted. Then, for each place that is chosen,
one run is killed there, and another goes on from the checkpoint that it left, to the end.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightning_d9m.errors import CommandError
from lightning_d9m.file_errors import explain
from lightning_d9m.launch.interruption_points import (
    CHECKPOINT,
    FOLDER,
    INTERRUPT,
    MARK,
    RESUME,
    SURVEY,
    EpochShape,
    InterruptionPoint,
    choose_places,
)
from lightning_d9m.launch.run import Run, make_run_folder, read_fits, run_once
from lightning_d9m.output.repeat_text import RepeatReport

_CHECKPOINTS = "checkpoints"


def interrupt_and_resume(words: list[str], output: Path, *, timeout: float | None) -> list[Run]:
    """Run the command straight, and once for each place at which it can be interrupted.

    Args:
        words: The command.
        output: The folder for all runs.
        timeout: Seconds after which a process counts as hanging.

    Returns:
        The straight run, then those that were resumed.

    Raises:
        CommandError: When the command fails, is not interrupted, or has no place for that.
    """
    folder = make_run_folder(output, "run-001")
    survey = {INTERRUPT: SURVEY, FOLDER: str(folder)}
    run_once(words, folder, title="run 1, straight", timeout=timeout, steering=survey)
    straight = Run(read_fits(folder, words), "straight")
    places = choose_places(_read_survey(folder))
    if not places:
        raise CommandError(
            "The command's first fit has no place to be interrupted at: it has one epoch of one "
            "batch, and no validation. Give it more to train."
        )
    return [straight, *_resumed(words, output, places, straight, timeout)]


def _read_survey(folder: Path) -> list[EpochShape]:
    try:
        entries = json.loads((folder / SURVEY).read_text())
        return [EpochShape(**entry) for entry in entries]
    except FileNotFoundError:
        raise CommandError(
            "The command's first fit did not say where it can be interrupted: it did not train to "
            "its end, or not in the process that the command starts (as under ddp_spawn)."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise CommandError(f"{folder / SURVEY} cannot be read: {error}") from error


def _resumed(
    words: list[str],
    output: Path,
    places: list[tuple[InterruptionPoint, str]],
    straight: Run,
    timeout: float | None,
) -> Iterator[Run]:
    for number, (place, happens) in enumerate(places, start=2):
        title = f"run {number} of {len(places) + 1}"
        try:
            killed = make_run_folder(output, f"run-{number:03d}-killed")
            checkpoints = _kill(words, killed, place, f"{title}, to be killed", timeout)
            folder = make_run_folder(output, f"run-{number:03d}")
            run_once(
                words,
                folder,
                title=f"{title}, resumed",
                timeout=timeout,
                steering={RESUME: str(checkpoints / CHECKPOINT)},
            )
            run = Run(read_fits(folder, words), f"{happens}, resumed")
        except CommandError as error:
            raise CommandError(f"In run {number}, {happens}, resumed: {error}") from error
        if RepeatReport([straight, run], output).equal:
            _remove(checkpoints)  # one that led to other bits is kept, to be looked at
        yield run


def _kill(
    words: list[str], folder: Path, place: InterruptionPoint, title: str, timeout: float | None
) -> Path:
    """Run the command until it is killed at a place; return the folder with its checkpoint."""
    checkpoints = make_run_folder(folder, _CHECKPOINTS)
    mark = checkpoints / MARK
    run_once(
        words,
        folder,
        title=title,
        timeout=timeout,
        steering={INTERRUPT: str(place), FOLDER: str(checkpoints)},
        killed_when=mark.exists,
    )
    if not mark.exists():
        raise CommandError(
            "The command came to its end without passing the place at which it was to be killed, "
            f"and which the straight run had passed: its runs differ. Log: {folder / 'output.log'}."
        )
    return checkpoints


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise CommandError(f"{folder} cannot be removed: {explain(error)}") from error
