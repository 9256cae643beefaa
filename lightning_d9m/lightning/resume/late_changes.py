"""Detection of weights that change after a checkpoint was saved, in hooks that a resume skips.

Lightning calls the hook of the module after those of callbacks, where checkpoints are saved. And a
validation that was interrupted is run again, from weights that it may have replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lightning_d9m.hashing.digest import digest_many
from lightning_d9m.hashing.shards import has_base
from lightning_d9m.hashing.training_state import ModelTensors
from lightning_d9m.lightning.resume.program_state import (
    Captured,
    ProgramState,
    find_changed,
)
from lightning_d9m.lightning.strategies import is_sharded
from lightning_d9m.lightning.trainer_attributes import list_callbacks, name_callbacks
from lightning_d9m.state.watch import digest_value

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class LateChanges:
    """The parameters, buffers and objects of a program that change between two moments.

    ``read`` returns the digests of values by name.
    """

    def __init__(self, read: Callable[[], dict[str, str]]) -> None:
        self._read = read
        self._noted: dict[str, str] = {}
        self._program: Captured | None = None
        self._reset: tuple[str, ...] = ()

    def note(self, program: Captured | None = None, reset: Sequence[str] = ()) -> None:
        """Note the present values; ``reset`` names metrics that Lightning is about to reset."""
        self._reset = tuple(f"model.{name}." for name in reset)
        self._program, self._noted = program, self._read()

    def forget(self) -> None:
        """Forget what was noted."""
        self._noted, self._program = {}, None

    def find(self, program: ProgramState | None = None) -> list[str]:
        """Return the names of what has changed since."""
        now = self._read() if self._noted else {}
        found = [name for name, digest in self._noted.items() if now.get(name) != digest]
        if program is not None and self._program is not None:
            changed = find_changed(self._program, program.capture())
            found += [path for path in changed if not path.startswith(self._reset)]
        return found

    def find_lost(self, model: ModelTensors, checkpoint: Mapping[str, Any]) -> list[str]:
        """Return the names of what has changed since, and is not in a checkpoint."""
        held = {
            part.untyped_storage().data_ptr()
            for part in tree_leaves(dict(checkpoint))
            if isinstance(part, Tensor) and part.layout is torch.strided
        }
        lost = [
            name
            for name, tensor in model.list_saved()
            if name not in checkpoint["state_dict"]
            and not (tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in held)
        ]
        changed = {*self.find()} if lost else set()
        return [name for name in lost if name in changed or name not in self._noted]


def digest_tensors(strategy: object, model: ModelTensors) -> dict[str, str]:
    """Return the digest of each tensor by name; none if ranks hold shards of them.

    A change through ``.data`` has no other trace.
    """
    if is_sharded(strategy):
        return {}
    named = {name: own for part in model.listed for name, own in part if not is_lazy(own)}
    return dict(zip(named, digest_many(list(named.values())), strict=True))


def digest_callbacks(trainer: "Trainer") -> dict[str, str]:
    """Return the digests of the states of callbacks, but for those that save checkpoints."""
    return {
        f"{name}.state_dict()": digest_value(callback.state_dict())
        for name, callback in name_callbacks(list_callbacks(trainer)).items()
        if not has_base(callback, "Checkpoint", "DeterminismCallback")
    }


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
