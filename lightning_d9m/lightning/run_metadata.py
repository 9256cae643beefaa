"""Facts about a run that its ledger records."""

from datetime import datetime, timezone
from typing import Any

from lightning_d9m.control.environment import control_is_on
from lightning_d9m.hashing.training_state import describe_model
from lightning_d9m.ledger.records import Header, LoaderFacts, RunFacts
from lightning_d9m.ledger.stack import capture_stack
from lightning_d9m.lightning.lightning_private import list_loaders
from lightning_d9m.lightning.trainer_session import TrainerSession
from lightning_d9m.recording.replicated_state import ReplicatedState, find_replicated_state
from lightning_d9m.version import __version__

# Under these each rank holds a part of every parameter, so that no two are to be equal.
_SHARDING = ("FSDPStrategy", "DeepSpeedStrategy")


def make_header(trainer: Any, run: TrainerSession) -> Header:
    """Return the ledger header of a run of this rank."""
    return Header(
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        fit=run.fit,
        seed=run.settings.seed,
        created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        settings=run.settings.as_record() | ({} if control_is_on() else {"control": "off"}),
        stack=capture_stack(_layout(trainer)),
        package=__version__,
    )


def _layout(trainer: Any) -> dict[str, str | int | bool | None]:
    return {
        "world.size": trainer.world_size,
        "world.nodes": trainer.num_nodes,
        "world.devices_per_node": trainer.num_devices,
        "world.strategy": type(trainer.strategy).__name__,
        "world.accelerator": type(trainer.accelerator).__name__,
    }


def describe_run(trainer: Any, module: Any) -> RunFacts:
    """Return the model, data and Trainer settings that two comparable runs must share."""
    model, parameters = describe_model(module)
    return RunFacts(
        model=model,
        parameters=parameters,
        train=[_facts_of_loader(loader) for loader in list_loaders(trainer.fit_loop)],
        trainer={
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": str(trainer.gradient_clip_val),
            "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm or "norm"),
        },
    )


def _facts_of_loader(loader: object) -> LoaderFacts:
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:  # a batch sampler of the user's, or no automatic batching
        batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return LoaderFacts(
        samples=_length(getattr(loader, "dataset", None)),
        batch_size=batch_size if isinstance(batch_size, int) else None,
        batches=_length(loader),
    )


def _length(sized: object) -> int | None:
    """Return a length, or None for what has none: an iterable dataset, say."""
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def find_replicated(trainer: Any, module: Any) -> ReplicatedState:
    """Return the state that must be equal on all ranks."""
    sharded = any(base.__name__ in _SHARDING for base in type(trainer.strategy).__mro__)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return find_replicated_state(module, trainer.optimizers, schedulers, sharded=sharded)
