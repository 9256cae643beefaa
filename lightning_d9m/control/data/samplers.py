"""The samplers of a loader, including those in batch samplers and in Lightning's wrappers."""

import copy
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.control.data.data_state import LOGGED_DATA, UNSAVED_DATA
from lightning_d9m.control.data.resumable_sampler import is_user_made, unwrap
from lightning_d9m.state.changes import Changes, describe_unsaved
from lightning_d9m.state.plain_data import pack_bytes, unpack_bytes

# A loader has both `sampler` and `batch_sampler`, a batch sampler has `sampler`. Lightning's
# distributed wrapper has a `dataset` that has the user's sampler as `_sampler`.
_LINKS = ("sampler", "batch_sampler", "_sampler", "dataset")
# torch's samplers that do not depend on the rank.
_RANKLESS = (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def find_samplers(loader: Any) -> list[Any]:
    """Return a loader's samplers, outermost first, each once."""
    found: list[Any] = []
    pending = [loader]
    while pending:
        for _, sampler in _links(pending.pop(0)):
            if not any(sampler is other for other in found):
                found.append(sampler)
                pending.append(sampler)
    return found


def is_rankless(loader: Any) -> bool:
    """Return whether each rank may draw a different order.

    A sampler that splits one order among the ranks needs the same order on all of them. Any sampler
    that is not torch's may do that.
    """
    return all(type(sampler) in _RANKLESS for sampler in find_samplers(loader))


def make_generator(sampler: Any) -> torch.Generator | None:
    """Return a new generator of the kind that a sampler draws from, or None.

    None if the sampler does not take a generator, or takes one of NumPy or of another kind.
    """
    if not hasattr(sampler, "generator"):
        return None
    present = sampler.generator
    if present is None:
        return torch.Generator()
    if isinstance(present, torch.Generator):
        return torch.Generator(device=present.device)
    return None


def describe_seed(seed: object) -> str:
    """Return the seed that the user has given a sampler, as a text; empty for a default.

    Lightning gives its ``DistributedSampler`` the seed of ``PL_GLOBAL_SEED``, which is ours.
    """
    defaults = (None, 0, torch.Generator().initial_seed())
    given = seed not in defaults and str(seed) != os.environ.get("PL_GLOBAL_SEED")
    return f" {seed}" if given else ""


def copy_loader(loader: Any) -> Any:
    """Return a loader over the same dataset that does not share samplers or workers."""
    duplicate = _copy(loader, {})
    object.__setattr__(duplicate, "_iterator", None)
    return duplicate


def _copy(holder: Any, copies: dict[int, Any]) -> Any:
    if id(holder) not in copies:
        copies[id(holder)] = duplicate = copy.copy(holder)
        for name, sampler in _links(holder):
            object.__setattr__(duplicate, name, _copy(sampler, copies))
    return copies[id(holder)]


def _links(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name of attribute, sampler) for each sampler of ``holder``."""
    for name in _LINKS:
        kept = unwrap(getattr(holder, name, None))
        if kept is None:
            continue
        # The dataset of Lightning's wrapper leads to a sampler.
        wraps = isinstance(holder, DistributedSampler) and hasattr(kept, "_sampler")
        if name != "dataset" or wraps:
            yield name, kept


CHANGES = "sampler"
"""The key of what samplers have changed, encoded, by path."""

UNSAVED = "unsaved"
"""The key of the paths of what they have changed and a checkpoint cannot hold."""


class SamplerState:
    """The state of the samplers that a user has made, relative to their first one.

    That is a count of epochs, a shuffled list, or a generator, say: a resumed run starts with new
    samplers, which hold their first values.

    Args:
        samplers: All samplers of a loader.
        dataset: That of the loader, which is left out.
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
            others = isinstance(value, Dataset | DataLoader | Sampler)
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
        """Write what ``capture`` returned into the samplers; warn of what they do not take."""
        for number, (sampler, changes) in self.parts.items():
            if lost := changes.restore(_select(states, number), torch.device("cpu")):
                warnings.warn(
                    f"The checkpoint holds values that {type(sampler).__name__} lacks, or takes "
                    f"others for: {', '.join(lost)}. The order of batches may differ from that of "
                    "an uninterrupted run: make the sampler as in the run that saved it.",
                    stacklevel=2,
                )

    def undo(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Restore what differs between two captures and has not changed since."""
        for number, (_, changes) in self.parts.items():
            changes.undo(_select(before, number), _select(after, number))


def list_unsaved(samplers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why the captured states of loaders cannot be restored, by number of the loader."""
    return describe_unsaved(
        path
        for number, states in samplers.items()
        for path in (
            *(f"{number}.sampler.{path.partition('.')[2]}" for path in states.get(UNSAVED, ())),
            *(f"{number}.{path}" for path in states.get(UNSAVED_DATA, ())),
        )
    )


def list_logged(samplers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the paths of what reading samples changes, and is in no checkpoint."""
    return [
        f"{number}.{path}"
        for number, states in samplers.items()
        for path in states.get(LOGGED_DATA, ())
    ]


def _select(states: Mapping[str, Any], number: str) -> dict[str, bytes]:
    """Return the encoded values of one sampler."""
    found = {path.partition("."): data for path, data in states.get(CHANGES, {}).items()}
    return {path: unpack_bytes(data) for (own, _, path), data in found.items() if own == number}


def _list_set_by_loader(sampler: Any) -> set[str]:
    """Return the attributes that the loader's control sets in each epoch."""
    ours = {"seed"} if isinstance(sampler, DistributedSampler) else set()
    ours |= {"epoch"} if hasattr(sampler, "set_epoch") else set()
    return ours | ({"generator"} if make_generator(sampler) is not None else set())
