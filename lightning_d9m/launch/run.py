"""One run of ``d9m repeat``: the user's command in a folder of its own, and what it left there."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lightning_d9m.errors import CommandError, LedgerError
from lightning_d9m.file_errors import explain
from lightning_d9m.launch.interruption_points import INTERRUPT, RESUME
from lightning_d9m.launch.progress import RunProgress
from lightning_d9m.launch.subprocess_run import describe_command, run_watched
from lightning_d9m.ledger.folder import Ledger, list_evaluations, list_fits, read_ledger

LEDGER_VARIABLE = "LIGHTNING_D9M_LEDGER_DIR"


@dataclass(frozen=True)
class Run:
    """What one run left.

    Attributes:
        fits: Its ledgers by name, ``fit-000`` say, in order; an evaluation on its own is one too.
        label: What is to be said of the run beside its number; empty for nothing.
    """

    fits: Mapping[str, Ledger]
    label: str = ""


def make_run_folder(output: Path, name: str) -> Path:
    """Make the folder of one run.

    Raises:
        LedgerError: When it cannot be made.
    """
    folder = output / name
    try:
        folder.mkdir()
    except OSError as error:
        raise LedgerError(f"The folder {folder} cannot be made: {explain(error)}") from error
    return folder


def run_once(
    words: list[str],
    folder: Path,
    *,
    title: str,
    timeout: float | None,
    steering: Mapping[str, str] = MappingProxyType({}),
    killed_when: Callable[[], bool] = lambda: False,
) -> None:
    """Run the command once, in a process that leaves its ledgers in ``folder``.

    Args:
        words: The command.
        folder: The run's folder.
        title: What progress calls the run.
        timeout: Seconds after which it counts as hanging.
        steering: Further variables of the process.
        killed_when: Whether it is to be killed, which is then no failure.

    Raises:
        CommandError: When it fails.
    """
    with RunProgress(title, folder) as progress:
        run_watched(
            words,
            environment=_environment(folder) | dict(steering),
            log=folder / "output.log",
            timeout=timeout,
            tick=progress.tick,
            killed_when=killed_when,
        )


def _environment(folder: Path) -> dict[str, str]:
    """Return the variables of a run: where its ledgers go, and a fixed hash seed."""
    inherited = {name: os.environ[name] for name in os.environ.keys() - {INTERRUPT, RESUME}}
    variables = {**inherited, LEDGER_VARIABLE: str(folder)}
    # A project that does not mention us is repeated all the same; LIGHTNING_D9M=0 is the user's no.
    variables.setdefault("LIGHTNING_D9M", "1")
    # Python reads it when it starts; left random, the order of sets of strings changes by run.
    if not variables.get("PYTHONHASHSEED", "").isdigit():
        variables["PYTHONHASHSEED"] = "0"
    return variables


def read_fits(folder: Path, words: list[str]) -> dict[str, Ledger]:
    """Return the ledgers that a run left, by name.

    Raises:
        CommandError: When there is none.
        LedgerError: When one cannot be read.
    """
    fits = {
        path.name: read_ledger(path) for path in (*list_fits(folder), *list_evaluations(folder))
    }
    if not fits:
        raise CommandError(
            f"The command {describe_command(words)} ended well but wrote no ledger. Let it fit a "
            "model with a Trainer, in the environment in which lightning_d9m is installed; where "
            "LIGHTNING_D9M is 0, with lightning_d9m.DeterminismCallback() in Trainer(callbacks="
            f"[...]). Log: {folder / 'output.log'}."
        )
    return fits
