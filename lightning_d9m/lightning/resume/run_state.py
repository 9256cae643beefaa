"""The state of a run that a checkpoint of Lightning leaves out: capture and restore."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_d9m.control.data.data_state import CHANGES, DATA, NUMBERS
from lightning_d9m.control.data.resumable_sampler import unwrap
from lightning_d9m.control.data.seeded_dataset import SeededCollate
from lightning_d9m.control.seeding import (
    capture_generators,
    decode_rng,
    encode_rng,
    restore_generators,
    restore_rng,
)
from lightning_d9m.errors import SettingError
from lightning_d9m.hashing.training_state import ModelTensors
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.logical_ranks.steps import get_logical_steps
from lightning_d9m.lightning.packages import is_of_program, rank_zero
from lightning_d9m.lightning.resume.program_state import Captured, ProgramState
from lightning_d9m.lightning.saved_state import (
    FROZEN,
    VALIDATION,
    LoopPhase,
    SavedRank,
    SavedResult,
    SavedState,
)
from lightning_d9m.lightning.trainer_attributes import (
    get_epoch_counts,
    get_reload_interval,
    list_callbacks,
    list_schedulers,
    name_callbacks,
    ranks_of,
)
from lightning_d9m.state.plain_data import decode_plain, encode_plain, pack_bytes, unpack_bytes
from lightning_d9m.state.search import find_generators, search
from lightning_d9m.text import pluralize

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from lightning_d9m.lightning.trainer_session import TrainerSession


# They hold the whole state in almost every training, so that ranks wait for each other once.
_FIRST_BYTES = 64 * 2**10


def capture_user_state(
    trainer: "Trainer", phase: LoopPhase, program: ProgramState
) -> tuple[SavedRank, Captured]:
    """Return the states of the user's generators and metrics, and of the program's objects.

    An evaluation changes them too; an interrupted one is run again as a whole.
    """
    reset = find_metrics_to_reset(trainer, phase)
    found, unknown = program.capture()
    skipped = tuple(f"model.{name}." for name in reset)
    logical = get_logical_steps(trainer)
    metrics = {} if logical is None else logical.metrics.capture()
    user = SavedRank(
        generators=capture_generators(_name_datasets(trainer)),
        reset=reset,
        metric_states={p: s for p, s in metrics.items() if not f"{p}.".startswith(skipped)},
    )
    return user, ({p: data for p, data in found.items() if not p.startswith(skipped)}, unknown)


def capture(
    trainer: "Trainer", session: "TrainerSession", user: SavedRank, phase: LoopPhase
) -> SavedRank:
    """Add the state of this rank that is read from the Trainer and the session.

    Between epochs it has neither the generators of training, which an epoch seeds, nor the results
    of the epoch that has ended: ``restore_within`` alone reads them.
    """
    logical = get_logical_steps(trainer)
    within = phase != "epoch"
    return replace(
        user,
        rng=encode_rng(session.capture_rng()) if within else None,
        callback_metrics={name: _copy(own) for name, own in trainer.callback_metrics.items()},
        results=capture_results(trainer) if within else [],
        gradients=capture_gradients(trainer),
        train_reload_epoch=_finite(lightning_private.get_reload_epoch(trainer, "train")),
        validation_reload_epoch=_finite(lightning_private.get_reload_epoch(trainer, "validate")),
        logged=[] if logical is None else [logical.logged.capture()],
    )


def gather_ranks(trainer: "Trainer", state: SavedState) -> SavedState:
    """Return a state with those of all ranks, on rank 0; every rank calls this."""
    if trainer.world_size == 1:
        return state
    (own,) = state.ranks
    rows = ranks_of(trainer).gather_bytes(
        encode_plain(own.as_plain()), first=_FIRST_BYTES, on_first_rank=True
    )
    if not trainer.is_global_zero:
        return state
    others = {
        rank: SavedRank.from_plain(decode_plain(row))
        for rank, row in enumerate(rows)
        if rank != trainer.global_rank
    }
    return replace(state, ranks=[others.get(rank, own) for rank in range(len(rows))])


def find_unmatched_state(trainer: "Trainer", rank: SavedRank) -> list[str]:
    """Return the paths of generators that datasets hold only here or only in the checkpoint."""
    generators = set(find_generators(_name_datasets(trainer))) ^ set(rank.generators)
    if not lightning_private.has_loaders(trainer.fit_loop.epoch_loop.val_loop):
        generators = {path for path in generators if not path.startswith(VALIDATION)}
    return sorted(generators)


def find_reloaded_generators(trainer: "Trainer", rank: SavedRank, epoch: int) -> list[str]:
    """Return the generators and values of loaders that are loaded again for the resumed epoch.

    The dataset of the new loader may be a new object, whose generator starts again, or the same
    one, whose generator continues; a resumed run cannot tell.
    """
    every = get_reload_interval(trainer)
    loaded_epochs = {"train.": rank.train_reload_epoch, VALIDATION: rank.validation_reload_epoch}
    stages = tuple(
        stage
        for stage, loaded in loaded_epochs.items()
        if every and loaded is not None and epoch - loaded >= every
    )
    paths = [*rank.generators, *_name_sampler_states(rank)]
    return [path for path in paths if path.startswith(stages)]


def _name_sampler_states(rank: SavedRank) -> Iterator[str]:
    """Yield the paths of what is saved of the samplers and datasets of loaders."""
    for number, states in rank.samplers.items():
        loader = number if number.startswith(VALIDATION) else f"train.{number}"
        yield from (f"{loader}.{path.rstrip(chr(39))}" for path in states.get(DATA, {}))
        for path, values in states.get(NUMBERS, {}).items():
            yield from (f"{loader}.{path}.{name}" for name in values)
        for path in states.get(CHANGES, {}):
            yield f"{loader}.sampler.{path.partition('.')[2].rstrip(chr(39))}"


def restore_outside(
    trainer: "Trainer",
    session: "TrainerSession",
    rank: SavedRank,
    report: Callable[[Sequence[str]], None],
) -> None:
    """Restore state that outlives an epoch. Called once, before the first epoch starts.

    ``report`` is called with problems that training finds later; see ``restore_gradients``.
    """
    _restore_rng_and_metrics(trainer, rank)
    session.restore_validation(rank.samplers)  # again, after a sanity check
    restore_gradients(trainer, rank.gradients, report)
    epoch = get_epoch_counts(trainer).processed
    _settle_reload(trainer, "train", rank.train_reload_epoch, epoch)


def restore_validation(trainer: "Trainer", session: "TrainerSession", rank: SavedRank) -> None:
    """Restore the state of the validation loaders. Called once, after they were loaded."""
    session.restore_validation(rank.samplers)
    generators = {
        path: state for path, state in rank.generators.items() if path.startswith(VALIDATION)
    }
    restore_generators(_name_datasets(trainer), generators)
    saved = rank.validation_reload_epoch
    _settle_reload(trainer, "validate", saved, trainer.current_epoch)


def restore_within(
    trainer: "Trainer", rank: SavedRank, report: Callable[[Sequence[str]], None]
) -> None:
    """Restore state that is reset at the start of an epoch, as ``restore_outside`` does.

    Called once, before the first remaining batch of a partly trained epoch.
    """
    restore_results(trainer, rank.results)
    if (logical := get_logical_steps(trainer)) is not None:
        logical.logged.restore(rank.logged, here=trainer.is_global_zero)
    restore_gradients(trainer, rank.gradients, report)
    _restore_rng_and_metrics(trainer, rank)
    if rank.rng is not None:
        restore_rng(decode_rng(rank.rng))


def _restore_rng_and_metrics(trainer: "Trainer", rank: SavedRank) -> None:
    restore_generators(_name_datasets(trainer), rank.generators)
    if (logical := get_logical_steps(trainer)) is not None:
        logical.metrics.restore(rank.metric_states)


def _settle_reload(
    trainer: "Trainer", stage: Literal["train", "validate"], saved: int | None, epoch: int
) -> None:
    """Set the epoch that counts as the last reload, so that the next reload is due in time."""
    if saved is not None:
        due = epoch - saved >= get_reload_interval(trainer)
        lightning_private.set_reload_epoch(trainer, stage, epoch if due else saved)


def _name_datasets(trainer: "Trainer") -> dict[str, object]:
    """Return the datasets and functions of the loaders, by name."""
    owners: dict[str, object] = {}
    fit = trainer.fit_loop
    for stage, loop in (("train", fit), ("validate", fit.epoch_loop.val_loop)):
        for number, part in enumerate(lightning_private.list_loaders(loop)):
            dataset, collate = getattr(part, "dataset", None), getattr(part, "collate_fn", None)
            owners[f"{stage}.{number}.dataset"] = unwrap(dataset)
            owners[f"{stage}.{number}.collate_fn"] = (
                collate.user_function if type(collate) is SeededCollate else collate
            )
    return owners


def _finite(epoch: float) -> int | None:
    return None if epoch == float("-inf") else int(epoch)


def capture_frozen(model: ModelTensors) -> dict[str, dict[str, list[str]]]:
    """Return the names of frozen parameters, as settings of the run.

    Callbacks and hooks freeze and unfreeze them at the start of an epoch.
    """
    parameters = [name for name, tensor in model.listed[0] if not tensor.requires_grad]
    return {FROZEN: {"parameters": parameters}}


def restore_frozen(trainer: "Trainer", settings: Mapping[str, Any]) -> None:
    """Freeze and unfreeze what was so when ``capture_frozen`` was called, and log what changed."""
    frozen = settings[FROZEN]
    module = trainer.lightning_module
    changed = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in frozen["parameters"]):
            parameter.requires_grad_(not parameter.requires_grad)
            changed.append(name)
    if changed:
        rank_zero().rank_zero_info(
            f"{pluralize(len(changed), 'parameter')} frozen or unfrozen as when the checkpoint was "
            f"saved, {changed[0]} first. To train others, load its weights without ckpt_path."
        )


def read_options(trainer: "Trainer") -> dict[str, Any]:
    """Return the options of the Trainer that callbacks may set, as for accumulation."""
    names = inspect.signature(type(trainer).__init__).parameters
    own = {name: value for name, value in vars(trainer).items() if name in names}
    plain = (float, int, str, type(None))
    return {name: value for name, value in own.items() if isinstance(value, plain)}


def find_starters(trainer: "Trainer", schedulers: Sequence[object]) -> list[str]:
    """Return the callbacks that hold a scheduler with which the fit did not begin.

    They have put it in the place of another when an epoch started, and Lightning does not call
    their hook again for a partly trained epoch.
    """
    first = {id(own) for own in schedulers}
    new = {id(own) for own in list_schedulers(trainer)} - first
    named = name_callbacks(list_callbacks(trainer)) if new else {}
    return [
        name
        for name, callback in named.items()
        if any(id(own) in new for _, own in search({name: callback}, depth=2))
    ]


def start_schedules(trainer: "Trainer", names: Sequence[str]) -> None:
    """Let callbacks set up their schedulers, as they do at the start of an epoch."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    for name, callback in name_callbacks(list_callbacks(trainer)).items():
        if name in names:
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
    # A new schedule sets the rates.
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


_ARGUMENTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)


def restore_latest(trainer: "Trainer", latest: Mapping[str, Any]) -> None:
    """Restore the metrics for callbacks and schedulers."""
    device = trainer.strategy.root_device
    moved = {name: value.to(device, copy=True) for name, value in latest.items()}
    lightning_private.update_callback_metrics(trainer, moved)


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def find_metrics_to_reset(trainer: "Trainer", phase: LoopPhase) -> list[str]:
    """Return the names of logged metrics that Lightning resets after the hooks of this phase.

    These are the metrics of training at the end of an epoch, and of a finished validation.
    """
    loop = trainer.fit_loop.epoch_loop
    ending: list[Any] = []
    if phase == "epoch":
        ending += lightning_private.get_logged_results(loop).values()
    if phase != "validation":
        ending += lightning_private.get_logged_results(loop.val_loop).values()
    names = [
        metric.meta.metric_attribute
        for metric in ending
        if not metric.is_tensor and not metric.has_reset
    ]
    return [name for name in dict.fromkeys(names) if name is not None]


def capture_results(trainer: "Trainer") -> list[SavedResult]:
    """Return the running sums from which the epoch's means are computed.

    The state of a logged metric object is in ``metric_state``.
    """
    return [
        _capture_result(key, result)
        for key, result in lightning_private.get_logged_results(trainer.fit_loop.epoch_loop).items()
        if result.is_tensor or result.meta.metric_attribute is not None
    ]


