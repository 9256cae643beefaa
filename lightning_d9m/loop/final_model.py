"""The model with which a program ends, recorded for the comparison of its runs."""

from functools import partial
from pathlib import Path

from torch import nn

from lightning_d9m.control.session import active_session
from lightning_d9m.control.settings import Settings
from lightning_d9m.ledger.format.records import End
from lightning_d9m.loop.run_setup import find_ranks, make_folder
from lightning_d9m.ranks.ranks import Ranks
from lightning_d9m.recording.run_recorder import Policy, RunRecorder, describe_training


def record_final(
    model: nn.Module, *, ledger_dir: str | Path = "d9m", **scalars: float
) -> Path | None:
    """Record the model with which a program ends, so that ``d9m repeat`` compares it too.

    The ledgers of fits show nothing that a program does after them, such as loading other weights.
    Call this once, where the program has its result. On several ranks, rank 0 records its model,
    which must hold whole parameters.

    Args:
        model: The model.
        ledger_dir: Parent of the folder ``final-NNN``; ``d9m repeat`` and ``d9m locate`` name their
            own.
        scalars: Results by name, such as ``accuracy=0.93``.

    Returns:
        The folder of the ledger; None on other ranks.

    Raises:
        LedgerError: If the ledger cannot be written.
    """
    if find_ranks()[0].rank:
        return None
    session, alone = active_session(), Ranks(0)
    settings = Settings() if session is None else session.settings
    run = RunRecorder(Policy())
    run.begin(
        alone,
        model,
        lambda: describe_training(alone, settings, {"world.size": 1}, model, model, fit=0),
        partial(make_folder, alone, Path(ledger_dir), kind="final"),
    )
    results = {name: float(value).hex() for name, value in scalars.items()}
    run.append(run.take("final", epoch=0, step=0, scalars=results))
    run.end(End(status="finished"))
    return run.folder
