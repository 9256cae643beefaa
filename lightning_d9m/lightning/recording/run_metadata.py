"""The facts of a run that its ledger records."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from torch import nn

from lightning_d9m.control.environment import control_is_on
from lightning_d9m.hashing.flat_parameters import find_flat_layouts
from lightning_d9m.hashing.training_state import describe_model
from lightning_d9m.ledger.compiler import capture_compiler
from lightning_d9m.ledger.format.fields import Scalar
from lightning_d9m.ledger.format.records import Header, RunFacts
from lightning_d9m.ledger.stack import LOGICAL_RANKS
from lightning_d9m.lightning.lightning_private import is_compiled, list_loaders
from lightning_d9m.lightning.trainer_session import TrainerSession
from lightning_d9m.recording import run_recorder
from lightning_d9m.recording.collective import Ranks
from lightning_d9m.recording.loader_facts import describe_loader
from lightning_d9m.recording.replicated_state import (
    ReplicatedState,
    describe_division,
    find_replicated_state,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def make_trainer_header(
    trainer: "Trainer",
    session: TrainerSession,
    further: Mapping[str, Scalar] = MappingProxyType({}),
) -> Header:
    """Return the ledger header of this rank, with further settings."""
    overridden = {"overridden": " ".join(session.overridden)} if session.overridden else {}
    return run_recorder.make_header(
        Ranks(trainer.global_rank),
        session.settings,
        _describe_layout(trainer),
        world_size=trainer.world_size,
        fit=session.fit,
        further={**(overridden if control_is_on() else {}), **further},
    )


def _is_compiled(model: "LightningModule") -> bool:
    """Return whether a module of a model, or the model, was passed to ``torch.compile``."""
    return is_compiled(model) or any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None  # noqa: SLF001 - module.compile() leaves no other trace
        for module in model.modules()
    )


def _describe_layout(trainer: "Trainer") -> dict[str, Scalar]:
    layout: dict[str, Scalar] = {
        "world.size": trainer.world_size,
        "world.nodes": trainer.num_nodes,
        "world.devices_per_node": trainer.num_devices,
        "world.strategy": type(trainer.strategy).__name__,
        "world.accelerator": type(trainer.accelerator).__name__,
    }
    if _is_compiled(trainer.lightning_module):
        layout |= capture_compiler()
    logical_ranks = getattr(trainer.strategy, "logical_ranks", None)
    if logical_ranks is not None:
        layout[LOGICAL_RANKS] = logical_ranks
    layouts = find_flat_layouts(cast(nn.Module, trainer.model))
    return {**layout, **describe_division(trainer.lightning_module, layouts)}


def describe_run(trainer: "Trainer", module: "LightningModule") -> RunFacts:
    """Return the model, data and Trainer settings that two comparable runs must share."""
    model, parameters = describe_trained_model(trainer, module)
    return RunFacts(
        model=model,
        parameters=parameters,
        train=[describe_loader(loader) for loader in list_loaders(trainer.fit_loop)],
        trainer={
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": str(trainer.gradient_clip_val),
            "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm or "norm"),
        },
    )


def describe_trained_model(trainer: "Trainer", module: "LightningModule") -> tuple[str, int]:
    """Return a digest of the model's names, shapes and dtypes, and its number of parameters."""
    return describe_model(module, find_flat_layouts(cast(nn.Module, trainer.model)))


def find_replicated(trainer: "Trainer", module: "LightningModule") -> ReplicatedState | None:
    """Return the state that must be equal on all ranks; None in a pipeline, and for one rank."""
    if trainer.world_size == 1:
        return None
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return find_replicated_state(
        module,
        trainer.optimizers,
        schedulers,
        layouts=find_flat_layouts(cast(nn.Module, trainer.model)),
    )
