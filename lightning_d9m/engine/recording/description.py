"""The header of a ledger and the facts of its run, before the first step."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_d9m.engine.control.environment import control_is_on
from lightning_d9m.engine.control.seed_calls import seed_calls
from lightning_d9m.engine.control.settings import Settings
from lightning_d9m.engine.hashing.shards import (
    FlatLayout,
    count_stages,
    find_flat_layouts,
)
from lightning_d9m.engine.hashing.training_state import count_sharded, describe_model
from lightning_d9m.engine.ledger.command import SEEDED, capture_program
from lightning_d9m.engine.ledger.format.records import (
    MAX_NAME,
    Header,
    LoaderFacts,
    RunFacts,
    Scalar,
)
from lightning_d9m.engine.ledger.stack import (
    PIPELINE_STAGES,
    SHARDED_PARAMETERS,
    capture_stack,
)
from lightning_d9m.engine.probes.training import Training, Watched
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.state.state import find_generators
from lightning_d9m.version import __version__

if TYPE_CHECKING:
    from lightning_d9m.engine.recording.rank_agreement import ReplicatedState


def describe_training(
    ranks: Ranks,
    settings: Settings,
    layout: Mapping[str, Any],
    training: Training,
    *,
    fit: int,
    further: Mapping[str, Scalar] = MappingProxyType({}),
    loaders: Iterable[object] = (),
    trainer: Mapping[str, Scalar] = MappingProxyType({}),
) -> "tuple[Header, RunFacts, ReplicatedState | None]":
    """Return the header of this rank's ledger, the facts, and what must be equal on all ranks.

    ``layout`` is what the stack says of processes and devices, ``"world.size"`` their number;
    ``trainer`` has settings that two comparable trainings must share.
    """
    model = training.model
    layouts = find_flat_layouts(model if training.wrapped is None else training.wrapped)
    control = {} if control_is_on() else {"control": "off"}
    calls = "; ".join(seed_calls.found)[:MAX_NAME]
    seeded = {SEEDED: calls} if calls else {}
    header = Header(
        rank=ranks.rank,
        world_size=layout["world.size"],
        fit=fit,
        seed=settings.seed,
        created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        settings={**settings.as_record(), **control, **further},
        stack=capture_stack({**layout, **describe_division(model, layouts)}),
        package=__version__,
        # Once in a ledger: starting git on each of many ranks would read the repository as often.
        program={**capture_program(), **seeded} if ranks.rank == 0 else {},
    )
    described, parameters = describe_model(model, layouts)
    loaders = [*loaders]
    train = tuple(describe_loader(loader) for loader in loaders)
    # `d9m locate` names them where batches differ: the watch sees no draw from a generator that the
    # data holds, only reads from outside.
    if Watched.watch is not None:
        Watched.watch.generators = tuple(_find_loader_generators(loaders))
    facts = RunFacts(model=described, parameters=parameters, train=train, trainer=trainer)
    if layout["world.size"] == 1:
        return header, facts, None
    # One process has nothing to compare, and loads none of it.
    from lightning_d9m.engine.recording.rank_agreement import find_replicated_state

    optimizers, schedulers = training.list_optimizers(), training.list_schedulers()
    return header, facts, find_replicated_state(model, optimizers, schedulers, layouts=layouts)


def _find_loader_generators(loaders: Iterable[object]) -> Iterator[str]:
    """Yield the paths of the generators in the dataset and the collate function of each loader."""
    for loader in loaders:
        yield from find_generators(
            {name: getattr(loader, name, None) for name in ("dataset", "collate_fn")}
        )


def describe_loader(loader: object) -> LoaderFacts:
    """Return how many samples and batches a loader has, and its batch size, where it can tell."""
    batch_size = getattr(loader, "batch_size", None)
    # A size that cannot be told is recorded as unknown, and compared as such.
    if batch_size is None:  # a custom batch sampler, or no automatic batching
        batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return LoaderFacts(
        samples=_count(getattr(loader, "dataset", None)),
        batch_size=batch_size if isinstance(batch_size, int) else None,
        batches=_count(loader),
    )


def _count(sized: Any) -> int | None:
    with suppress(TypeError, NotImplementedError):  # an iterable dataset has no length
        return len(sized)
    return None


def describe_division(model: nn.Module, layouts: Mapping[int, FlatLayout]) -> dict[str, Scalar]:
    """Return what the stack says of a model of which ranks hold different parts."""
    counts = {
        SHARDED_PARAMETERS: count_sharded(model, layouts),
        PIPELINE_STAGES: count_stages(model),
    }
    return {name: count for name, count in counts.items() if count}
