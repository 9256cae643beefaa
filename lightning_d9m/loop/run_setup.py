"""The setup of a recorded loop: its ranks, its session, and its ledger's folder.

Ranks are those of ``torch.distributed``, as launched by torchrun, Fabric or Accelerate.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed

from lightning_d9m.control.session import Session, active_session
from lightning_d9m.errors import SettingError
from lightning_d9m.launch.run import LEDGER_VARIABLE
from lightning_d9m.ledger.folder import create_ledger_folder
from lightning_d9m.ranks.groups import ranks_of_group
from lightning_d9m.ranks.ranks import Ranks
from lightning_d9m.recording.run_recorder import share_new_folder


def find_ranks() -> tuple[Ranks, int]:
    """Return the ranks of the default process group and their number; one without a group."""
    if not distributed.is_available() or not distributed.is_initialized():
        return ranks_of_group(), 1
    return ranks_of_group(), distributed.get_world_size()


def as_tuple(given: Any) -> tuple[Any, ...]:
    """Return one object or several as a tuple."""
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def find_session() -> Session:
    """Return the session that a recorder opens in.

    Raises:
        SettingError: If there is none.
    """
    session = active_session()
    if session is None:
        raise SettingError(
            "There is no deterministic session, so this training would be recorded but not "
            "repeatable. Put it into `with lightning_d9m.deterministic(seed=...):`, or call "
            "lightning_d9m.enable(seed=...) first."
        )
    return session


def make_folder(ranks: Ranks, ledger_dir: Path, *, kind: str = "fit") -> Path:
    """Make the folder of a new ledger on rank 0, and return it on all ranks.

    ``ledger_dir`` is its parent, if no variable names another one.

    Raises:
        LedgerError: If it cannot be made.
    """
    parent = Path(os.environ.get(LEDGER_VARIABLE) or ledger_dir)
    create = partial(create_ledger_folder, parent, kind)
    return share_new_folder(ranks, create if ranks.rank == 0 else None)
