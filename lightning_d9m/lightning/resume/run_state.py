"""The state of a run that a checkpoint of Lightning leaves out: capture and restore.

It has the position in the fit, too: Lightning saves checkpoints in hooks after which work remains,
the validation that follows a batch, or the end of the epoch. A resumed fit of Lightning skips it;
see ``finish_pending_work``.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9m.control.data.data_state import CHANGES, DATA, NUMBERS
from lightning_d9m.control.data.resumable_sampler import has_state
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
from lightning_d9m.lightning.packages import rank_zero
from lightning_d9m.lightning.resume.exactness import is_cut_by_max_steps
from lightning_d9m.lightning.resume.program_state import Captured, ProgramState
from lightning_d9m.lightning.saved_state import (
    FROZEN,
    VALIDATION,
    LoopPhase,
    LoopPosition,
    SavedRank,
    SavedResult,
    SavedState,
)
from lightning_d9m.lightning.trainer_attributes import (
    Trainer,
    list_schedulers,
    name_callbacks,
    ranks_of,
)
from lightning_d9m.state.parts import is_of_lightning, is_of_program
from lightning_d9m.state.plain_data import decode_plain, encode_plain, pack_bytes, unpack_bytes
from lightning_d9m.state.state import find_generators, search
from lightning_d9m.text import pluralize

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from lightning_d9m.lightning.trainer_session import TrainerSession


_read_signature = cache(inspect.signature)  # which takes as long as all else of a small state
# They hold the whole state in almost every training, so that ranks wait for each other once.
_FIRST_BYTES = 64 * 2**10


def capture_user_state(
    trainer: Trainer, phase: LoopPhase, program: ProgramState
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
    trainer: Trainer, session: "TrainerSession", user: SavedRank, phase: LoopPhase
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
        train_reload_epoch=lightning_private.get_reload_epoch(trainer, "train"),
        validation_reload_epoch=lightning_private.get_reload_epoch(trainer, "validate"),
        logged=[] if logical is None else [logical.logged.capture()],
    )


def gather_ranks(trainer: Trainer, state: SavedState) -> SavedState:
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


def find_unmatched_state(trainer: Trainer, rank: SavedRank) -> list[str]:
    """Return the paths of generators that datasets hold only here or only in the checkpoint."""
    generators = set(find_generators(_name_datasets(trainer))) ^ set(rank.generators)
    if not lightning_private.has_loaders(trainer.fit_loop.epoch_loop.val_loop):
        generators = {path for path in generators if not path.startswith(VALIDATION)}
    return sorted(generators)


def find_reloaded_generators(trainer: Trainer, rank: SavedRank, epoch: int) -> list[str]:
    """Return the generators and values of loaders that are loaded again for the resumed epoch.

    The dataset of the new loader may be a new object, whose generator starts again, or the same
    one, whose generator continues; a resumed run cannot tell.
    """
    every = trainer.reload_dataloaders_every_n_epochs
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
    trainer: Trainer,
    session: "TrainerSession",
    rank: SavedRank,
    report: Callable[[Sequence[str]], None],
) -> None:
    """Restore state that outlives an epoch. Called once, before the first epoch starts.

    ``report`` is called with problems that training finds later; see ``restore_gradients``.
    """
    restore_generators(_name_datasets(trainer), rank.generators)
    if (logical := get_logical_steps(trainer)) is not None:
        logical.metrics.restore(rank.metric_states)
    session.restore_validation(rank.samplers)  # again, after a sanity check
    restore_gradients(trainer, rank.gradients, report)
    epoch = trainer.fit_loop.epoch_progress.current.processed
    _settle_reload(trainer, "train", rank.train_reload_epoch, epoch)


def restore_validation(trainer: Trainer, session: "TrainerSession", rank: SavedRank) -> None:
    """Restore the state of the validation loaders. Called once, after they were loaded."""
    session.restore_validation(rank.samplers)
    generators = {
        path: state for path, state in rank.generators.items() if path.startswith(VALIDATION)
    }
    restore_generators(_name_datasets(trainer), generators)
    saved = rank.validation_reload_epoch
    _settle_reload(trainer, "validate", saved, trainer.current_epoch)


def restore_within(
    trainer: Trainer, rank: SavedRank, report: Callable[[Sequence[str]], None]
) -> None:
    """Restore state that is reset at the start of an epoch, as ``restore_outside`` does.

    Called once, before the first remaining batch of a partly trained epoch.
    """
    restore_results(trainer, rank.results)
    restore_gradients(trainer, rank.gradients, report)
    restore_generators(_name_datasets(trainer), rank.generators)
    if (logical := get_logical_steps(trainer)) is not None:
        logical.logged.restore(rank.logged)
        logical.metrics.restore(rank.metric_states)
    if rank.rng is not None:
        restore_rng(decode_rng(rank.rng))


def _settle_reload(
    trainer: Trainer, stage: Literal["train", "validate"], saved: int | None, epoch: int
) -> None:
    """Set the epoch that counts as the last reload, so that the next reload is due in time."""
    if saved is not None:
        due = epoch - saved >= trainer.reload_dataloaders_every_n_epochs
        lightning_private.set_reload_epoch(trainer, stage, epoch if due else saved)


def _name_datasets(trainer: Trainer) -> dict[str, object]:
    """Return the datasets and functions of the loaders, and what is in loaders of the program."""
    owners: dict[str, object] = {}
    fit = trainer.fit_loop
    for stage, loop in (("train", fit), ("validate", fit.epoch_loop.val_loop)):
        for number, part in enumerate(lightning_private.list_loaders(loop)):
            for name in ("dataset", "collate_fn"):
                owners[f"{stage}.{number}.{name}"] = getattr(part, name, None)
            if iterates_itself(part):
                own = vars(part).keys() - vars(DataLoader(range(1))).keys()  # type: ignore[arg-type]
                owners |= {f"{stage}.{number}.loader.{name}": vars(part)[name] for name in own}
    return owners


def capture_frozen(model: ModelTensors) -> dict[str, dict[str, list[str]]]:
    """Return the names of frozen parameters, as settings of the run.

    Callbacks and hooks freeze and unfreeze them at the start of an epoch.
    """
    parameters = [name for name, tensor in model.listed[0] if not tensor.requires_grad]
    return {FROZEN: {"parameters": parameters}}


def restore_frozen(trainer: Trainer, settings: Mapping[str, Any]) -> None:
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


def read_options(trainer: Trainer) -> dict[str, Any]:
    """Return the options of the Trainer that callbacks may set, as for accumulation."""
    names = _read_signature(type(trainer).__init__).parameters
    own = {name: value for name, value in vars(trainer).items() if name in names}
    plain = (float, int, str, type(None))
    return {name: value for name, value in own.items() if isinstance(value, plain)}


def find_starters(trainer: Trainer, schedulers: Sequence[object]) -> list[str]:
    """Return the callbacks that hold a scheduler with which the fit did not begin.

    They have put it in the place of another when an epoch started, and Lightning does not call
    their hook again for a partly trained epoch.
    """
    first = {id(own) for own in schedulers}
    new = {id(own) for own in list_schedulers(trainer)} - first
    named = name_callbacks(trainer.callbacks) if new else {}
    return [
        name
        for name, callback in named.items()
        if any(id(own) in new for _, own in search({name: callback}, depth=2))
    ]


def start_schedules(trainer: Trainer, names: Sequence[str]) -> None:
    """Let callbacks set up their schedulers, as they do at the start of an epoch."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    for name, callback in name_callbacks(trainer.callbacks).items():
        if name in names:
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
    # A new schedule sets the rates.
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


_ARGUMENTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def find_metrics_to_reset(trainer: Trainer, phase: LoopPhase) -> list[str]:
    """Return the names of logged metrics that Lightning resets after the hooks of this phase.

    These are the metrics of training at the end of an epoch, and of a finished validation.
    """
    trained, validated, *_ = lightning_private.list_result_collections(trainer)
    ending = [*trained.values()] if phase == "epoch" else []
    ending += validated.values() if phase != "validation" else []
    names = [
        metric.meta.metric_attribute
        for metric in ending
        if not metric.is_tensor and not metric.has_reset
    ]
    return [name for name in dict.fromkeys(names) if name is not None]


def count_logged(trainer: Trainer) -> dict[str, int]:
    """Return how often each value of the training epoch was logged."""
    results = lightning_private.list_result_collections(trainer)[0].values()
    return {
        f"the logged value {own.meta.name!r} of {own.meta.fx}": own._update_count  # noqa: SLF001 - of torchmetrics
        for own in results
        if own.is_tensor and own.meta.on_epoch
    }


def capture_results(trainer: Trainer) -> list[SavedResult]:
    """Return the running sums from which the epoch's means are computed.

    The state of a logged metric object is in ``metric_state``.
    """
    return [
        _capture_result(key, result)
        for key, result in lightning_private.list_result_collections(trainer)[0].items()
        if result.is_tensor or result.meta.metric_attribute is not None
    ]


def _capture_result(key: str, result: Any) -> SavedResult:
    meta = result.meta
    cache = None
    with suppress(SettingError):
        cache = pack_bytes(encode_plain(result._forward_cache))  # noqa: SLF001 - of torchmetrics
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
        updates=result._update_count,  # noqa: SLF001 - of torchmetrics
        cache=cache,
        has_reset=result.has_reset,
    )


