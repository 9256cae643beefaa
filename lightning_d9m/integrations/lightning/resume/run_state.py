"""The state of a run that a checkpoint of Lightning leaves out: capture and restore.

It has the position in the fit, too: Lightning saves checkpoints in hooks after which work remains,
the validation that follows a batch, or the end of the epoch. A resumed fit of Lightning skips it;
see ``finish_pending_work``.

And it has what a fit changes in the program's own objects: in every attribute of the module, the
datamodule and the callbacks, of the objects in them, and of their classes, and in the variables of
their source files and functions. That is saved as plain data; what has no plain form makes a resume
inexact, and is named.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from typing import Any, Literal, TypeAlias

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_d9m.engine.control.data.resumable_sampler import find_samplers, has_state
from lightning_d9m.engine.control.seeding import (
    capture_generators,
    decode_rng,
    encode_rng,
    restore_generators,
    restore_rng,
)
from lightning_d9m.engine.hashing.digest import digest_many
from lightning_d9m.engine.hashing.training_state import ModelTensors
from lightning_d9m.engine.state.changes import Changes, describe_unsaved
from lightning_d9m.engine.state.parts import (
    ATTRIBUTES,
    OPAQUE,
    equal_bits,
    find_kind,
    is_of_lightning,
    is_of_program,
)
from lightning_d9m.engine.state.plain_data import (
    decode_plain,
    encode_plain,
    pack_bytes,
    unpack_bytes,
)
from lightning_d9m.engine.state.state import digest_value, search
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.lightning.saved_state import (
    VALIDATION,
    LoopPhase,
    LoopPosition,
    SavedRank,
    SavedState,
)
from lightning_d9m.integrations.lightning.trainer_session import TrainerSession
from lightning_d9m.integrations.strategies.strategies import is_sharded
from lightning_d9m.integrations.trainer import lightning_private
from lightning_d9m.integrations.trainer.trainer_attributes import (
    KEY,
    OPTIMIZERS,
    Trainer,
    find_attributes,
    find_metrics,
    get_logical_steps,
    list_schedulers,
    list_stored,
    name_callbacks,
    name_program,
    ranks_of,
)

_read_signature = cache(inspect.signature)
# They hold the whole state in almost every training, so that ranks wait for each other once.
_FIRST_BYTES = 64 * 2**10
# Loaders have a control of their own, which reads their datasets and samplers.
_LOADING = (Dataset, DataLoader, Sampler)
MODE = ".training"
# Most bytes that a rank saves; larger values are left out and reported.
_LIMIT = 16 * 2**20

Captured: TypeAlias = dict[str, bytes | None]
"""Changes by path: the encoded value, or None if it has no plain form."""


class ProgramState:
    """Finds what a fit has changed in the program's objects, and restores it.

    It is made before the fit runs any step, also none of the sanity check.
    """

    def __init__(self, trainer: Trainer, parts: ModelTensors) -> None:
        self._trainer = trainer
        self._parts = parts
        self._module = trainer.lightning_module
        self._sharded = is_sharded(trainer.strategy)
        owners = {"model": self._module} | name_program(trainer)
        self._roots = tuple(owners)
        self._entered = set(map(id, owners.values()))
        self._left_out: set[int] = set()
        self._stepping: set[int] = set()
        self._find_left_out()
        self._changes = Changes(
            owners, leave_out=self._leave_out, hide=self._list_held, namespaces=True, expects=True
        )

    def settle(self) -> None:
        """Take objects that hooks have made since as held at first."""
        self._changes.ignore(self._find_left_out())
        self._changes.settle()

    def capture(self) -> Captured:
        """Return what has changed."""
        self._changes.ignore(self._find_left_out())
        found, unsaved = self._changes.capture()
        return found | dict.fromkeys([*unsaved, *_find_lost_optimizers(self._trainer)])

    @property
    def unknown(self) -> list[str]:
        """The paths of what the last ``capture`` could not read, and of datasets that are new."""
        new = [path for path, own in self._changes.replaced if isinstance(own, Dataset)]
        return [*self._changes.unknown, *new]

    @property
    def expected(self) -> list[str]:
        """The paths of what the program must restore itself, of the last ``capture``."""
        return [*self._changes.expected]

    def describe_unlike(self) -> list[str]:
        """Return why the program has not restored what it must, after ``restore``."""
        return describe_unsaved(path.rstrip("'") for path in self._changes.unlike)

    def restore(self, program: Mapping[str, Tensor], reset: Iterable[str]) -> list[str]:
        """Write what a checkpoint holds into the objects; return the paths that do not exist.

        Callbacks that this run lacks do not count. ``reset`` has the names of the module's metrics
        that Lightning has reset right after the save.
        """
        plain = {
            path: unpack_bytes(data)
            for path, data in program.items()
            if path.startswith(self._roots) or not path.startswith("callbacks.")
        }
        missing = self._changes.restore(plain, self._module.device)
        metrics = find_metrics(self._trainer)
        for name in reset:
            if (metric := metrics.get(f"model.{name}")) is not None:
                metric.reset()
        return missing

    def _find_left_out(self) -> list[Any]:
        """Find the objects that a checkpoint of Lightning holds; return the loaders' samplers."""
        trainer = self._trainer
        tensors = [tensor for _, tensor in self._parts.list_saved()]
        # Those of the user's own classes, which no type tells.
        loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
        loaders = [loader for loop in loops for loader in lightning_private.list_loaders(loop)]
        controlled = [loader for loader in loaders if isinstance(loader, DataLoader)]
        samplers = [sampler for loader in controlled for sampler in find_samplers(loader)]
        samplers = [sampler for sampler in samplers if id(sampler) not in self._entered]
        # What callbacks of Lightning save, and load if it applies to the run: ``ModelCheckpoint``
        # does not load its best checkpoints if it saves to another folder.
        savings = [(own, getattr(type(own), "state_dict", None)) for own in trainer.callbacks]
        containers = [
            value
            for own, saving in savings
            if inspect.isfunction(saving) and is_of_lightning(saving)
            for name in find_attributes(saving, "LOAD_ATTR")
            if isinstance(value := vars(own).get(name), dict | list)
        ]
        stepping = [*trainer.optimizers, *list_schedulers(trainer)]
        self._stepping = set(map(id, stepping))
        held = [own for own in stepping if id(own) not in self._entered]
        for own in stepping:
            held += [vars(own)[name] for name in self._list_held(own) & vars(own).keys()]
        self._left_out = {*map(id, [*held, *tensors, *samplers, *containers])}
        return samplers

    def _list_held(self, owner: Any) -> Collection[str]:
        """Return the attributes that a library sets, or that the state of an optimizer has."""
        kind: Any = type(owner)
        stored = list_stored(kind)
        if owner is self._trainer:  # callbacks may set its options, as for accumulation
            options = _read_signature(kind.__init__).parameters.keys()
            return (stored | {name for name in vars(owner) if name.startswith("_")}) - options
        if id(owner) not in self._stepping and not issubclass(kind, LRScheduler | Optimizer):
            return stored
        is_own = kind.state_dict is not Optimizer.state_dict  # whose keys are torch's
        # A scheduler wraps the step of its optimizer.
        return stored | list_stored(LRScheduler) | (owner.state_dict().keys() if is_own else set())

    def _leave_out(self, path: str, value: Any) -> bool:
        if id(value) in self._entered:
            return False
        if id(value) in self._left_out or isinstance(value, _LOADING):
            return True
        if path.startswith("trainer.") and find_kind(value) in (ATTRIBUTES, OPAQUE):
            return True  # loggers, say: of the Trainer only data are the program's
        if path.startswith(OPTIMIZERS) and isinstance(value, Optimizer):
            return True  # the one that holds it saves its state
        if self._sharded and value is not self._module and isinstance(value, nn.Module | Tensor):
            return True  # ranks hold parts of them
        # Such as loggers, which are not the program's; hyperparameters are, in a dict of Lightning.
        return is_of_lightning(type(value)) and not isinstance(value, nn.Module | dict)


