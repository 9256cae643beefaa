"""Loaders under control: order and workers depend on (seed, epoch) alone.

Knows torch's ``DataLoader``, not Lightning. Every attribute of the user's objects that is replaced
is put back by ``release``.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.control.samples import SeededDataset, SeededIterable, Stream, WorkerInit
from lightning_d9m.errors import SettingError

_SIGNED = 2**63
# torch adds the epoch to a DistributedSampler's seed and gives the sum to a 64-bit generator.
_SAMPLER_SEED = 2**31
_MISSING = object()


class LoaderControl:
    """The loaders of one fit.

    Args:
        seed: The base seed.
        fit: Ordinal of the fit in its process.
        rank: The data-parallel rank: loaders of other ranks draw other numbers.
        per_sample_rng: Seed the generators for each sample by (seed, epoch, index), so that results
            do not depend on the number of workers.
    """

    def __init__(self, seed: int, *, fit: int, rank: int, per_sample_rng: bool) -> None:
        self._seed = seed
        self._fit = fit
        self._rank = rank
        self._per_sample_rng = per_sample_rng
        self._taken: dict[str, list[_Taken]] = {}
        self._loaders = _Replacements()

    def take_over(self, loader: Any, stage: str) -> Any:
        """Let a loader draw from streams of its own; return it.

        Anything that is not torch's ``DataLoader`` is returned as it is: there is nothing of it to
        seed but the generators of the process.

        Args:
            loader: What is iterated for batches.
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            SettingError: When a seed for each sample is asked of a dataset without indices.
        """
        if not isinstance(loader, DataLoader):
            return loader
        taken = self._taken.setdefault(stage, [])
        if any(entry.loader is loader for entry in taken):
            return loader
        stream = Stream(
            self._seed,
            self._fit,
            self._rank,
            f"{stage} {len(taken)}",
            torch.zeros(1, dtype=torch.int64).share_memory_(),
        )
        taken.append(_Taken(loader, stream, self._loaders, per_sample=self._per_sample_rng))
        return loader

    def start_epoch(self, stage: str, epoch: int) -> None:
        """Seed the streams of a stage's loaders for an epoch.

        An epoch that has been started is not started again: its order may be drawn already.
        """
        for taken in self._taken.get(stage, []):
            taken.start_epoch(epoch)

    def release(self) -> None:
        """Put back every attribute that was replaced, in reverse."""
        self._taken.clear()
        self._loaders.undo()


class _Replacements:
    """Attributes of the user's objects that were replaced, and what was there."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._done.append((owner, name, vars(owner).get(name, _MISSING)))
        # A DataLoader refuses to set `dataset` once it is built: it may have derived a sampler from
        # it. The stand-in has the same length and the same samples.
        object.__setattr__(owner, name, value)

    def undo(self) -> None:
        while self._done:
            owner, name, value = self._done.pop()
            if value is _MISSING:
                with suppress(AttributeError):
                    object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, value)


class _Taken:
    """One loader under control."""

    def __init__(
        self, loader: Any, stream: Stream, replacements: _Replacements, *, per_sample: bool
    ) -> None:
        self.loader = loader
        self._stream = stream
        self._started: int | None = None
        iterable = isinstance(loader.dataset, IterableDataset)
        if per_sample and iterable:
            raise SettingError(
                f"per_sample_rng is on and {type(loader.dataset).__name__} is an IterableDataset: "
                "its samples have no index to seed them by. Use a dataset with indices, or switch "
                "per_sample_rng off; runs with one number of workers are exact without it."
            )
        # The base seed of the workers is drawn from here, not from the generator of the training.
        self._generator = torch.Generator()
        replacements.replace(loader, "generator", self._generator)
        self._samplers: list[tuple[int, torch.Generator]] = []
        for number, sampler in enumerate(_samplers_of(loader)):
            if isinstance(sampler, DistributedSampler):
                # All ranks must cut one and the same permutation.
                seed = stream.derive("shards", worker=number, shared=True) % _SAMPLER_SEED
                replacements.replace(sampler, "seed", seed)
            elif hasattr(sampler, "generator"):
                generator = torch.Generator()
                replacements.replace(sampler, "generator", generator)
                self._samplers.append((number, generator))
        if loader.num_workers > 0:
            init = WorkerInit(stream, loader.worker_init_fn)
            replacements.replace(loader, "worker_init_fn", init)
        lives_on = loader.num_workers > 0 and loader.persistent_workers
        if per_sample or lives_on:
            stand_in = SeededIterable if iterable else SeededDataset
            seeded = stand_in(loader.dataset, stream, per_sample=per_sample)
            replacements.replace(loader, "dataset", seeded)

    def start_epoch(self, epoch: int) -> None:
        if epoch == self._started:
            return
        self._started = epoch
        self._stream.epoch.fill_(epoch)
        self._generator.manual_seed(self._stream.derive("workers") % _SIGNED)
        for number, generator in self._samplers:
            generator.manual_seed(self._stream.derive("order", worker=number) % _SIGNED)


def _samplers_of(loader: Any) -> Iterator[Any]:
    """Yield a loader's samplers, those inside batch samplers and Lightning's wrappers included."""
    pending = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    seen: list[int] = []
    while pending:
        sampler = pending.pop()
        if sampler is None or id(sampler) in seen:
            continue
        seen.append(id(sampler))
        yield sampler
        # A batch sampler keeps its sampler; Lightning's distributed wrapper keeps a dataset that
        # keeps the user's sampler.
        pending += [getattr(sampler, name, None) for name in ("sampler", "_sampler")]
        pending.append(getattr(getattr(sampler, "dataset", None), "_sampler", None))
