"""Checks when a Trainer's run begins, of what the whole process or the whole Trainer shares."""

from functools import cache
from typing import TYPE_CHECKING

import torch

from lightning_d9m.control.environment import control_is_on
from lightning_d9m.control.hash_seed import describe_hash_seed_problem
from lightning_d9m.errors import SettingError
from lightning_d9m.lightning.packages import rank_zero

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def check_callbacks(count: int) -> None:
    """Raise a ``SettingError`` if the program has passed several DeterminismCallbacks."""
    if count > 1:
        raise SettingError(
            f"This Trainer has {count} DeterminismCallbacks; a run has one seed and "
            "one ledger, so one is allowed. Remove the others from Trainer(callbacks=...)."
        )


def check_benchmark(trainer: "Trainer", *, was_on: bool, overrides: bool) -> None:
    """Refuse cuDNN's benchmark mode, or say that the run switches it off.

    ``was_on`` says whether it was on before the callback was built, ``overrides`` whether the
    run switches it off.

    Raises:
        SettingError: If it is on, unless the run overrides it.
    """
    if not torch.backends.cudnn.benchmark:
        return
    origin = (
        "since before this callback was built, as an earlier Trainer(benchmark=True) leaves it"
        if was_on
        else "since this callback was built, as this Trainer's benchmark=True sets it"
    )
    problem = (
        f"cuDNN's benchmark mode is on, {origin}: it chooses algorithms by timing them, so "
        "runs differ."
    )
    if not overrides:
        raise SettingError(
            f"{problem} Remove benchmark=True from that Trainer, or set "
            "torch.backends.cudnn.benchmark = False before this run."
        )
    if trainer.is_global_zero and control_is_on():
        rank_zero().rank_zero_info(
            f"{problem} LIGHTNING_D9M=1 switches it off during this run and records that."
        )


@cache
def report_hash_seed() -> None:
    """Log once per process that the hash seed is not fixed; it cannot be set any more."""
    problem = describe_hash_seed_problem()
    if problem is not None:
        rank_zero().rank_zero_info(problem)