def _find_lost_optimizers(trainer: Trainer) -> list[str]:
    """Return the paths of states of optimizers that those which hold them do not save."""
    found = []
    for number, own in enumerate(trainer.optimizers):
        if not is_of_program(type(own)):
            continue
        saved = {*map(_find_memory, _list_tensors(own.state_dict()))}
        for path, inner in search({f"{OPTIMIZERS}{number}]": own}, depth=3):
            held = _list_tensors([*inner.state.values()]) if isinstance(inner, Optimizer) else []
            if not saved.issuperset(map(_find_memory, held)):
                found.append(f"{path}.state")
    return found


def keep_small(
    captured: Captured, checkpoint: Mapping[str, Any]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return what is saved, as tensors; and why a resume would be inexact.

    Large values are left out if the checkpoint holds their tensors already, saved by a callback.
    """
    reasons = describe_unsaved(path for path, data in captured.items() if data is None)
    found = [(path, data) for path, data in captured.items() if data is not None]
    kept: dict[str, Tensor] = {}
    free = _LIMIT
    own = {name: part for name, part in checkpoint.items() if name != "optimizer_states"}
    held: list[Tensor] | None = None  # listed for large values only
    for path, data in sorted(found, key=lambda item: len(item[1])):
        name = path.rstrip("'")
        if len(data) <= free:
            free -= len(data)
            kept[path] = pack_bytes(data)
            continue
        held = _list_tensors(own) if held is None else held
        tensors = _list_tensors(decode_plain(data))
        if not tensors or not all(
            any(equal_bits(one, other.detach().cpu()) for other in held) for one in tensors
        ):
            reasons.append(
                f"{name} changes in the fit, and has {len(data)} bytes, where {_LIMIT} are kept "
                "for all such values: return it from state_dict() of the callback, the module or "
                "the optimizer."
            )
    return kept, reasons


def _list_tensors(tree: Any) -> list[Tensor]:
    return [part for part in tree_leaves(tree) if isinstance(part, Tensor)]


def digest_tensors(trainer: Trainer, model: ModelTensors) -> dict[str, str]:
    """Return the digest of each tensor by name, on the rank whose tensors a checkpoint holds.

    A change through ``.data`` has no other trace. Ranks that hold shards digest none.
    """
    if is_sharded(trainer.strategy) or not trainer.is_global_zero:
        return {}
    named = {name: own for part in model.listed for name, own in part if not is_lazy(own)}
    return dict(zip(named, digest_many(list(named.values())), strict=True))


def digest_callbacks(trainer: Trainer) -> dict[str, str]:
    """Return the digests of the states of callbacks.

    Those that save checkpoints, and our own, change when they do so, and steer no training.
    """
    saving = {*map(id, trainer.checkpoint_callbacks)}
    return {
        f"{name}.state_dict()": digest_value(callback.state_dict())
        for name, callback in name_callbacks(trainer.callbacks).items()
        if id(callback) not in saving and callback.state_key != KEY
    }


def find_lost(model: ModelTensors, checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors of a model that are not in a checkpoint."""
    absent = [pair for pair in model.list_saved() if pair[0] not in checkpoint["state_dict"]]
    held = {_find_memory(part) for part in (_list_tensors(dict(checkpoint)) if absent else ())}
    return [name for name, tensor in absent if _find_memory(tensor) not in held - {None}]


def _find_memory(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


def capture_user_state(trainer: Trainer, phase: LoopPhase, program: ProgramState) -> dict[str, Any]:
    """Return fields of a ``SavedRank`` that an evaluation changes too, with what has changed.

    An interrupted evaluation is run again as a whole.
    """
    # The logged metrics that Lightning resets after the hooks of this phase: those of training at
    # the end of an epoch, and those of a finished validation.
    trained, validated, *_ = lightning_private.list_result_collections(trainer)
    ending = [*trained.values()] if phase == "epoch" else []
    ending += validated.values() if phase != "validation" else []
    metrics = [own for own in ending if not own.is_tensor and not own.has_reset]
    named = dict.fromkeys(own.meta.metric_attribute for own in metrics)
    reset = [name for name in named if name is not None]
    skipped = tuple(f"model.{name}." for name in reset)
    logical = get_logical_steps(trainer)
    states = {} if logical is None else logical.metrics.capture()
    changed = program.capture().items()
    return {
        "generators": capture_generators(name_datasets(trainer)),
        "reset": reset,
        "metric_states": {p: s for p, s in states.items() if not f"{p}.".startswith(skipped)},
        "program": {p: own for p, own in changed if own is None or not p.startswith(skipped)},
        "unknown": program.unknown,
    }


def capture(
    trainer: Trainer,
    session: TrainerSession,
    phase: LoopPhase,
    user: Mapping[str, Any],
    **others: Any,
) -> SavedRank:
    """Return the state of this rank, with the fields that ``capture_user_state`` has returned.

    Between epochs it has neither the generators of training, which an epoch seeds, nor the results
    of the epoch that has ended: ``restore`` reads them only within an epoch.
    """
    logical = get_logical_steps(trainer)
    fields = {
        "rng": None if phase == "epoch" else encode_rng(session.capture_rng()),
        "callback_metrics": {name: _copy(own) for name, own in trainer.callback_metrics.items()},
        "results": [] if phase == "epoch" else _capture_results(trainer),
        "gradients": _capture_gradients(trainer),
        "train_reload_epoch": lightning_private.get_reload_epoch(trainer, "train"),
        "validation_reload_epoch": lightning_private.get_reload_epoch(trainer, "validate"),
        "logged": [] if logical is None else [logical.logged.capture()],
    }
    return SavedRank(**{**user, **fields, **others})


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


def restore(
    trainer: Trainer,
    session: TrainerSession,
    rank: SavedRank,
    report: Callable[[Sequence[str]], None],
    *,
    within: bool,
) -> None:
    """Restore state that outlives an epoch; called before the first epoch starts.

    Called once more with ``within`` before the next batch of a partly trained epoch, it also
    restores what was reset at the start of the epoch. ``report`` is called with problems that
    training finds later; see ``_restore_gradients``.
    """
    if within:
        _restore_results(trainer, rank.results)
    restore_generators(name_datasets(trainer), rank.generators)
    if (logical := get_logical_steps(trainer)) is not None:
        logical.metrics.restore(rank.metric_states)
        if within:
            logical.logged.restore(rank.logged)
    _restore_gradients(trainer, rank.gradients, report)
    if not within:
        session.restore_validation(rank.samplers)  # again, after a sanity check
        epoch = trainer.fit_loop.epoch_progress.current.processed
        _settle_reload(trainer, "train", rank.train_reload_epoch, epoch)
    elif rank.rng is not None:
        restore_rng(decode_rng(rank.rng))


def restore_validation(trainer: Trainer, session: TrainerSession, rank: SavedRank) -> None:
    """Restore the state of the validation loaders. Called once, after they were loaded."""
    session.restore_validation(rank.samplers)
    found = {path: own for path, own in rank.generators.items() if path.startswith(VALIDATION)}
    restore_generators(name_datasets(trainer), found)
    _settle_reload(trainer, "validate", rank.validation_reload_epoch, trainer.current_epoch)


def _settle_reload(
    trainer: Trainer, stage: Literal["train", "validate"], saved: int | None, epoch: int
) -> None:
    """Set the epoch that counts as the last reload, so that the next reload is due in time."""
    if saved is not None:
        due = epoch - saved >= trainer.reload_dataloaders_every_n_epochs
        lightning_private.set_reload_epoch(trainer, stage, epoch if due else saved)


def name_datasets(trainer: Trainer) -> dict[str, object]:
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


_ARGUMENTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def count_logged(trainer: Trainer) -> dict[str, int]:
    """Return how often each value of the training epoch was logged."""
    results = lightning_private.list_result_collections(trainer)[0].values()
    return {
        f"the logged value {own.meta.name!r} of {own.meta.fx}": own._update_count  # noqa: SLF001 - of torchmetrics
        for own in results
        if own.is_tensor and own.meta.on_epoch
    }


def _capture_results(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the running sums from which the epoch's means are computed.

    The state of a logged metric object is in ``metric_state``.
    """
    found = []
    for key, result in lightning_private.list_result_collections(trainer)[0].items():
        meta, cache = result.meta, None
        if not result.is_tensor and meta.metric_attribute is None:
            continue
        with suppress(SettingError):
            cache = pack_bytes(encode_plain(result._forward_cache))  # noqa: SLF001 - of torchmetrics
        count = getattr(result, "cumulated_batch_size", None) if result.is_tensor else None
        saved = {
            "key": key,
            "arguments": {name: getattr(meta, name) for name in _ARGUMENTS},
            "reduce_fx": meta.reduce_fx.__name__,
            "synced": meta.sync.should,
            "rank_zero_only": meta.sync.rank_zero_only,
            "is_tensor": result.is_tensor,
            "value": _copy(result.value) if result.is_tensor else None,
            "count": None if count is None else _copy(count),  # of samples, for an average
            "updates": result._update_count,  # noqa: SLF001 - of torchmetrics
            "cache": cache,  # the value for the last batch, if it is plain
            "has_reset": result.has_reset,
        }
        found.append(saved)
    return found


def _restore_results(trainer: Trainer, results: Sequence[dict[str, Any]]) -> None:
    """Restore the results of the epoch. Called once, before its next batch."""
    lightning_private.keep_results_at_next_batch(trainer)
    collection = lightning_private.list_result_collections(trainer)[0]
    metrics = dict(trainer.lightning_module.named_modules())
    device = trainer.strategy.root_device
    for saved in results:
        attribute = saved["arguments"]["metric_attribute"]
        if not saved["is_tensor"] and attribute not in metrics:
            continue
        result = lightning_private.create_result(
            trainer,
            {name: saved["arguments"][name] for name in _ARGUMENTS}
            | {"reduce_fx": saved["reduce_fx"]},
            **{name: saved[name] for name in ("is_tensor", "synced", "rank_zero_only")},
        )
        result.value = saved["value"] if saved["is_tensor"] else metrics[attribute]
        if saved["count"] is not None:
            result.cumulated_batch_size = saved["count"]
        cache = saved["cache"]
        cache = None if cache is None else decode_plain(unpack_bytes(cache), device)
        result._update_count, result._forward_cache = saved["updates"], cache  # noqa: SLF001 - of torchmetrics
        result.has_reset = saved["has_reset"]
        collection[saved["key"]] = result.to(device)


_ADDED = (
    "The program adds to the gradient of {}, with which it stepped before the checkpoint was "
    "saved, and which the checkpoint lacks. Call zero_grad() between a step and the next backward "
    "pass."
)


def mark_used_gradients(trainer: Trainer, optimizer: Optimizer) -> None:
    """Mark the gradients with which a module that optimizes manually steps."""
    if trainer.lightning_module.automatic_optimization:
        return
    for parameter in (own for group in optimizer.param_groups for own in group["params"]):
        gradient: Any = parameter.grad
        if gradient is not None:
            gradient.d9m_used = gradient._version  # noqa: SLF001 - of torch


def _capture_gradients(trainer: Trainer) -> dict[str, Any]:
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
        kept: dict[str, Any] = logical.kept.capture()
        return kept
    found: dict[str, Any] = {}
    stepping = () if manual or accumulates else trainer.optimizers
    groups = [group for own in stepping for group in own.param_groups]
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    for name, parameter in module.named_parameters():
        gradient: Any = parameter.grad
        if gradient is not None:
            used = manual and getattr(gradient, "d9m_used", None) == gradient._version  # noqa: SLF001 - of torch
            left_out = used or id(parameter) in stepped
            found[name] = None if left_out else gradient.detach().to("cpu", copy=True)
    return found


def _restore_gradients(
    trainer: Trainer, gradients: Mapping[str, Any], report: Callable[[Sequence[str]], None]
) -> None:
    """Restore gradients; before a backward pass adds to one that was left out, report it once."""
    if not gradients:
        return
    if (logical := get_logical_steps(trainer)) is not None:
        logical.kept.restore(gradients, logical.block)
        return
    reported: list[str] = []
    handles: dict[str, Any] = {}

    def check(name: str, parameter: nn.Parameter, stand_in: Tensor, _: Tensor) -> None:
        handles.pop(name).remove()
        if parameter.grad is stand_in and bool(stand_in.isnan().any()):  # nothing has zeroed it
            stand_in.zero_()
            if not reported:
                reported.append(_ADDED.format(name))
                report(reported)

    for name, parameter in trainer.lightning_module.named_parameters():
        kept = gradients.get(name)
        parameter.grad = None if kept is None else torch.empty_like(parameter).copy_(kept)
        if kept is None and name in gradients and parameter.requires_grad:
            # NaN, because in-place operations other than zero_() leave it in place.
            gradient: Any = torch.full_like(parameter, torch.nan)
            gradient.d9m_used = gradient._version  # noqa: SLF001 - of torch
            parameter.grad = gradient
            # Called before the next gradient is added.
            handles[name] = parameter.register_hook(partial(check, name, parameter, gradient))


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


def is_at_end(trainer: Trainer) -> bool:
    """Return whether no batch of the epoch is left."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def capture_limits(trainer: Trainer) -> dict[str, Any]:
    """Return the limits of the fit, which hooks may change."""
    fit = trainer.fit_loop
    named = {name: getattr(fit, name) for name in ("max_epochs", "min_epochs")}
    return named | {name: getattr(fit.epoch_loop, name) for name in ("max_steps", "min_steps")}


def restore_limits(trainer: Trainer, limits: Mapping[str, Any]) -> None:
    """Set limits that ``capture_limits`` has returned."""
    for name, limit in limits.items():
        loop = trainer.fit_loop if name.endswith("epochs") else trainer.fit_loop.epoch_loop
        setattr(loop, name, limit)


def name_groups(trainer: Trainer) -> list[list[list[str]]]:
    """Return the names of the parameters in each group of each optimizer, in their order."""
    names = {id(own): name for name, own in trainer.lightning_module.named_parameters()}
    return [
        [[names.get(id(own), "") for own in group["params"]] for group in optimizer.param_groups]
        for optimizer in trainer.optimizers
    ]


def sort_groups(
    state: Mapping[str, Any], saved: list[list[str]], present: list[list[str]]
) -> dict[str, Any] | None:
    """Return the state of an optimizer with the groups and parameters in the order of this run.

    torch loads it by position, and a program that makes its groups from sets has another order in
    each run. It stays as it is if names do not tell, as of a module that has others now. None if
    the parameters are in other groups.

    Args:
        state: What ``Optimizer.state_dict`` returned.
        saved: The names in each group then.
        present: Those now.
    """
    names = [[name for group in groups for name in group] for groups in (saved, present)]
    if sorted(names[0]) != sorted(names[1]) or len({*names[0]}) < len(names[0]):
        return {**state}
    places = {frozenset(group): number for number, group in enumerate(saved)}
    sorted_groups = []
    for group in present:
        number = places.get(frozenset(group))
        if number is None:
            return None
        entry = state["param_groups"][number]
        keys = dict(zip(saved[number], entry["params"], strict=True))
        sorted_groups.append({**entry, "params": [keys[name] for name in group]})
    return {**state, "param_groups": sorted_groups}


def reaches_max_steps(trainer: Trainer, step: int) -> bool:
    """Return whether the fit has no step left after this one."""
    return bool(0 <= trainer.max_steps <= step)  # -1: unlimited


def is_cut_by_max_steps(trainer: Trainer) -> bool:
    """Return whether ``max_steps`` has ended the fit, and batches of the epoch are left."""
    by_steps = reaches_max_steps(trainer, trainer.global_step) and not trainer.should_stop
    return by_steps and has_batches_left(trainer)


def has_batches_left(trainer: Trainer) -> bool:
    """Return whether the epoch has begun, and has not come to its end."""
    # A batch that `on_train_batch_start` has skipped, which ends the epoch in every run, is ready
    # and not completed.
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return 0 < batches.completed == batches.ready and not is_at_end(trainer)


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
        epochs = fit.epoch_progress
        if epochs.current.completed < epochs.current.processed:
            # Saved in a hook at the end of an epoch, after which these schedulers step.
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        for part in (epochs.total, epochs.current):
            part.ready = part.started = part.completed = part.processed
        # Not a restart within the epoch: its start is still to be run.
        inner = (loop.val_loop, loop.automatic_optimization, loop.manual_optimization)
        for each in (fit, loop, *inner):
            lightning_private.clear_restart(each)
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


def reads_when_iterated(trainer: Trainer) -> bool:
    """Return whether a training loader may read its dataset when its iterator is made.

    Workers then get a copy of it. In this process torch's loader does not read a map-style dataset
    before a batch is fetched, and its batches are seeded one by one. Persistent workers are
    excluded, whose copy stays as it was before the first epoch; and an iterator: making it again
    would lose its first batch.
    """
    return any(
        not loader.persistent_workers
        and (loader.num_workers > 0 or isinstance(loader.dataset, IterableDataset))
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


def _reset_by_epoch(progress: Any, reset: Callable[[], None]) -> None:
    """Let Lightning tell by the counts of this epoch which batch is not completed.

    It tells by the totals. A batch that ``on_train_batch_start`` skipped by -1, which ends an
    epoch, is never completed there, and the last batch before the checkpoint was trained again.
    """
    before, counted = {**vars(progress.total)}, {**vars(progress.current)}
    vars(progress.total).update(counted)
    reset()
    added = {name: count - counted[name] for name, count in vars(progress.total).items()}
    vars(progress.total).update({name: before[name] + count for name, count in added.items()})


def _complete(progress: Any) -> None:
    for part in (progress.total, progress.current):
        part.completed = part.processed


def _reset_before_validation(progress: Any, phase: LoopPhase, reset: Callable[[], None]) -> None:
    """Let Lightning run a validation as a whole, as if it had been interrupted in its first batch.

    Afterwards the total counts the earlier validations of the epoch, and a batch that failed.
    """
    total, current = {**vars(progress.total)}, progress.current
    if phase == "validation":
        for name, count in vars(current).items():
            total[name] -= min(count, current.processed)
    progress.reset()
    progress.total.ready = progress.total.started = 1
    reset()
    vars(progress.total).update(total)
