"""Hooks of the program that get a batch: they get the same on any number of processes."""

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.control.data.micro_batches import MicroBatches
from lightning_d9m.errors import SettingError
from lightning_d9m.lightning.packages import is_of_program
from lightning_d9m.lightning.trainer_attributes import list_callbacks
from lightning_d9m.state.plain_data import encode_plain

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_EVALUATED = ("on_validation_batch_end", "on_test_batch_end")
# Of such a hook of the module: outputs, batch, their number, and that of the loader.
_ARGUMENTS = 4
_TRAINED = ("on_train_batch_start", "on_train_batch_end")


class BatchHooks:
    """Wraps the hooks of the module and of callbacks that the program itself defines.

    - After a batch of a validation or test they get the outputs and the micro-batches of all
      logical ranks, so that a list of them has them all, as the processes of DDP have together.
    - In training they get the micro-batch of the process's first logical rank, as its output: on
      process 0 those of logical rank 0.

    ``gather`` returns the plain values of every process.
    """

    def __init__(self, trainer: "Trainer", gather: Callable[[Any], list[Any]]) -> None:
        self._trainer = trainer
        self._gather = gather
        self._last: tuple[Any, list[Any]] = (None, [])

    def attach(self, patches: AttributePatches) -> None:
        """Wrap the hooks."""
        for owner in (self._trainer.lightning_module, *list_callbacks(self._trainer)):
            for names, call in ((_EVALUATED, self._call_evaluated), (_TRAINED, self._call_trained)):
                for name in names:
                    hook = getattr(owner, name, None)
                    if hook is not None and is_of_program(hook):
                        patches.replace(owner, name, wraps(hook)(partial(call, hook)))

    def _call_evaluated(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a hook of the module, or of a callback, which gets Trainer and module, too."""
        *own, outputs, batch, number, loader = self._add_loader(args)
        if isinstance(outputs, MicroBatches):
            if self._last[0] is not outputs:  # once for all hooks of a batch
                self._last = (outputs, self._gather_all(outputs, batch))
            outputs, batch = self._last[1]
        found = (*own, outputs, batch, number, loader)
        return hook(*found[: len(args)], **kwargs)

    def _add_loader(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        of_callback = args[0] is self._trainer
        return args if len(args) == _ARGUMENTS + 2 * of_callback else (*args, 0)

    def _call_trained(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        *own, batch, number = args
        if any(isinstance(part, MicroBatches) for part in tree_leaves(batch)):
            batch = self._move(tree_map(_select_first, batch))
        return hook(*own, batch, number, **kwargs)

    def _gather_all(self, outputs: MicroBatches, batch: Any) -> list[Any]:
        plain = [list(outputs), list(batch)]
        try:
            encode_plain(tree_map_only(Tensor, lambda _: None, plain))
        except SettingError as error:
            raise SettingError(
                "A hook after each batch of an evaluation gets the outputs and batches of all "
                f"logical ranks, and these cannot be sent: {error}"
            ) from error
        parts = self._gather(plain) if self._trainer.world_size > 1 else [plain]
        moved = self._move(parts)
        return [MicroBatches(own for part in moved for own in part[place]) for place in (0, 1)]

    def _move(self, value: Any) -> Any:
        device = self._trainer.lightning_module.device
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _select_first(part: Any) -> Any:
    return part[0] if isinstance(part, MicroBatches) else part