def restore_results(trainer: Trainer, results: Sequence[SavedResult]) -> None:
    """Restore the results of the epoch. Called once, before its next batch."""
    lightning_private.keep_results_at_next_batch(trainer)
    collection = lightning_private.list_result_collections(trainer)[0]
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
        result._update_count, result._forward_cache = saved.updates, cache  # noqa: SLF001 - of torchmetrics
        result.has_reset = saved.has_reset
        collection[saved.key] = result.to(device)


_ADDED = (
    "The program adds to the gradient of {}, with which it stepped before the checkpoint was "
    "saved, and which the checkpoint lacks. Call zero_grad() between a step and the next backward "
    "pass."
)


def mark_used_gradients(trainer: Trainer, optimizer: "Optimizer") -> None:
    """Mark the gradients with which a module that optimizes manually steps."""
    if trainer.lightning_module.automatic_optimization:
        return
    for parameter in _list_parameters(optimizer):
        gradient: Any = parameter.grad
        if gradient is not None:
            gradient.d9m_used = gradient._version  # noqa: SLF001 - of torch


def capture_gradients(trainer: Trainer) -> dict[str, Any]:
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
    if not (manual or accumulates or not is_of_lightning(module.optimizer_zero_grad)):
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
    trainer: Trainer, gradients: Mapping[str, Any], report: Callable[[Sequence[str]], None]
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
    return bool(getattr(gradient, "d9m_used", None) == gradient._version)  # noqa: SLF001 - of torch


def _list_parameters(optimizer: "Optimizer") -> Iterator["Parameter"]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _watch(parameter: "Parameter", report: Callable[[], None]) -> None:
    """Report a problem if the next backward pass adds to a gradient that nothing has zeroed."""
    # NaN, because in-place operations other than zero_() leave it in place.
    stand_in = torch.full_like(parameter, torch.nan)
    marked: Any = stand_in
    marked.d9m_used = marked._version  # noqa: SLF001 - of torch
    parameter.grad = stand_in

    def check(_: "Tensor") -> None:  # called before the gradient is added
        handle.remove()
        if parameter.grad is stand_in and bool(stand_in.isnan().any()):
            stand_in.zero_()
            report()

    handle = parameter.register_hook(check)


_COUNTERS = ("ready", "started", "processed", "completed")


def find_position(trainer: Trainer) -> LoopPosition:
    """Return the position of the fit, or of the checkpoint that the Trainer has loaded."""
    loop = trainer.fit_loop
    epochs = loop.epoch_progress.current
    batches = loop.epoch_loop.batch_progress.current
    step = trainer.global_step
    if epochs.started == epochs.processed:
        return LoopPosition(epochs.processed, step, 0, "epoch")
    phase: LoopPhase = "batch"
    validated = loop.epoch_loop.val_loop.batch_progress
    if batches.ready != batches.processed:
        phase = "within"
    elif trainer.validating and not (
        validated.is_last_batch and validated.current.completed == validated.current.ready
    ):
        phase = "validation"
    elif is_cut_by_max_steps(trainer) and not trainer.validating:
        phase = "cut"
    return LoopPosition(epochs.processed, step, batches.processed, phase)


def finish_pending_work(
    trainer: Trainer, position: LoopPosition, reset: Callable[[], None]
) -> bool:
    """Let a fit that has loaded a checkpoint finish what was pending when that was saved.

    ``reset`` is that of the fit loop, in which Lightning reads the progress that it has loaded.

    Returns:
        Whether nothing remains of the last batch. Then the loop over the batches does not restart.
    """
    fit = trainer.fit_loop
    loop = fit.epoch_loop
    progress: Any = loop.batch_progress
    at_end = position.phase == "cut"
    if position.phase == "epoch":
        _begin_epoch(fit)
    elif position.phase in ("batch", "validation"):
        saved_in_hook = progress.current.completed < progress.current.processed
        due = lightning_private.is_validation_due(trainer)
        if position.phase == "validation" or (saved_in_hook and due):
            _complete(progress)
            _reset_before_validation(loop.val_loop.batch_progress, position.phase, reset)
            return False
        at_end = saved_in_hook and progress.is_last_batch
        if at_end or not lightning_private.completes_batch(loop):
            _complete(progress)
            if not lightning_private.accumulates_gradients(trainer):
                lightning_private.count_step_batch(trainer)
            at_end = True
    _reset_by_epoch(progress, reset)
    return at_end


