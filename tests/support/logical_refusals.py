"""A small model, and its training with logical ranks."""

import os
from types import FunctionType, MethodType

import trainings
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_d9m import DDPDeterministicStrategy, DeterminismCallback

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
DATA = RandomDataset(32, 16)


def fit(folder, model=None, loader=None, callbacks=None, options=None, ranks=4, **words):
    strategy = words.pop("strategy", None)
    return trainings.fit(
        model or BoringModel(),
        DataLoader(DATA, batch_size=2) if loader is None else loader,
        seed=None,
        callbacks=[DeterminismCallback()] if callbacks is None else callbacks,
        default_root_dir=folder,
        devices=PROCESSES,
        strategy=strategy or DDPDeterministicStrategy(logical_ranks=ranks, **options or {}),
        **words,
    )


def change(owner, **attributes):
    """Set attributes, functions as methods; return the object."""
    for name, value in attributes.items():
        is_method = isinstance(value, FunctionType)
        setattr(owner, name, MethodType(value, owner) if is_method else value)
    return owner


def make_model(step=None, **attributes):
    """Return a model with another step, which gets the model and a batch, or attributes."""
    if step is not None:
        attributes["training_step"] = lambda model, batch, batch_idx: step(model, batch)
    return change(BoringModel(), **attributes)
