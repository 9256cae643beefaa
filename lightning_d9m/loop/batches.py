"""The batches of a recorded loop: the same in every run, and in a run that resumes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_d9m.control.data.loaders import LoaderControl, find_control
from lightning_d9m.control.seeding import derive_seed, seed_all
from lightning_d9m.control.settings import Settings
from lightning_d9m.errors import SettingError
from lightning_d9m.lightning.lightning_private import find_fabric_loader, set_fabric_epoch

_STAGE = "train"
# They iterate, move and divide batches in ways of their own.
_WRAPPING = ("accelerate", "lightning", "lightning_fabric")
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "_FabricModule")


T = TypeVar("T")


class EpochBatches(Generic[T]):
    """The batches of a loader, as ``Recorder.batches`` returns them: each iteration is an epoch.

    Args:
        loader: The loader.
        iterate: Returns an iterator of the batches of the epoch that is next or under way.
    """

    def __init__(self, loader: Iterable[T], iterate: Callable[[Iterable[T]], Iterator[T]]) -> None:
        self._loader, self._iterate = loader, iterate

    def __iter__(self) -> Iterator[T]:
        return self._iterate(self._loader)

    def __len__(self) -> int:
        return len(cast(Sized, self._loader))


class Batches:
    """Gives out the batches of each epoch, whose order and draws depend on seed and epoch only.

    Ranks that a ``DistributedSampler`` gives the same data, as those of tensor parallelism,
    draw the same numbers too.
    """

    def __init__(self, settings: Settings, fit: int, rank: int) -> None:
        self._seed, self._fit, self._rank = settings.seed, fit, rank
        self._per_sample_rng = settings.per_sample_rng
        self._control = self._make_control()

    def _make_control(self) -> LoaderControl:
        return LoaderControl(
            self._seed, fit=self._fit, rank=self._rank, per_sample_rng=self._per_sample_rng
        )

    def start_epoch(self, epoch: int, loader: object) -> None:
        """Seed the epoch, independently of what was drawn before."""
        sampler = getattr(_find_controllable(loader), "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler.rank != self._rank:
            self._control.release()
            self._rank = sampler.rank
            self._control = self._make_control()
        seed_all(derive_seed(self._seed, _STAGE, fit=self._fit, rank=self._rank, epoch=epoch))

    def iterate(
        self, loader: Any, epoch: int, skipped: int, samplers: Mapping[str, Any]
    ) -> Iterator[Any]:
        """Return an iterator of an epoch's batches without the first ones.

        Of any other iterable than a ``DataLoader`` the first ones are made and discarded.
        ``samplers`` is what ``capture_samplers`` returned in the run that was interrupted.
        """
        inner = _find_controllable(loader)
        if inner is None:
            batches: Iterator[Any] = iter(loader)
            for _ in zip(range(skipped), batches, strict=False):
                pass
            return batches
        if skipped:
            self._control.resume_epoch(
                _STAGE, epoch, batches=skipped, cycled=lambda: False, samplers=samplers
            )
        controlled = self._control.wrap_loader(inner, _STAGE)
        self._control.start_epoch(_STAGE, epoch)
        if inner is loader:
            return _drop_consumed(controlled, skipped)
        # The wrapper passes its own count of iterations to the samplers.
        if hasattr(loader, "iteration"):
            loader.iteration = epoch
        else:
            set_fabric_epoch(loader, epoch)
        return iter(loader)

    def capture_samplers(self, *, within: bool) -> dict[str, Any]:
        """Return the states of the generators that the user's samplers hold."""
        return self._control.capture_samplers(_STAGE, within=within)

    def release(self) -> None:
        """Restore every loader."""
        self._control.release()


def _drop_consumed(loader: DataLoader[Any], skipped: int) -> Iterator[Any]:
    """Return an iterator of a loader; one that iterates by itself makes its first batches again."""
    batches = iter(loader)
    if not skipped:
        return batches
    return (
        batch
        for number, batch in enumerate(batches)
        if number >= skipped or not find_control(loader).is_bypassed
    )


def _find_controllable(loader: object) -> DataLoader[Any] | None:
    """Return the loader that ``LoaderControl`` can place at any batch; None if there is none.

    Loaders of Fabric and Accelerate move the batches of a loader that they hold.
    """
    inner = loader
    if _is_made_by(loader, "accelerate", "DataLoaderShard"):
        inner = getattr(loader, "base_dataloader", None)
    elif _is_made_by(loader, "lightning", "_FabricDataLoader"):
        inner = find_fabric_loader(loader)
    elif type(loader).__module__.partition(".")[0] in _WRAPPING:
        return None
    if not isinstance(inner, DataLoader) or isinstance(inner.dataset, IterableDataset):
        return None
    return inner


def _is_made_by(made: object, package: str, name: str) -> bool:
    """Return whether an object is of a package's class, without importing the package."""
    return any(
        kind.__name__ == name and kind.__module__.startswith(package) for kind in type(made).__mro__
    )


def unwrap_model(model: Any) -> torch.nn.Module:
    """Return the model within the wrappers of DDP, FSDP and Fabric, whose prefixes names then lack.

    Raises:
        SettingError: For a model of DeepSpeed, or several models.
    """
    if not isinstance(model, torch.nn.Module):
        raise SettingError(
            f"The model is {type(model).__name__}; allowed: a torch.nn.Module. Pass several "
            "models as one torch.nn.ModuleList or ModuleDict."
        )
    while type(model).__name__ in _WRAPPERS:
        model = model.module
    found: torch.nn.Module = model
    if _is_of_deepspeed(found) or any(hasattr(own, "ds_id") for own in found.parameters()):
        raise SettingError(_describe_deepspeed("model", found))
    return found


def _is_of_deepspeed(made: object) -> bool:
    return type(made).__module__.partition(".")[0] == "deepspeed"


def _describe_deepspeed(part: str, made: object) -> str:
    return (
        f"The {part} is {type(made).__name__} with DeepSpeed, which keeps the states of "
        "optimizers, and with ZeRO stage 3 the weights, in partitions that the parameters do "
        "not show: a ledger would not show every difference. Use DDP or FSDP."
    )


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer within the wrappers of Fabric and Accelerate.

    Raises:
        SettingError: For an optimizer of DeepSpeed.
    """
    if _is_of_deepspeed(optimizer):
        raise SettingError(_describe_deepspeed("optimizer", optimizer))
    inner = getattr(optimizer, "optimizer", None)
    found: torch.optim.Optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    return found
