"""The model and the samples of ``d9m audit inference``."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from lightning_d9m.errors import CommandError, SettingError


class Subject:
    """A model in evaluation mode, and its samples.

    Args:
        module: The model.
        samples: The samples, of one shape: each a tensor, or a tuple or mapping of the arguments of
            the model's ``forward`` (of the batch of a LightningModule's ``predict_step``).
        device: The device of the model.
    """

    def __init__(self, module: nn.Module, samples: Sequence[Any], device: str) -> None:
        self.module = module.eval().to(device)
        self.samples = samples
        self._device = device
        step = getattr(type(module), "predict_step", None)
        # Lightning's default calls `forward` with the whole batch, labels included.
        self._predicts = step is not None and not step.__module__.startswith(
            ("lightning.", "pytorch_lightning.")
        )

    def collate(self, indices: Sequence[int]) -> Any:
        """Return a batch of these samples, on the device.

        Raises:
            CommandError: They do not fit into one batch.
        """
        try:
            batch = default_collate([self.samples[index] for index in indices])
        except (RuntimeError, TypeError) as error:
            raise CommandError(
                f"The samples {list(indices)} do not fit into one batch: {error}. Let the function "
                "return samples of one shape, as tensors, tuples or mappings of tensors."
            ) from error
        return tree_map(
            lambda leaf: leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf, batch
        )

    def call(self, batch: Any) -> Any:
        """Evaluate a batch with a fixed seed, so that random draws cause no differences."""
        torch.manual_seed(0)
        return self.call_unseeded(batch)

    def call_unseeded(self, batch: Any) -> Any:
        """Evaluate a batch without setting the seed."""
        with torch.no_grad():
            if self._predicts:
                return self.module.predict_step(batch, 0)  # type: ignore[operator]
            if isinstance(batch, Mapping):
                return self.module(**batch)
            if isinstance(batch, (tuple, list)):
                return self.module(*batch)
            return self.module(batch)


def list_batches(samples: int, size: int) -> Iterator[list[int]]:
    """Yield batches of one size that contain every sample, in three orders.

    The last batch of an order is filled with samples from its beginning.
    """
    draws = torch.Generator().manual_seed(size)
    orders = (
        list(range(samples)),
        list(reversed(range(samples))),
        torch.randperm(samples, generator=draws).tolist(),
    )
    for order in orders:
        for start in range(0, samples, size):
            yield [order[(start + place) % samples] for place in range(size)]


def load_subject(target: str, device: str, most: int) -> Subject:
    """Call the function that ``target`` names, and return its model and samples.

    Args:
        target: ``module:function`` or ``path/to/script.py:function``.
        device: The device of the model.
        most: Maximum number of samples.

    Raises:
        SettingError: The target does not exist, or the function returns something else.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise SettingError(
            f"The target is {target!r}; allowed: module:function or path/to/script.py:function, "
            "where the function returns (module, samples)."
        )
    found = getattr(_load(place), name, None)
    if not callable(found):
        raise SettingError(f"{place} has no function {name!r}.")
    if isinstance(found, nn.Module):
        raise SettingError(
            f"{target} is the module {type(found).__name__}, not a function. Name a function that "
            "takes no arguments and gives both a module and samples."
        )
    with _named(f"The function {target}"):
        returned = found()
    if (
        not isinstance(returned, tuple)
        or len(returned) != 2  # noqa: PLR2004 - a pair
        or not isinstance(returned[0], nn.Module)
        or not hasattr(returned[1], "__getitem__")
        or not hasattr(returned[1], "__len__")
    ):
        raise SettingError(
            f"{target} returned a {type(returned).__name__}; allowed: a pair (module, samples) of "
            "an nn.Module and a sequence or map-style dataset of samples."
        )
    module, dataset = returned
    samples = [dataset[index] for index in range(min(len(dataset), most))]
    if len(samples) < 2:  # noqa: PLR2004 - one sample makes no batch
        raise SettingError(f"{target} returned {len(samples)} samples; at least 2 are needed.")
    subject = Subject(module, samples, device)
    batch = subject.collate([0])
    with _named("The model, with a batch of the first sample,"):
        subject.call(batch)
    return subject


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn any error of the user's code into one that says where it arose."""
    try:
        yield
    except Exception as error:
        raise CommandError(
            f"{what} raised {type(error).__name__}: {error}. Correct it, then audit it."
        ) from error


def _load(place: str) -> Any:
    if not place.endswith(".py"):
        if "" not in sys.path:  # as `python -m` does
            sys.path.insert(0, "")
        try:
            return import_module(place)
        except ModuleNotFoundError as error:
            raise SettingError(
                f"The module {place} cannot be imported: {error}. Give a module that can be "
                "imported from this folder, or the path of a script."
            ) from error
    spec = spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None or not Path(place).exists():
        raise SettingError(f"The script {place} does not exist.")
    loaded = module_from_spec(spec)
    sys.modules[spec.name] = loaded
    with _named(f"The script {place}"):
        spec.loader.exec_module(loaded)
    return loaded