def reopen_epoch(checkpoint: Mapping[str, Any]) -> None:
    """Let a checkpoint of an epoch that ``max_steps`` cut short continue the epoch.

    It was saved when Lightning had ended the epoch.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    for part in (progress["total"], progress["current"]):
        part["processed"] = part["completed"] = part["started"] - 1


def draws_when_iterated(trainer: Trainer) -> bool:
    """Return whether a training loader may draw in this process when its iterator is made.

    torch's loader does not read a map-style dataset before a batch is fetched, and its batches are
    seeded one by one. An iterator is excluded: making it again would lose its first batch.
    """
    return any(
        loader.num_workers == 0 and isinstance(loader.dataset, IterableDataset)
        if isinstance(loader, DataLoader) and not iterates_itself(loader)
        else not isinstance(loader, Iterator)
        for loader in lightning_private.list_loaders(trainer.fit_loop)
    )


def iterates_itself(loader: object) -> bool:
    """Return whether the program has written the iteration of a loader."""
    own = (kind for kind in type(loader).__mro__ if "__iter__" in vars(kind))
    return any(map(is_of_program, islice(own, 1)))


def drop_consumed_states(trainer: Trainer) -> None:
    """Leave out states of loaders that only count the batches of the epoch that has ended.

    A fit of a number of steps (``max_steps``) loads them between epochs too, where torchdata's
    loader would skip as many batches of the next epoch.
    """
    loaders = lightning_private.list_loaders(trainer.fit_loop)
    stateful = [loader for loader in loaders if has_state(loader)]
    states = lightning_private.list_pending_loader_states(trainer)
    if len(states) == len(stateful):  # otherwise Lightning raises an error
        kept = [
            {} if isinstance(loader, DataLoader) and not has_state(loader.dataset) else state
            for loader, state in zip(stateful, states, strict=True)
        ]
        lightning_private.set_pending_loader_states(trainer, kept)


def makes_iterator_again(trainer: Trainer) -> bool:
    """Return whether Lightning is about to make the iterator of the training loaders again.

    It makes the first one when it loads them, and their workers start then.
    """
    fit = trainer.fit_loop
    resumes = getattr(fit, "is_resuming", False) or fit.epoch_loop.restarting
    return trainer.current_epoch > 0 and not resumes


def iterate_again(trainer: Trainer, loader_states: list[dict[str, Any]]) -> None:
    """Make the iterator over the training loaders again, at the start of a resumed epoch.

    Lightning makes it when it loads the loaders, and fetches the first batch of an iterable
    dataset at once. In an uninterrupted run it does so after ``on_train_epoch_start``, where the
    epoch is seeded.

    ``loader_states`` has the states that Lightning loaded from the checkpoint.
    """
    if loader_states:
        lightning_private.load_loader_states(trainer, loader_states)
    lightning_private.create_loader_iterator(trainer)


def _begin_epoch(fit: Any) -> None:
    if fit.epoch_progress.current.completed < fit.epoch_progress.current.processed:
        # Saved in a hook at the end of an epoch, after which these schedulers step.
        fit.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    for progress in (fit.epoch_progress.total, fit.epoch_progress.current):
        progress.ready = progress.started = progress.completed = progress.processed
    # Not a restart within the epoch: its start is still to be run.
    loops = [fit, fit.epoch_loop, fit.epoch_loop.val_loop]
    loops += [fit.epoch_loop.automatic_optimization, fit.epoch_loop.manual_optimization]
    for loop in loops:
        lightning_private.clear_restart(loop)


def _reset_by_epoch(progress: Any, reset: Callable[[], None]) -> None:
    """Let Lightning tell by the counts of this epoch which batch is not completed.

    It tells by the totals. A batch that ``on_train_batch_start`` skipped by -1, which ends an
    epoch, is never completed there, and the last batch before the checkpoint was trained again.
    """
    before = {name: getattr(progress.total, name) for name in _COUNTERS}
    for name in _COUNTERS:
        setattr(progress.total, name, getattr(progress.current, name))
    counted = {name: getattr(progress.total, name) for name in _COUNTERS}
    reset()
    for name in _COUNTERS:
        added = getattr(progress.total, name) - counted[name]
        setattr(progress.total, name, before[name] + added)


def _complete(progress: Any) -> None:
    for part in (progress.total, progress.current):
        part.completed = part.processed


def _reset_before_validation(progress: Any, phase: LoopPhase, reset: Callable[[], None]) -> None:
    """Let Lightning run a validation as a whole, as if it had been interrupted in its first batch.

    Afterwards the total counts the earlier validations of the epoch, and a batch that failed.
    """
    total = {name: getattr(progress.total, name) for name in _COUNTERS}
    if phase == "validation":
        current = progress.current
        for name in _COUNTERS:
            total[name] -= min(getattr(current, name), current.processed)
    progress.reset()
    progress.total.ready = progress.total.started = 1
    reset()
    for name in _COUNTERS:
        setattr(progress.total, name, total[name])
