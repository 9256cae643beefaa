"""The callback that ``LIGHTNING_D9M=1`` adds to each Trainer, and that stands down for another."""

import os
from functools import cache
from importlib import import_module
from typing import Any

from lightning_d9m.control.settings import Settings
from lightning_d9m.errors import SettingError
from lightning_d9m.lightning.autoload.env_settings import (
    CONTROL_VARIABLES,
    check_known,
    read_settings,
    variable_of,
)
from lightning_d9m.lightning.callback import DeterminismCallback
from lightning_d9m.lightning.packages import loaded_packages, rank_zero


class AddedCallback(DeterminismCallback):
    """A DeterminismCallback that nobody wrote into the program.

    It gives way to one that somebody did. A list of callbacks that is given to two Trainers holds
    that of the first when the second adds its own: then the first serves both.
    """

    added = True

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the run over, unless another callback does."""
        callbacks = [c for c in trainer.callbacks if isinstance(c, DeterminismCallback)]
        written = [c for c in callbacks if not c.added]
        if not written and callbacks[0] is self:
            super().setup(trainer, pl_module, stage)
            return
        # Another list: Lightning is iterating over this one, and the program may hold it too.
        trainer.callbacks = [c for c in trainer.callbacks if c is not self]
        self._early.restore()
        if written:
            _report_unused()


def make_callback(package: str) -> AddedCallback:
    """Return a callback with the settings that variables give.

    Args:
        package: The package of Lightning's whose Trainer is being built.

    Raises:
        SettingError: When a variable is unknown or has a value that is not allowed, or the class
            was made for Lightning's other package.
    """
    if not issubclass(AddedCallback, import_module(package).Callback):
        raise SettingError(
            f"{package} was imported after a Trainer of {loaded_packages()[0]} was built. Import "
            "both packages at the top of the program, or use one of them."
        )
    check_known(DeterminismCallback, os.environ)
    settings = read_settings(DeterminismCallback, os.environ)
    try:
        return AddedCallback(**settings)
    except SettingError as error:
        if not settings:
            raise
        names = ", ".join(variable_of(name) for name in settings)
        raise SettingError(f"{error} (The settings are those of {names}.)") from error


@cache
def _report_unused() -> None:
    """Say once which variables have no effect on a callback that the program has built itself."""
    given = [variable_of(name) for name in read_settings(DeterminismCallback, os.environ)]
    applied = {*CONTROL_VARIABLES, *(variable_of(name) for name in Settings.__dataclass_fields__)}
    unused = [name for name in given if name not in applied]
    if unused:
        rank_zero().rank_zero_warn(
            "The program's own DeterminismCallback is used. Without effect are therefore: "
            f"{', '.join(unused)}. Unset what is listed, or remove that callback."
        )
