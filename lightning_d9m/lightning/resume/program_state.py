"""State of the program's own objects: what a fit changes in them and no checkpoint holds.

That is every attribute of the module, the datamodule and the callbacks, of the objects in them,
and of their classes, and the variables of their source files and functions. What a fit changes is
saved as plain data; what has no plain form makes a resume inexact, and is named.
"""

import dis
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_d9m.control.data.resumable_sampler import find_samplers
from lightning_d9m.hashing.digest import digest_many
from lightning_d9m.hashing.training_state import ModelTensors
from lightning_d9m.lightning.lightning_private import list_loaders
from lightning_d9m.lightning.saved_state import KEY
from lightning_d9m.lightning.strategies import is_sharded
from lightning_d9m.lightning.trainer_attributes import (
    Trainer,
    find_metrics,
    list_schedulers,
    name_callbacks,
)
from lightning_d9m.state.changes import Changes, describe_unsaved
from lightning_d9m.state.parts import (
    ATTRIBUTES,
    OPAQUE,
    find_kind,
    is_of_lightning,
    name_namespaces,
)
from lightning_d9m.state.plain_data import decode_plain, pack_bytes, unpack_bytes
from lightning_d9m.state.state import digest_value

# Loaders have a control of their own, which reads their datasets and samplers.
_LOADING = (Dataset, DataLoader, Sampler)
_MODE = ".training"
_OPTIMIZERS = "optimizers["
# Most bytes that a rank saves; larger values are left out and reported.
_LIMIT = 16 * 2**20

Captured: TypeAlias = tuple[dict[str, bytes], list[str]]
"""What has changed by path, encoded; and the paths of what has no plain form."""


