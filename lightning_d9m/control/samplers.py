"""The samplers of a loader, wherever they are: in batch samplers and in wrappers of Lightning's."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.control.resumable_sampler import unwrap

# A loader keeps both, a batch sampler the first. Lightning's distributed wrapper keeps a `dataset`
# that keeps the user's sampler as `_sampler`.
_LINKS = ("sampler", "batch_sampler", "_sampler", "dataset")
# torch's own samplers that know nothing of ranks.
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
            if not any(sampler is known for known in found):
                found.append(sampler)
                pending.append(sampler)
    return found


def is_rankless(loader: Any) -> bool:
    """Return whether each rank may draw an order of its own.

    A sampler that deals one order out to the ranks needs that order to be equal on all of them, and
    any sampler that is not torch's own may be one.
    """
    return all(type(sampler) in _RANKLESS for sampler in find_samplers(loader))


def make_generator(sampler: Any) -> torch.Generator | None:
    """Return a new generator of the kind that a sampler draws from, or None if it takes none.

    One of NumPy's or of another kind is left to the user.
    """
    if not hasattr(sampler, "generator"):
        return None
    present = sampler.generator
    if present is None:
        return torch.Generator()
    if isinstance(present, torch.Generator):
        return torch.Generator(device=present.device)
    return None


def copy_loader(loader: Any) -> Any:
    """Return a loader over the same dataset that shares no sampler and no workers with it."""
    twin = _copy(loader, {})
    object.__setattr__(twin, "_iterator", None)
    return twin


def _copy(holder: Any, copies: dict[int, Any]) -> Any:
    if id(holder) not in copies:
        copies[id(holder)] = twin = copy.copy(holder)
        for name, sampler in _links(holder):
            object.__setattr__(twin, name, _copy(sampler, copies))
    return copies[id(holder)]


def _links(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name of attribute, sampler) for each sampler that is kept in ``holder``."""
    for name in _LINKS:
        kept = unwrap(getattr(holder, name, None))
        if kept is None:
            continue
        # A dataset is no sampler, but that of Lightning's wrapper leads to one.
        wraps = isinstance(holder, DistributedSampler) and hasattr(kept, "_sampler")
        if name != "dataset" or wraps:
            yield name, kept
