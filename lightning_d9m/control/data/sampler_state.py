"""Changes that a user's samplers make, such as a count of epochs, a shuffled list, or a generator.

A resumed run starts with new samplers, which hold their first values.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.control.data.resumable_sampler import is_user_made
from lightning_d9m.control.data.samplers import make_generator
from lightning_d9m.state.changes import Changes, describe_unsaved, is_long
from lightning_d9m.state.plain_data import pack_bytes, unpack_bytes

CHANGES = "sampler"
"""The key of what samplers have changed, encoded, by path."""

UNSAVED = "unsaved"
"""The key of the paths of what they have changed and a checkpoint cannot hold."""


class SamplerState:
    """The state of the samplers that a user has made, relative to their first one.

    Args:
        samplers: All samplers of a loader.
        dataset: That of the loader, which the state of a sampler leaves out.
        earlier: The states of other loaders. A sampler that one of them has, too, is compared with
            its first state there.
    """

    def __init__(
        self, samplers: Sequence[Any], dataset: object, earlier: Iterable["SamplerState"]
    ) -> None:
        known = {id(own): changes for state in earlier for own, changes in state.parts.values()}
        self._dataset = dataset
        self._samplers = samplers
        self.parts: dict[str, tuple[Any, Changes]] = {}
        for number, sampler in enumerate(samplers):
            if is_user_made([sampler]):
                changes = known.get(id(sampler)) or self._watch(sampler)
                self.parts[str(number)] = sampler, changes

    def _watch(self, sampler: Any) -> Changes:
        def leave_out(_: str, value: object) -> bool:
            if value is sampler:
                return False
            others = isinstance(value, Dataset | DataLoader | Sampler) or is_long(value)
            return others or any(value is other for other in (self._dataset, *self._samplers))

        def hide(owner: object) -> Collection[str]:
            return _list_set_by_loader(sampler) if owner is sampler else ()

        return Changes({"": sampler}, leave_out=leave_out, hide=hide, copies=True)

    def capture(self) -> dict[str, Any]:
        """Return what has changed, for ``restore``, and the paths of what cannot be saved."""
        found: dict[str, Tensor] = {}
        unsaved: list[str] = []
        for number, (_, changes) in self.parts.items():
            captured, unknown = changes.capture()
            found |= {f"{number}.{path}": pack_bytes(data) for path, data in captured.items()}
            unsaved += [f"{number}.{path}" for path in unknown]
        return {name: own for name, own in ((CHANGES, found), (UNSAVED, unsaved)) if own}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Write what ``capture`` returned into the samplers."""
        for number, (_, changes) in self.parts.items():
            changes.restore(_select(states, number), torch.device("cpu"))

    def undo(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Restore what differs between two captures and has not changed since."""
        for number, (_, changes) in self.parts.items():
            changes.undo(_select(before, number), _select(after, number))


def list_unsaved(samplers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why the captured states of loaders cannot be restored, by number of the loader."""
    return describe_unsaved(
        f"{number}.sampler.{path.partition('.')[2]}"
        for number, states in samplers.items()
        for path in states.get(UNSAVED, ())
    )


def _select(states: Mapping[str, Any], number: str) -> dict[str, bytes]:
    """Return the encoded values of one sampler."""
    found = {path.partition("."): data for path, data in states.get(CHANGES, {}).items()}
    return {path: unpack_bytes(data) for (own, _, path), data in found.items() if own == number}


def _list_set_by_loader(sampler: Any) -> set[str]:
    """Return the attributes that the loader's control sets in each epoch."""
    ours = {"seed"} if isinstance(sampler, DistributedSampler) else set()
    ours |= {"epoch"} if hasattr(sampler, "set_epoch") else set()
    return ours | ({"generator"} if make_generator(sampler) is not None else set())