def _capture_result(key: str, result: Any) -> SavedResult:
    meta = result.meta
    updates, value = lightning_private.get_update_state(result)
    cache = None
    with suppress(SettingError):
        cache = pack_bytes(encode_plain(value))
    count = getattr(result, "cumulated_batch_size", None) if result.is_tensor else None
    return SavedResult(
        key=key,
        arguments={name: getattr(meta, name) for name in _ARGUMENTS},
        reduce_fx=meta.reduce_fx.__name__,
        synced=meta.sync.should,
        rank_zero_only=meta.sync.rank_zero_only,
        is_tensor=result.is_tensor,
        value=_copy(result.value) if result.is_tensor else None,
        count=None if count is None else _copy(count),
        updates=updates,
        cache=cache,
        has_reset=result.has_reset,
    )


def restore_results(trainer: "Trainer", results: Sequence[SavedResult]) -> None:
    """Restore the results of the epoch. Called once, before its next batch."""
    lightning_private.keep_results_at_next_batch(trainer)
    collection = lightning_private.get_logged_results(trainer.fit_loop.epoch_loop)
    metrics = dict(trainer.lightning_module.named_modules())
    device = trainer.strategy.root_device
    for saved in results:
        attribute = saved.arguments["metric_attribute"]
        if not saved.is_tensor and attribute not in metrics:
            continue
        result = lightning_private.create_result(
            trainer,
            saved.arguments | {"reduce_fx": saved.reduce_fx},
            is_tensor=saved.is_tensor,
            synced=saved.synced,
            rank_zero_only=saved.rank_zero_only,
        )
        result.value = saved.value if saved.is_tensor else metrics[attribute]
        if saved.count is not None:
            result.cumulated_batch_size = saved.count
        cache = None if saved.cache is None else decode_plain(unpack_bytes(saved.cache), device)
        lightning_private.set_update_state(result, saved.updates, cache)
        result.has_reset = saved.has_reset
        collection[saved.key] = result.to(device)


