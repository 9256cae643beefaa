"""The batches of a recorded loop: the same in every run, and in a run that resumes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9m.control.data.loaders import LoaderControl
from lightning_d9m.control.seeding import derive_seed, seed_all
from lightning_d9m.control.settings import Settings

_STAGE = "train"
_WRAPPING = ("accelerate", "lightning", "lightning_fabric")


class Batches:
    """Gives out the batches of each epoch, whose order and draws depend on seed and epoch only.

    Args:
        settings: The settings of the session.
        fit: Ordinal of the fit.
        rank: This rank.
    """

    def __init__(self, settings: Settings, fit: int, rank: int) -> None:
        self._seed, self._fit, self._rank = settings.seed, fit, rank
        self._control = LoaderControl(
            settings.seed, fit=fit, rank=rank, per_sample_rng=settings.per_sample_rng
        )

    def start_epoch(self, epoch: int) -> None:
        """Seed the epoch, independently of what was drawn before."""
        seed_all(derive_seed(self._seed, _STAGE, fit=self._fit, rank=self._rank, epoch=epoch))

    def iterate(
        self, loader: Iterable[Any], epoch: int, skipped: int, samplers: Mapping[str, Any]
    ) -> Iterator[Any]:
        """Return an iterator of an epoch's batches without the first ones.

        Args:
            loader: A ``DataLoader``, or any iterable: of that, the first batches are made and
                discarded.
            epoch: The epoch.
            skipped: Number of batches that an interrupted run has trained.
            samplers: What ``capture_samplers`` returned in that run.
        """
        if not _is_controlled(loader):
            batches = iter(loader)
            for _ in zip(range(skipped), batches, strict=False):
                pass
            return batches
        if skipped:
            self._control.resume_epoch(
                _STAGE, epoch, batches=skipped, cycled=lambda: False, samplers=samplers
            )
        loader = self._control.wrap_loader(loader, _STAGE)
        self._control.start_epoch(_STAGE, epoch)
        return iter(loader)

    def capture_samplers(self, *, within: bool) -> dict[str, Any]:
        """Return the states of the generators that the user's samplers hold."""
        return self._control.capture_samplers(_STAGE, within=within)

    def release(self) -> None:
        """Restore every loader."""
        self._control.release()


def _is_controlled(loader: object) -> bool:
    """Return whether ``LoaderControl`` can place the loader at any batch.

    Loaders of Fabric and Accelerate move and divide batches in their own iteration, and draw their
    order from torch's generator, which each epoch seeds.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return type(loader).__module__.partition(".")[0] not in _WRAPPING


def unwrap_model(model: Any) -> torch.nn.Module:
    """Return the model within the wrappers of DDP and Fabric, whose prefixes names then lack."""
    while type(model).__name__ in ("DistributedDataParallel", "_FabricModule"):
        model = model.module
    found: torch.nn.Module = model
    return found


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer within the wrappers of Fabric and Accelerate."""
    inner = getattr(optimizer, "optimizer", None)
    found: torch.optim.Optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    return found
