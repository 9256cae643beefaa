"""State that a fit changes in the program's own objects, and the search for what changes late.

It is in every attribute of the module, the datamodule and the callbacks, of the objects in them,
and of their classes, and in the variables of their source files and functions. That is saved as
plain data; what has no plain form makes a resume inexact, and is named.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_d9m.engine.control.data.resumable_sampler import find_samplers
from lightning_d9m.engine.hashing.digest import digest_many
from lightning_d9m.engine.hashing.training_state import ModelTensors
from lightning_d9m.engine.state.changes import Changes, describe_unsaved
from lightning_d9m.engine.state.object_digest import digest_saved
from lightning_d9m.engine.state.parts import (
    ATTRIBUTES,
    FUNCTION,
    OPAQUE,
    PARTIAL,
    find_kind,
    find_owner,
    is_of_lightning,
    is_of_program,
)
from lightning_d9m.engine.state.plain_data import pack_bytes, unpack_bytes
from lightning_d9m.integrations.lightning.resume.logged import list_reset
from lightning_d9m.integrations.lightning.resume.part import Moment, Part, Phase
from lightning_d9m.integrations.lightning.resume.run_facts import name_all
from lightning_d9m.integrations.strategies.strategies import is_sharded
from lightning_d9m.integrations.trainer import lightning_private
from lightning_d9m.integrations.trainer.trainer_attributes import (
    KEY,
    OPTIMIZERS,
    Trainer,
    find_attributes,
    list_schedulers,
    list_stored,
    name_callbacks,
    name_program,
)

_read_signature = cache(inspect.signature)
# Loaders have a control of their own, which reads their datasets and samplers.
_LOADING = (Dataset, DataLoader, Sampler)
_MODE = ".training"
_MISSING_OBJECTS = (
    "The checkpoint holds values of objects that this run lacks, or that take others: {}. Create "
    "them before training starts, as in the run that saved the checkpoint."
)
EXPECTED = (
    "{} changes in the fit, and has no form that a checkpoint could keep, or is large: the program "
    "must save and load it itself, as in on_load_checkpoint."
)

Captured: TypeAlias = dict[str, bytes | None]
"""Changes by path: the encoded value, or None if it has no plain form."""


class Program(Part):
    """Changes by the fit in the program's objects, encoded, by path."""

    name, form = "program", dict[str, Tensor]
    restored, checked, evaluated = ("epoch", "batch"), "epoch", True

    @cached_property
    def changes(self) -> Changes:
        """The changes since this was read first: before any step, also of a sanity check."""
        trainer = self.trainer
        self._module = trainer.lightning_module
        self._sharded = is_sharded(trainer.strategy)
        owners = {"model": self._module} | name_program(trainer)
        self._roots = tuple(owners)
        self._entered = set(map(id, owners.values()))
        self._left_out: set[int] = set()
        self._of_shards: set[int] = set()
        self._stepping: set[int] = set()
        self._find_left_out()
        return Changes(
            owners, leave_out=self._leave_out, hide=self._list_held, namespaces=True, expects=True
        )

    def settle(self) -> None:
        """Take objects that hooks have made since as held at first; later calls do nothing."""
        if not self.changes.has_settled:  # each epoch calls this, and the search takes a while
            self.changes.ignore(self._find_left_out())
            self.changes.settle()

    def find_changes(self) -> Captured:
        """Return what has changed."""
        self.changes.ignore(self._find_left_out())
        found, unsaved = self.changes.capture()
        return found | dict.fromkeys(unsaved)

    def capture(self, phase: Phase) -> tuple[Captured, list[str]]:
        skipped = list_reset(self.trainer, phase)
        found = {
            path: own
            for path, own in self.find_changes().items()
            if own is None or not path.startswith(skipped)
        }
        # A dataset that is new may have another state than the one that it replaces. That of a
        # loader has a state elsewhere, and a hook that keeps it does so in a resumed run, too.
        loaded = {id(getattr(loader, "dataset", None)) for loader in self._list_loaders()}
        new = [
            path
            for path, own, was_empty in self.changes.replaced
            if isinstance(own, Dataset) and not (was_empty and id(own) in loaded)
        ]
        return found, [*self.changes.unknown, *new]

    def store(self, captured: tuple[Captured, list[str]]) -> dict[str, Tensor]:
        program, unknown = captured
        self.captured = program
        if self.trainer.validating and self.name in self.fit.before:
            # An evaluation changes the modes of modules.
            first, _ = self.fit.before[self.name]
            modes = {path: own for path, own in first.items() if path.endswith(_MODE)}
            program = {path: own for path, own in program.items() if not path.endswith(_MODE)}
            program |= modes
        self.fit.unknown += unknown
        self.fit.inexact += describe_unsaved(path for path, own in program.items() if own is None)
        return {path: pack_bytes(own) for path, own in program.items() if own is not None}

    def restore(self, state: dict[str, Tensor], _moment: Moment) -> None:
        plain = {
            path: unpack_bytes(data)
            for path, data in state.items()
            # Those of callbacks that this run lacks do not count.
            if path.startswith(self._roots) or not path.startswith("callbacks.")
        }
        self._missing = self.changes.restore(plain, self._module.device)

    def problems(self, _state: Any) -> list[str]:
        unlike = describe_unsaved(path.rstrip("'") for path in self.changes.unlike)
        return [*name_all(_MISSING_OBJECTS, self._missing), *unlike]

    def _list_loaders(self) -> list[Any]:
        fit = self.trainer.fit_loop
        loops = (fit, fit.epoch_loop.val_loop)
        return [loader for loop in loops for loader in lightning_private.list_loaders(loop)]

    def _find_left_out(self) -> list[Any]:
        """Find the objects that a checkpoint of Lightning holds; return the loaders' samplers."""
        trainer = self.trainer
        tensors = [tensor for _, tensor in self.fit.tensors.list_saved()]
        # Those of the user's own classes, which no type tells.
        controlled = [own for own in self._list_loaders() if isinstance(own, DataLoader)]
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
        if owner is self.trainer:  # callbacks may set its options, as for accumulation
            options = _read_signature(kind.__init__).parameters.keys()
            # Lightning 2.2 only declares `val_check_batch` there; a loop sets it.
            stored |= list_stored(owner.fit_loop.__class__)
            return (stored | {name for name in vars(owner) if name.startswith("_")}) - options
        if id(owner) not in self._stepping and not issubclass(kind, LRScheduler | Optimizer):
            return stored
        is_own = kind.state_dict is not Optimizer.state_dict  # whose keys are torch's
        # A scheduler wraps the step of its optimizer.
        held = stored | list_stored(LRScheduler)
        # A scheduler of the program may have no state, and return None.
        held |= (owner.state_dict() or {}).keys() if is_own else set()
        return {name for name in held if not _holds_functions(owner, vars(owner).get(name))}

    def _leave_out(self, path: str, value: Any) -> bool:
        if id(value) in self._entered:
            return False
        if self._sharded and isinstance(value, Tensor):
            self._of_shards.add(id(vars(value)))  # what the strategy keeps there
        if id(value) in self._left_out | self._of_shards or isinstance(value, _LOADING):
            return True
        own = is_of_program(type(value)) and not any(map(is_of_lightning, type(value).__mro__))
        if path.startswith("trainer.") and not own and find_kind(value) in (ATTRIBUTES, OPAQUE):
            return True  # such as loggers
        if path.startswith(OPTIMIZERS) and isinstance(value, Optimizer):
            return True  # the one that holds it saves its state, which is compared
        if self._sharded and value is not self._module and isinstance(value, nn.Module | Tensor):
            return True  # ranks hold parts of them
        # Such as loggers, which are not the program's; hyperparameters are, in a dict of Lightning.
        return is_of_lightning(type(value)) and not isinstance(value, nn.Module | dict)


