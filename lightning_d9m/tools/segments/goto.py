"""A return to a step of a run: the part before it runs again, and stops there.

``StepDebugger`` compares it with the run and opens the debugger, in the process of the program.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning_d9m.engine.ledger.folder import Ledger, list_fits, read_ledger
from lightning_d9m.engine.ledger.kinds import PROBE_KINDS
from lightning_d9m.engine.recording.interruption import DIFFERS, FOLDER, NEVER, NONFINITE, WITHIN
from lightning_d9m.errors import CheckpointError, CommandError, SettingError
from lightning_d9m.tools.launch.processes import run_in_terminal
from lightning_d9m.tools.launch.runs import RunResult, Runs
from lightning_d9m.tools.segments.segment import (
    RecordedRun,
    SavedPoint,
    Segment,
    find_first_fit,
    list_ends,
)

_Result = TypeVar("_Result")


def find_segment(recorded: RecordedRun, step: int) -> Segment:
    """Return the segment that ends after a step, from the last checkpoint before it.

    A checkpoint of the step itself is left out: no state would be compared before the step.

    Raises:
        SettingError: If the run did not reach the step, or cannot be stopped at one.
    """
    path = recorded.ledger.path
    if "every_n_steps" in recorded.ledger.header.settings:
        raise SettingError(
            f"{path} was written by the optimizers of a loop without a Recorder, which cannot be "
            "stopped at a step. Add lightning_d9m.Recorder to the loop; see docs/loops.md."
        )
    # A run that failed may have begun the step after its last one; one that was killed, any step.
    last = recorded.last_step - recorded.is_finished
    if step > last and recorded.end is not None:
        raise SettingError(f"The run {path} has no step {step}; allowed: 0 to {last}.")
    return Segment(recorded.find_start(step - 1), step + 1)


def debug_step(
    recorded: RecordedRun, segment: Segment, command: Sequence[str], folder: Path, kind: str
) -> bool:
    """Run a segment on the terminal, its last step in a debugger.

    ``kind`` has the rank and the debugger, such as ``"debug:0:pdb"``.

    Returns:
        Whether the step was reached without a difference, or with one that is allowed.

    Raises:
        CommandError: If it was not reached.
    """
    folder.mkdir()
    variables = replace(segment, kind=kind, of=recorded.ledger.path.absolute()).variables
    variables = {**recorded.variables, **variables, FOLDER: str(folder)}
    status = run_in_terminal(command, folder, variables)
    reasons = _list_reasons(map(read_ledger, list_fits(folder)), segment.stop - 1)
    if not reasons:
        ended = f"failed with exit status {status}" if status else "ended well"
        step = segment.stop - 1
        raise CommandError(f"The command {ended}, and its first fit did not pass step {step}.")
    return DIFFERS not in reasons


def _list_reasons(fits: Iterable[Ledger], step: int) -> list[str]:
    """Return why the first fit was stopped on each rank.

    Raises:
        CommandError: If the step does not begin a batch, where alone a step can be entered.
    """
    ends = list_ends(*(fit for fit in fits if not fit.header.fit))
    reasons = [end.reason or "" for end in ends if end.status == "stopped"]
    # Known by the process alone: a ledger does not have the steps of each batch.
    for reason in reasons:
        _, is_within, first = reason.partition(WITHIN)
        if is_within:
            raise CommandError(
                f"Step {step} cannot be entered: {WITHIN}{first}, because the program makes "
                f"several optimizer steps in a batch. Give step {first}."
            )
    return reasons


def trace_step(
    recorded: RecordedRun, segment: Segment, runs: Runs, *, probes: str = "all"
) -> Ledger:
    """Run a segment and record the probes of its last step, all by default; return the ledger.

    If the command fails so, all but the operations are recorded.

    Raises:
        CommandError: As ``run_segment``.
    """
    step = segment.stop - 1
    steps = {"LIGHTNING_D9M_PROBES": probes, "LIGHTNING_D9M_PROBE_STEPS": f"{step}:{step + 1}"}

    def trace(name: str) -> RunResult:
        return recorded.run(runs, segment, name, f"step {step}", variables=steps)

    run = None
    if probes == "all":
        run = record_operations(partial(trace, "trace"), partial(print, file=sys.stderr))
        steps["LIGHTNING_D9M_PROBES"] = ",".join(k for k in PROBE_KINDS if k != "op")
    run = run or trace("trace" if probes != "all" else "trace-modules")
    ledger = find_first_fit(run)
    _list_reasons([ledger], step)
    return ledger


def record_operations(run: Callable[[], _Result], note: Callable[[str], object]) -> _Result | None:
    """Return what a run gives that records operations; None if it fails, which ``note`` gets."""
    try:
        return run()
    except CommandError as error:
        # torch cannot make some tensor subclasses while operations are recorded. The last line of
        # a log is most often the error.
        first, *others = str(error).splitlines()
        said = " ".join([first, *(line.lstrip(" |") for line in others[-1:])])
        note(f"the command fails while operations are recorded, so only modules are: {said}")
        return None


def find_nonfinite(recorded: RecordedRun, runs: Runs) -> tuple[SavedPoint | None, dict[str, Any]]:
    """Run from the last checkpoint with finite weights until something is not finite.

    Returns:
        The checkpoint, None for the beginning; and ``step``, ``kind``, ``name`` and ``rank`` of the
        first value, empty if all are finite.

    Raises:
        CommandError: As ``run_segment``.
    """
    there = (point for point in reversed(recorded.points) if point.is_there)
    start = next((point for point in there if _holds_finite(point.path)), None)
    stop = NEVER if recorded.end is None else recorded.last_step + 1
    segment = Segment(start, stop, kind="nonfinite")
    recorded.run(runs, segment, "nonfinite", "first value not finite")
    found = runs.output / "nonfinite/segment" / NONFINITE
    return start, json.loads(found.read_text()) if found.exists() else {}


def _holds_finite(path: Path) -> bool:
    """Return whether the weights of a checkpoint are finite; False if it cannot be read."""
    from lightning_d9m.integrations.lightning.saved_state import list_weights, load_checkpoint

    try:
        tables = list_weights(load_checkpoint(path)).values()
    except (CheckpointError, SettingError):
        return False
    tensors = [tensor for own in tables for tensor in own.values()]
    # Some types of 8 bits have no `isfinite`; all of them fit into float64.
    wide = (own.double() if own.is_floating_point() else own for own in tensors)
    return bool(tensors) and all(bool(own.isfinite().all()) for own in wide)
