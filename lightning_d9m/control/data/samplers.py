"""The samplers of a loader, including those in batch samplers and in Lightning's wrappers."""

import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.control.data.resumable_sampler import unwrap

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


def list_controlled(owner: Any) -> set[str]:
    """Return the attributes of a loader or sampler that are torch's, or set in each epoch."""
    if isinstance(owner, DataLoader):
        return set(vars(DataLoader(TensorDataset(torch.empty(1)))))
    ours = {"seed"} if isinstance(owner, DistributedSampler) else set()
    ours |= {"epoch"} if hasattr(owner, "set_epoch") else set()
    return ours | ({"generator"} if make_generator(owner) is not None else set())