class ProgramState:
    """Finds what a fit has changed in the program's objects, and restores it.

    It is made before the fit runs any step, also none of the sanity check.
    """

    def __init__(self, trainer: Trainer, parts: ModelTensors) -> None:
        self._trainer = trainer
        self._parts = parts
        self._module = trainer.lightning_module
        self._sharded = is_sharded(trainer.strategy)
        owners = _name_owners(trainer)
        self._roots = tuple(owners)
        self._entered = set(map(id, owners.values()))
        self._left_out: set[int] = set()
        self._stepping: set[int] = set()
        self._find_left_out()
        self._changes = Changes(owners, leave_out=self._leave_out, hide=self._list_held)

    def settle(self) -> None:
        """Take objects that hooks have made since as held at first."""
        self._changes.ignore(self._find_left_out())
        self._changes.settle()

    def capture(self) -> Captured:
        """Return what has changed by path, encoded; and the paths of what has no plain form."""
        self._changes.ignore(self._find_left_out())
        return self._changes.capture()

    def restore(self, program: Mapping[str, Tensor], reset: Iterable[str]) -> list[str]:
        """Write what a checkpoint holds into the objects; return the paths that do not exist.

        Callbacks that this run lacks do not count. ``reset`` has the names of the module's metrics
        that Lightning has reset right after the save.
        """
        plain = {
            path: unpack_bytes(data)
            for path, data in program.items()
            if path.startswith(self._roots)
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
        loaders = [loader for loop in loops for loader in list_loaders(loop)]
        controlled = [loader for loader in loaders if isinstance(loader, DataLoader)]
        samplers = [sampler for loader in controlled for sampler in find_samplers(loader)]
        samplers = [sampler for sampler in samplers if id(sampler) not in self._entered]
        containers = _list_loaded_containers(trainer.callbacks)
        stepping = [*trainer.optimizers, *list_schedulers(trainer)]
        self._stepping = set(map(id, stepping))
        held: Iterable[Any] = [
            *(own for own in stepping if id(own) not in self._entered),
            *(
                vars(own)[name]
                for own in stepping
                for name in self._list_held(own) & vars(own).keys()
            ),
            *tensors,
            *samplers,
            *containers,
        ]
        self._left_out = set(map(id, held))
        return samplers

    def _list_held(self, owner: Any) -> Collection[str]:
        """Return the attributes that a library sets, or that the state of an optimizer has."""
        kind: Any = type(owner)
        stored = _list_stored(kind)
        if id(owner) not in self._stepping and not issubclass(kind, LRScheduler | Optimizer):
            return stored
        is_own = kind.state_dict is not Optimizer.state_dict  # whose keys are torch's
        # A scheduler wraps the step of its optimizer.
        return stored | _list_stored(LRScheduler) | (owner.state_dict().keys() if is_own else set())

    def _leave_out(self, path: str, value: Any) -> bool:
        if id(value) in self._entered:
            return False
        if id(value) in self._left_out or isinstance(value, _LOADING):
            return True
        if path.startswith("trainer.") and find_kind(value) in (ATTRIBUTES, OPAQUE):
            return True  # loggers, say: of the Trainer only data are the program's
        if path.startswith(_OPTIMIZERS) and isinstance(value, Optimizer):
            return True  # the one that holds it saves its state
        if self._sharded and value is not self._module and isinstance(value, nn.Module | Tensor):
            return True  # ranks hold parts of them
        # Such as loggers, which are not the program's; hyperparameters are, in a dict of Lightning.
        return is_of_lightning(type(value)) and not isinstance(value, nn.Module | dict)


def keep_small(
    captured: Captured, checkpoint: Mapping[str, Any]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return what is saved, as tensors; and why a resume would be inexact.

    Large values are left out if the checkpoint holds their tensors already.
    """
    found, unknown = captured
    reasons = describe_unsaved(unknown)
    kept: dict[str, Tensor] = {}
    free = _LIMIT
    for path, data in sorted(found.items(), key=lambda item: len(item[1])):
        name = path.rstrip("'")
        if len(data) <= free:
            free -= len(data)
            kept[path] = pack_bytes(data)
        elif not _is_held(data, checkpoint):
            reasons.append(
                f"{name} changes in the fit, and has {len(data)} bytes, where {_LIMIT} are kept "
                "for all such values: return it from state_dict() of the callback, the module or "
                "the optimizer."
            )
    return kept, reasons


def _is_held(data: bytes, checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint holds the tensors of a value, as a callback has saved them."""
    tensors = [part for part in tree_leaves(decode_plain(data)) if isinstance(part, Tensor)]
    own = [part for name, part in checkpoint.items() if name != "optimizer_states"]
    held = [part for part in tree_leaves(own) if isinstance(part, Tensor)]
    return bool(tensors) and all(
        any(
            one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other.cpu())
            for other in held
        )
        for one in tensors
    )


def keep_modes(captured: Captured, before: Captured) -> Captured:
    """Return a state with the modes of modules from before, as an evaluation changes them."""
    found = {path: data for path, data in captured[0].items() if not path.endswith(_MODE)}
    modes = {path: data for path, data in before[0].items() if path.endswith(_MODE)}
    return found | modes, captured[1]


def find_changed(before: Captured, now: Captured) -> list[str]:
    """Return the paths at which two states differ, but for the modes of modules."""
    paths = dict.fromkeys([*before[0], *now[0]])
    return [
        path.rstrip("'")
        for path in paths
        if before[0].get(path) != now[0].get(path) and not path.endswith(_MODE)
    ]


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
    held = {
        part.untyped_storage().data_ptr()
        for part in (tree_leaves(dict(checkpoint)) if absent else ())
        if isinstance(part, Tensor) and part.layout is torch.strided
    }
    return [
        name
        for name, tensor in absent
        if not (tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in held)
    ]


def _name_owners(trainer: Trainer) -> dict[str, object]:
    own = [each for each in trainer.callbacks if getattr(each, "state_key", None) != KEY]
    owners: dict[str, object] = {"model": trainer.lightning_module, "trainer": trainer}
    owners |= {"datamodule": trainer.datamodule} | name_callbacks(own)
    owners |= {f"{_OPTIMIZERS}{n}]": own for n, own in enumerate(trainer.optimizers)}
    owners |= {f"schedulers[{n}]": own for n, own in enumerate(list_schedulers(trainer))}
    return owners | name_namespaces([*owners.values(), *trainer.lightning_module.modules()])


def _list_loaded_containers(callbacks: Iterable[Any]) -> Iterator[Any]:
    """Yield the containers that callbacks of Lightning save, and load if they apply to the run.

    ``ModelCheckpoint`` does not load its best checkpoints if it saves to another folder.
    """
    for callback in callbacks:
        saving = getattr(type(callback), "state_dict", None)
        held = map(vars(callback).get, _list_read(saving))
        yield from (value for value in held if isinstance(value, dict | list))


@cache
def _list_read(function: Any) -> frozenset[str]:
    """Return the attributes that a function of Lightning reads."""
    known = inspect.isfunction(function) and is_of_lightning(function)
    return frozenset(_find_attributes(function, "LOAD_ATTR") if known else ())


@cache
def _list_stored(kind: Any) -> frozenset[str]:
    """Return the attributes that Lightning and torch.optim set in objects of a class."""
    known = (
        base
        for base in kind.__mro__
        if is_of_lightning(base) or base.__module__.startswith("torch.optim.")
    )
    return frozenset[str]().union(*map(list_stored_by, known))


@cache
def list_stored_by(base: type) -> frozenset[str]:
    """Return the attributes that the functions of a class set."""
    return frozenset(_find_stored(vars(base).values()))


def _find_stored(members: Iterable[object]) -> Iterator[str]:
    for member in members:
        accessors = (member.fget, member.fset) if isinstance(member, property) else (member,)
        for function in filter(inspect.isfunction, accessors):
            yield from _find_attributes(function, "STORE_ATTR")


def _find_attributes(function: Any, operation: str) -> Iterator[str]:
    """Yield the attributes on which the code of a function, and of those in it, operates."""
    codes = [inspect.unwrap(function).__code__]
    for code in codes:
        codes += filter(inspect.iscode, code.co_consts)
        steps = dis.get_instructions(code)
        yield from (step.argval for step in steps if step.opname == operation)
