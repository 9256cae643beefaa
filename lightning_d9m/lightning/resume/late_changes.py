"""Detection of weights that change after a checkpoint was saved, in hooks that a resume skips.

Lightning calls the hook of the module after those of callbacks, where checkpoints are saved. And a
validation that was interrupted is run again, from weights that it may have replaced.
"""

from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from lightning_d9m.hashing.digest import digest_many
from lightning_d9m.lightning.resume.model_parts import ModelParts
from lightning_d9m.lightning.strategies import is_sharded

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class LateChanges:
    """The parameters and buffers of a module that change from one moment to another."""

    def __init__(self) -> None:
        self._noted: dict[str, str] = {}

    def note(self, trainer: "Trainer", model: ModelParts) -> None:
        """Note the present values, unless ranks hold shards of them."""
        if not is_sharded(trainer.strategy):
            self._noted = _read_digests(model)

    def forget(self) -> None:
        """Forget what was noted."""
        self._noted = {}

    def find(self, model: ModelParts) -> list[str]:
        """Return the names of what has changed since."""
        if not self._noted:
            return []
        now = _read_digests(model)
        return [name for name, digest in self._noted.items() if now.get(name) != digest]


def describe_hook(names: list[str]) -> str:
    """Return why a checkpoint that was saved before a hook cannot be resumed exactly."""
    return (
        "A hook that runs after the checkpoint is saved, such as the module's on_train_batch_end, "
        f"changes {names[0]}, and a resumed run does not call it again. Do it in a callback's "
        "on_train_batch_end, or save checkpoints at the end of an epoch."
    )


def describe_validation(names: list[str]) -> str:
    """Return why a checkpoint that was saved within a validation cannot be resumed exactly."""
    return (
        f"The checkpoint was saved within a validation that had changed {names[0]}, and a resumed "
        "run begins the validation again. Use one that was saved before it or after it."
    )


def _read_digests(model: ModelParts) -> dict[str, str]:
    """Return the digest of each tensor by name; a change through ``.data`` has no other trace."""
    named = {name: tensor for name, tensor in model.tensors if not is_lazy(tensor)}
    return dict(zip(named, digest_many(list(named.values())), strict=True))
