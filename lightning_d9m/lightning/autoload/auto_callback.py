"""The callback that ``LIGHTNING_D9M=1`` adds to each Trainer."""

import logging
import os
from functools import cache
from importlib import import_module
from typing import Any

from lightning_d9m.control.env_settings import (
    CONTROL_VARIABLES,
    build_from_variables,
    read_settings,
    reject_unknown_variables,
    variable_of,
)
from lightning_d9m.control.settings import Settings
from lightning_d9m.errors import SettingError
from lightning_d9m.lightning.callback import DeterminismCallback, list_program_callbacks
from lightning_d9m.lightning.packages import loaded_packages, rank_zero
from lightning_d9m.lightning.trainer_attributes import Trainer


class AddedCallback(DeterminismCallback):
    """A DeterminismCallback that the program itself has not passed.

    It yields to one that the program passes. If the program passes one list of callbacks to two
    Trainers, the second Trainer adds its own callback to a list that holds the first's; the first
    callback then serves both Trainers.
    """

    _auto_added = True

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Open the session, unless another callback does."""
        callbacks = trainer.callbacks
        in_program = list_program_callbacks(trainer)
        first = next(c for c in callbacks if isinstance(c, DeterminismCallback))
        if not in_program and first is self:
            super().setup(trainer, pl_module, stage)
            return
        # A new list: Lightning iterates over the old one, and the program may hold it too.
        trainer.callbacks = [c for c in callbacks if c is not self]
        self.early_variables.restore()
        if in_program:
            _report_unused()


def make_callback(package: str) -> AddedCallback:
    """Return a callback with the settings that variables give.

    The package is that of the Trainer that is being built.

    Raises:
        SettingError: If a variable is unknown or has a value that is not allowed, or the class was
            made for Lightning's other package.
    """
    if not issubclass(AddedCallback, import_module(package).Callback):
        raise SettingError(
            f"{package} was imported after a Trainer of {loaded_packages()[0]} was built. Import "
            "both packages at the top of the program, or use one of them."
        )
    fabric = {"lightning.pytorch": "lightning.fabric"}.get(package, "lightning_fabric")
    logging.getLogger(f"{fabric}.utilities.registry").addFilter(
        # Lightning logs for each Trainer that it adds our callback.
        lambda record: "entry point 'lightning_d9m'" not in record.getMessage()
    )
    reject_unknown_variables(DeterminismCallback, os.environ)
    settings = read_settings(DeterminismCallback, os.environ)
    return build_from_variables(AddedCallback, settings)


@cache
def _report_unused() -> None:
    """Warn once of variables that have no effect on a callback of the program."""
    given = [variable_of(name) for name in read_settings(DeterminismCallback, os.environ)]
    applied = {*CONTROL_VARIABLES, *(variable_of(name) for name in Settings.__dataclass_fields__)}
    unused = [name for name in given if name not in applied]
    if unused:
        rank_zero().rank_zero_warn(
            "Your program passes its own DeterminismCallback, so these variables are ignored: "
            f"{', '.join(unused)}. Unset them, or remove the callback."
        )