_ADDED = (
    "The program adds to the gradient of {}, with which it stepped before the checkpoint was "
    "saved, and which the checkpoint lacks. Call zero_grad() between a step and the next backward "
    "pass."
)


def mark_used_gradients(trainer: "Trainer", optimizer: "Optimizer") -> None:
    """Mark the gradients with which a module that optimizes manually steps."""
    if trainer.lightning_module.automatic_optimization:
        return
    for parameter in _list_parameters(optimizer):
        gradient: Any = parameter.grad
        if gradient is not None:
            gradient.d9m_used = gradient._version  # noqa: SLF001 - torch has no other


def capture_gradients(trainer: "Trainer") -> dict[str, Any]:
    """Return gradients by the names of their parameters; None for one that a step has used.

    They are those to which a backward pass after the save adds. Lightning zeroes gradients before
    the first backward pass of a step; a module that optimizes manually, or overrides
    ``optimizer_zero_grad``, may keep them. Saving them with every checkpoint would make it larger
    by the model on each rank. So gradients with which an optimizer has just stepped are left out,
    because programs zero them next. If a resumed run adds to one, it is refused.
    """
    module = trainer.lightning_module
    manual = not module.automatic_optimization
    accumulates = not manual and lightning_private.accumulates_gradients(trainer)
    if not (manual or accumulates or is_of_program(module.optimizer_zero_grad)):
        return {}
    if (logical := get_logical_steps(trainer)) is not None:
        return logical.kept.capture()
    found: dict[str, Any] = {n: p for n, p in module.named_parameters() if p.grad is not None}
    if not manual and not accumulates:
        stepped = {id(part) for each in trainer.optimizers for part in _list_parameters(each)}
        return {name: None for name, parameter in found.items() if id(parameter) in stepped}
    return {
        name: None
        if manual and _is_used(parameter)
        else parameter.grad.detach().to("cpu", copy=True)
        for name, parameter in found.items()
    }


def restore_gradients(
    trainer: "Trainer", gradients: Mapping[str, Any], report: Callable[[Sequence[str]], None]
) -> None:
    """Restore gradients; before a backward pass adds to one that was left out, report it once."""
    if not gradients:
        return
    if (logical := get_logical_steps(trainer)) is not None:
        logical.kept.restore(gradients, logical.block)
        return
    reported: list[str] = []

    def report_first(name: str) -> None:
        if not reported:
            reported.append(_ADDED.format(name))
            report(reported)

    for name, parameter in trainer.lightning_module.named_parameters():
        kept = gradients.get(name)
        parameter.grad = None if kept is None else torch.empty_like(parameter).copy_(kept)
        if kept is None and name in gradients and parameter.requires_grad:
            _watch(parameter, partial(report_first, name))


def _is_used(parameter: "Parameter") -> bool:
    gradient: Any = parameter.grad
    return bool(getattr(gradient, "d9m_used", None) == gradient._version)  # noqa: SLF001 - as above


def _list_parameters(optimizer: "Optimizer") -> Iterator["Parameter"]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _watch(parameter: "Parameter", report: Callable[[], None]) -> None:
    """Report a problem if the next backward pass adds to a gradient that nothing has zeroed."""
    # NaN, because in-place operations other than zero_() leave it in place.
    stand_in = torch.full_like(parameter, torch.nan)
    marked: Any = stand_in
    marked.d9m_used = marked._version  # noqa: SLF001 - as above; a checkpoint leaves it out too
    parameter.grad = stand_in

    def check(_: "Tensor") -> None:  # called before the gradient is added
        handle.remove()
        if parameter.grad is stand_in and bool(stand_in.isnan().any()):
            stand_in.zero_()
            report()

    handle = parameter.register_hook(check)