def _holds_functions(owner: Any, value: Any) -> bool:
    """Return whether functions of the program are in it, as those of ``LambdaLR``.

    A scheduler saves the attributes of a function, and not its closure, arguments or object.
    """
    return any(
        find_kind(part) in (FUNCTION, PARTIAL)
        or (find_owner(part) is not None and find_owner(part) is not owner)
        or isinstance(part, LRScheduler)
        for part in (value if isinstance(value, list | tuple) else [value])
    )


def _list_tensors(tree: Any) -> list[Tensor]:
    return [part for part in tree_leaves(tree) if isinstance(part, Tensor)]


def find_lost(model: ModelTensors, checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors of a model that are not in a checkpoint."""
    absent = [pair for pair in model.list_saved() if pair[0] not in checkpoint["state_dict"]]
    held = {_find_memory(part) for part in (_list_tensors(dict(checkpoint)) if absent else ())}
    return [name for name, tensor in absent if _find_memory(tensor) not in held - {None}]


def _find_memory(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


def remember(
    program: Program,
    *others: Callable[[Trainer], Mapping[str, object]],
    changes: Captured | None = None,
    reset: Iterable[str] = (),
) -> Callable[[], list[str]]:
    """Return a function that names what has changed since now.

    Args:
        program: The state of the program's objects.
        others: Return values by name, which are compared as the tensors of the model are.
        changes: What has changed in the program's objects by now; without it they may change.
        reset: The paths of the module's metrics that Lightning is about to reset.
    """
    skipped = tuple(reset)

    def take() -> list[Mapping[str, object]]:
        tensors = _digest_tensors(program.trainer, program.fit.tensors)
        return [tensors, *(other(program.trainer) for other in others)]

    before = take()

    def find() -> list[str]:
        pairs = list(zip(before, take(), strict=True))
        if changes is not None:
            old, new = (
                {path: own for path, own in one.items() if not path.startswith(skipped)}
                for one in (changes, program.find_changes())
            )
            pairs.append((old, new))
        return [
            name.rstrip("'")
            for old, new in pairs
            for name in {**old, **new}
            if old.get(name, b"") != new.get(name, b"") and not name.endswith(_MODE)
        ]

    return find


def _digest_tensors(trainer: Trainer, model: ModelTensors) -> dict[str, str]:
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
        f"{name}.state_dict()": digest_saved(callback.state_dict()) or ""
        for name, callback in name_callbacks(trainer.callbacks).items()
        if id(callback) not in saving and callback.state_key != KEY
    }
