"""The setup of a recorded loop: its ranks, its session, and its ledger's folder.

Ranks are those of ``torch.distributed``, as launched by torchrun, Fabric or Accelerate.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from lightning_d9m.control.session import Session, active_session
from lightning_d9m.errors import SettingError
from lightning_d9m.launch.run import LEDGER_VARIABLE
from lightning_d9m.ledger.folder import create_ledger_folder
from lightning_d9m.recording.collective import Ranks
from lightning_d9m.recording.run_recorder import share_new_folder


def find_ranks() -> tuple[Ranks, int]:
    """Return the ranks of the default process group and their number; one without a group."""
    if not distributed.is_available() or not distributed.is_initialized():
        return Ranks(0), 1
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return (Ranks(rank) if size == 1 else Ranks(rank, _exchange)), size


def _exchange(data: bytes) -> list[bytes]:
    # NCCL gathers only what is on a device.
    kinds = distributed.get_backend_config()
    host = "cpu:" in str(kinds)
    device = torch.device("cpu") if host else torch.device("cuda", torch.cuda.current_device())
    local = torch.frombuffer(bytearray(data), dtype=torch.int64).to(device)
    rows = [torch.empty_like(local) for _ in range(distributed.get_world_size())]
    distributed.all_gather(rows, local)
    return [row.cpu().numpy().tobytes() for row in rows]


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
