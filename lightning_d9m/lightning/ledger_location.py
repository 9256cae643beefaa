"""The folder in which a Trainer's run writes its ledger."""

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from fsspec.core import strip_protocol
from fsspec.utils import get_protocol

from lightning_d9m.errors import LedgerError
from lightning_d9m.launch.run import LEDGER_VARIABLE
from lightning_d9m.ledger.folder import create_ledger_folder
from lightning_d9m.lightning.packages import rank_zero
from lightning_d9m.lightning.trainer_attributes import Trainer, ranks_of
from lightning_d9m.recording.run import share_new_folder

_NAME = "d9m"
_LOCAL = ("file", "local")


def make_ledger_folder(
    trainer: Trainer, ledger_dir: str | Path | None, kind: str, *, spare_cwd: bool = False
) -> Path:
    """Make the folder of a ledger on rank 0, and return its path on all ranks.

    ``kind`` is the first part of its name, such as ``"fit"``. With ``spare_cwd`` nothing is
    written into the working folder if the Trainer does not write there either, because the
    program has not asked for a ledger.

    Raises:
        LedgerError: On all ranks, if no folder can be made.
    """
    log_dir = trainer.log_dir  # a collective: every rank calls it

    def create() -> Path:
        parent = _choose_parent(trainer, log_dir, ledger_dir, spare_cwd=spare_cwd)
        return create_ledger_folder(parent, kind)

    # A program that overrides `is_global_zero` may leave a single process without a rank 0.
    creates = trainer.is_global_zero or trainer.world_size == 1
    advice = (
        f"Set ledger_dir, or the variable {LEDGER_VARIABLE}, to a local folder that this process "
        "may write to."
    )
    # Not the strategy's broadcast, which pickles.
    return share_new_folder(ranks_of(trainer), create if creates else None, advice)


def _choose_parent(
    trainer: Trainer, log_dir: str | None, ledger_dir: str | Path | None, *, spare_cwd: bool
) -> Path:
    if chosen := os.environ.get(LEDGER_VARIABLE) or ledger_dir:
        if (local := _find_local(chosen)) is None:
            raise LedgerError(
                f"The folder for ledgers is {str(chosen)!r}; allowed: a local folder, because a "
                "ledger is a file that grows by one record at a time."
            )
        return local
    preferred = log_dir or trainer.default_root_dir
    # Programs list these folders, and expect nothing else there.
    excluded = _list_local(getattr(c, "dirpath", None) for c in trainer.checkpoint_callbacks)
    if spare_cwd:
        # Where a logger or a checkpoint callback writes.
        saves = trainer.state.fn == "fit" and not trainer.fast_dev_run
        written = _list_local(logger.save_dir for logger in trainer.loggers)
        written |= excluded if saves else set()
        if not any(folder.is_relative_to(Path.cwd()) for folder in written):
            excluded |= {Path.cwd()}
    for folder in (preferred, trainer.default_root_dir, Path.cwd()):
        local = _find_local(folder)
        if local is not None and local.absolute() not in excluded:
            parent = local / _NAME
            break
    else:
        parent = state_folder() if spare_cwd else Path.cwd() / "lightning_logs" / _NAME
    if parent != Path(preferred, _NAME) and not str(preferred).startswith("file:"):
        rank_zero().rank_zero_info(
            f"The ledger is written to {parent}, because {preferred} is the folder of the "
            "checkpoints, not a local folder, or the working folder of a "
            f"Trainer that writes no files into it. Set {LEDGER_VARIABLE} to choose another folder."
        )
    return parent


def _list_local(folders: Iterable[str | Path | None]) -> set[Path]:
    found = [_find_local(folder) for folder in folders if folder is not None]
    return {folder.absolute() for folder in found if folder is not None}


def state_folder() -> Path:
    """Return a folder for the ledgers of this working folder among the user's files of state."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    cwd = Path.cwd()
    # Working folders of the same name must not share a folder.
    short = blake2b(str(cwd).encode(), digest_size=4).hexdigest()
    return Path(base, "lightning_d9m", f"{cwd.name}-{short}")


def _find_local(folder: str | Path) -> Path | None:
    """Return the path of a folder, even of a URL such as ``file:///logs``; None if not local."""
    if "://" not in str(folder):
        return Path(folder)
    return Path(strip_protocol(str(folder))) if get_protocol(str(folder)) in _LOCAL else None
