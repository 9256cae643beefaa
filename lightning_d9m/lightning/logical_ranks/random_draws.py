"""Seeds of the micro-batches of logical ranks, within a Trainer's run."""

import random
import sys
from typing import Any

import numpy as np
import torch

from lightning_d9m.control.seeding import derive_seed, seed_micro_batch
from lightning_d9m.lightning.trainer_attributes import Trainer, name_callbacks
from lightning_d9m.state.parts import GENERATOR, find_kind, is_of_program
from lightning_d9m.state.search import find_generators

# The draws between two steps, such as those of callbacks, are of no logical rank.
_BETWEEN_STEPS = -1


class MicroBatchSeeds:
    """Seeds all generators for each micro-batch.

    What a logical rank draws then depends neither on the process that computes it nor on what that
    process has computed before.
    """

    def __init__(self, seed: int, fit: int) -> None:
        self._seed = seed
        self._fit = fit
        self._generators: dict[str, Any] = {}

    def find_generators(self, trainer: Trainer) -> None:
        """Find the generators that the user's objects hold, which are seeded too."""
        owners: dict[str, object] = {"datamodule": trainer.datamodule}
        for name, module in trainer.lightning_module.named_modules():
            owners[f"model.{name}"] = module
            if is_of_program(module.__class__) or module is trainer.lightning_module:
                source = type(module).__module__
                owners[source] = _Globals(vars(sys.modules[source]))
        self._generators = find_generators(owners | name_callbacks(trainer.callbacks))

    def add_generator(self, path: str, generator: Any) -> None:
        """Add a generator of the module, unless it is known."""
        if all(generator is not known for known in self._generators.values()):
            self._generators[f"model.{path}"] = generator

    def start(self, stage: str, epoch: int, batch: int, logical_rank: int) -> None:
        """Seed for a micro-batch of a stage."""
        base = self._seed if stage == "train" else derive_seed(self._seed, f"{stage} step")
        seed_micro_batch(base, fit=self._fit, epoch=epoch, logical_rank=logical_rank, batch=batch)
        for path, generator in self._generators.items():
            seed = derive_seed(
                base,
                f"generator {path}",
                fit=self._fit,
                rank=logical_rank,
                epoch=epoch,
                index=batch,
            )
            _seed_generator(generator, seed)

    def end(self, stage: str, epoch: int, batch: int) -> None:
        """Seed for what follows the step, alike on all processes."""
        self.start(stage, epoch, batch, _BETWEEN_STEPS)


class _Globals:
    """The generators among the global variables of a source file."""

    def __init__(self, variables: dict[str, Any]) -> None:
        found = {name: value for name, value in variables.items() if find_kind(value) is GENERATOR}
        vars(self).update(found)


def _seed_generator(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
