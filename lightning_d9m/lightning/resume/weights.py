"""The weights that a resumed fit loads."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def load_unrounded(
    trainer: "Trainer", load: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """Load the weights of a checkpoint into a module of the dtype in which it will train.

    With precision ``64-true`` Lightning converts the module after that, so the weights would be
    rounded to float32.

    Args:
        trainer: The Trainer.
        load: The ``load_model_state_dict`` of its strategy.
        args: The arguments of ``load``.
        kwargs: Its keyword arguments.
    """
    strategy = trainer.strategy
    plugin = strategy.precision_plugin
    if plugin.precision == "64-true" and not strategy.restore_checkpoint_after_setup:
        plugin.convert_module(trainer.lightning_module)
    load(*args, **kwargs)
