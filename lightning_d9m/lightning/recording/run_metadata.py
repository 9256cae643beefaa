"""The facts of a run that its ledger records."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from torch import nn

from lightning_d9m.control.environment import control_is_on
from lightning_d9m.ledger.format.records import Header, RunFacts, Scalar
from lightning_d9m.ledger.stack import LOGICAL_RANKS, capture_compiler
from lightning_d9m.lightning.lightning_private import is_compiled, list_loaders
from lightning_d9m.lightning.trainer_session import TrainerSession
from lightning_d9m.ranks.ranks import Ranks
from lightning_d9m.recording.replicated_state import ReplicatedState
from lightning_d9m.recording.run_recorder import describe_training

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def describe_run(
    trainer: "Trainer",
    module: "LightningModule",
    session: TrainerSession,
    further: Mapping[str, Scalar] = MappingProxyType({}),
    *,
    trains: bool = True,
) -> tuple[Header, RunFacts, ReplicatedState | None]:
    """Return what the ledger of a run begins with; ranks are compared if it trains."""
    shared: dict[str, Scalar] = {"precision": str(trainer.precision)}
    if trains:
        shared |= {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": str(trainer.gradient_clip_val),
            "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm or "norm"),
        }
    overridden = " ".join(session.overridden if control_is_on() else [])
    header, facts, replicated = describe_training(
        Ranks(trainer.global_rank),
        session.settings,
        _describe_layout(trainer),
        module,
        cast(nn.Module, trainer.model),
        fit=session.fit,
        further={**({"overridden": overridden} if overridden else {}), **further},
        loaders=list_loaders(trainer.fit_loop) if trains else (),
        trainer=shared,
        optimizers=trainer.optimizers,
        schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
    )
    return header, facts, replicated if trains else None


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
    return layout
