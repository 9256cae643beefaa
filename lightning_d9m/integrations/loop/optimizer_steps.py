"""The ledger of a program that has no recorder: hooks around every optimizer step of a process.

With ``LIGHTNING_D9M=1``, they are installed when torch is imported. The first step opens a
ledger, every 100th step is recorded like an epoch, and the end of the process as the final state.
While a Trainer or a ``Recorder`` writes a ledger, nothing is recorded here.

A library with its own optimizers calls no hook. Its steps show in its backward passes: tensors that
one pass reached have changed before the next one, which then ends a step.

Ranks do not communicate for it, because a program need not step on every rank.
"""

import gc
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_d9m.engine.control.session import Session, active_session
from lightning_d9m.engine.control.settings import (
    build_from_variables,
    read_settings,
    read_variable,
    variable_of,
)
from lightning_d9m.engine.hashing.digest import digest_many
from lightning_d9m.engine.hashing.shards import is_sharded_dtensor
from lightning_d9m.engine.ledger.command import BEGINS
from lightning_d9m.engine.ledger.folder import LEDGER_VARIABLE, create_ledger_folder, state_folder
from lightning_d9m.engine.ledger.format.records import End
from lightning_d9m.engine.probes.settings import ProbeSettings
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording.interruption import (
    INTERRUPT,
    RESUME,
    Interruption,
    read_request,
)
from lightning_d9m.engine.recording.run import Run, RunOptions
from lightning_d9m.errors import D9mError, SettingError
from lightning_d9m.integrations.loop.process_hooks import ProcessHooks
from lightning_d9m.integrations.loop.recorder import Recorder, find_ranks
from lightning_d9m.integrations.loop.wrapping import unwrap_model


class _Combined(nn.Module):
    """Holds several modules of a program; not one of its modules itself."""


def list_parameters(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the tensors that optimizers change, in the order of their groups."""
    return [p for each in optimizers for group in each.param_groups for p in group["params"]]


def find_trained_module(optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
    """Return a module that holds every tensor that the optimizers change.

    It is the program's own module if one holds them all, without the wrappers of DDP and the like.
    Of several, each is a child that has the name of its class. A tensor that no module holds, such
    as a learned temperature, is called ``loose_0``, ``loose_1``, ....

    Names and order depend only on the order of the optimizers and their tensors, not on the order
    in which the garbage collector lists objects.
    """
    parameters = list_parameters(optimizers)
    places = {id(parameter): place for place, parameter in reversed([*enumerate(parameters)])}
    missing = set(places)
    chosen: list[nn.Module] = []
    for module, held in _list_holders(places):
        if missing & held:
            chosen.append(module)
            missing -= held
    if len(chosen) == 1 and not missing:
        return unwrap_model(chosen[0])
    combined, names = _Combined(), Counter[str]()
    for inner in map(unwrap_model, chosen):
        name = type(inner).__name__
        names[name] += 1
        combined.add_module(name if names[name] == 1 else f"{name}_{names[name]}", inner)
    loose = [p for place, p in enumerate(parameters) if id(p) in missing and places[id(p)] == place]
    for number, parameter in enumerate(loose):
        if isinstance(parameter, nn.Parameter):
            combined.register_parameter(f"loose_{number}", parameter)
        else:
            combined.register_buffer(f"loose_{number}", parameter)
    return combined


def _list_holders(places: dict[int, int]) -> list[tuple[nn.Module, set[int]]]:
    """Return the outermost modules that hold trained tensors, and the ids of these tensors.

    Those that hold the most come first, and of equal ones the one whose first tensor comes first.
    """
    # An optimizer has tensors without names, and nothing links it to the module that names them.
    # `isinstance` would read `__class__` of each object, which runs the code of proxies.
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    # A module whose constructor has not called that of nn.Module yet has no tables.
    modules = [m for m in modules if "_modules" in m.__dict__ and not isinstance(m, _Combined)]
    inner = {id(child) for module in modules for child in module.children()}
    outer = [module for module in modules if id(module) not in inner]
    holders = [(module, _list_ids(module) & places.keys()) for module in outer]

    def order(pair: tuple[nn.Module, set[int]]) -> tuple[int, int, str]:
        kind, held = type(pair[0]), pair[1]
        path = f"{kind.__module__}.{kind.__qualname__}"
        return -len(held), min(map(places.__getitem__, held)), path

    return sorted(filter(itemgetter(1), holders), key=order)


def _list_ids(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


class UnknownOptimizer(Optimizer):
    """Stands for code that changes tensors without an optimizer of torch."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors, {})


def list_leaves(roots: Sequence[Tensor | GradientEdge]) -> list[Tensor]:
    """Return the tensors in which a backward pass accumulates gradients, in the graph's order."""
    # A loop with a list: a graph is deeper than Python may recurse.
    starts = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    nodes = [node for node in starts if node is not None]
    seen, leaves = set(nodes), []
    for node in nodes:  # which grows
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]
        for inner, _ in node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                nodes.append(inner)
    return leaves


EVERY = variable_of("every_n_steps")
# A record digests all weights, gradients and states of optimizers: too much for each step.
_EVERY = 100
# A program that makes a new model for each of many tasks would otherwise fill the disk.
_MOST_LEDGERS = 100
_FOLDER_SECONDS = 60.0
# A program whose tensors do not change between so many backward passes trains nothing.
_MOST_PASSES = 100
_FOLDER_KEY = "lightning_d9m/optimizer_steps"
if hasattr(os, "register_at_fork"):
    # A forked process writes none of its parent's ledgers, so they do not have its steps in them.
    os.register_at_fork(after_in_child=Run.open_runs.clear)


class StepRecorder(Recorder):
    """Records the optimizers that exist when one of them makes its first step.

    Every N-th step ends an epoch. The ranks do not communicate.
    """

    def __init__(
        self, session: Session, optimizers: list[Optimizer], number: int, fit: int
    ) -> None:
        request = read_request()
        if request.needs_saving:
            name = INTERRUPT if request.resume is None else RESUME
            raise SettingError(
                f"The variable {name} is set, and this training has no Trainer and no "
                "lightning_d9m.Recorder, so it cannot be saved and resumed.\nAdd a Recorder to the "
                "loop; see docs/loops.md."
            )
        if any(map(is_sharded_dtensor, list_parameters(optimizers))):
            raise SettingError(
                "The optimizer's parameters are sharded, and this training has no "
                "lightning_d9m.Recorder, so ranks do not join the shards.\nAdd a Recorder to the "
                "loop; see docs/loops.md."
            )
        super().__init__("", find_trained_module(optimizers), optimizers)
        self._training = replace(self._training, records_gradients=True)
        self.run = Run(build_from_variables(RunOptions, read_settings(RunOptions, os.environ)))
        self._session, self._fit = session, fit
        every = read_variable(EVERY, os.environ, int)
        self._every = _EVERY if every is None else every
        if self._every < 1:
            raise SettingError(
                f"The variable {EVERY} is {every}; allowed: a number of optimizer steps from 1."
            )
        self._covered = set(map(_identify, optimizers))
        peers, self._world_size = find_ranks()
        self._ranks = Ranks(peers.rank)
        self.interruption = Interruption(request, self._ranks, before_stop=self.run.end)
        self.run.stop = request.stop
        self._make_folder = lambda: _make_folder(peers.rank, self._world_size, number)
        self.run.prepare()
        self._further: dict[str, Any] = {"every_n_steps": self._every}
        # Comparisons read it: a step begins after its forward pass, which may write to weights.
        if any(isinstance(optimizer, UnknownOptimizer) for optimizer in optimizers):
            self._further[BEGINS] = "backward pass"

    def begin(self, loader: object = None) -> None:
        """Open the ledger; set flags again that the program has changed before its first step."""
        if names := self._open_session.switch_again():
            self._further["overridden"] = ", ".join(names)
        super().begin(loader)

    def covers(self, optimizer: Optimizer) -> bool:
        """Return whether this ledger records all that an optimizer changes."""
        if _identify(optimizer) in self._covered:
            return True
        if not set(map(id, list_parameters([optimizer]))) <= _list_ids(self._training.model):
            return False
        if optimizer not in self._optimizers:
            self._optimizers = (*self._optimizers, optimizer)
            # The probes of this batch have begun without the new optimizer.
            self.run.probes.unhook()
            self._batch -= 1
            self.start_batch()
        self._covered.add(_identify(optimizer))
        return True

    def end_step(self) -> None:
        """Count a step, and record every N-th one."""
        self.step()
        self._iterated = 1
        if self.epoch_steps == self._every:
            self.epoch()
            self.interruption.reach("epoch", self.next_epoch - 1)
        self.start_batch()
        self.interruption.pass_step(self.global_step, None)

    def _verify(self) -> None:
        """Set the flags again that the program has changed, as the user asked from outside."""
        session = self._open_session
        if active_session() is not session:
            return
        try:
            session.verify()
        except SettingError as error:
            warnings.warn(f"{error} LIGHTNING_D9M=1 sets the flag again now.", stacklevel=2)
            session.switch_again()


class OptimizerSteps(ProcessHooks):
    """The hooks of a process, and the ledger that they write now.

    Attributes:
        installed: The hooks that are installed.
    """

    installed: ClassVar["weakref.WeakSet[OptimizerSteps]"] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Optimizer]] = []
        self._run: StepRecorder | None = None
        self._ledgers = self._first = 0
        self._stopped = False
        # Whether steps are sought in backward passes, and what was found there.
        self._passes_left = _MOST_PASSES
        self._reached = torch.utils.weak.WeakTensorKeyDictionary()
        self._unknown: UnknownOptimizer | None = None
        self._exit: SystemExit | None = None  # what the program called `sys.exit` with
        self._known: set[int] = set()  # the errors, by `id`, that were there at the last step

    def install(self) -> None:
        """Install the hooks; ``remove`` removes them."""
        # First, as it raises for a variable that does not exist.
        probed = read_settings(ProbeSettings, os.environ)
        self.installed.add(self)
        self._hooks.callback(self.installed.discard, self)
        original, backward, leave = Optimizer.__init__, torch.autograd.backward, sys.exit

        @wraps(leave)
        def note_exit(status: Any = None, /) -> None:
            # Python keeps this error nowhere until the process ends.
            self._exit = SystemExit(status)
            self._exit.__context__ = sys.exc_info()[1]
            leave(status)

        @wraps(original)
        def note(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._made.append(weakref.ref(optimizer))

        @wraps(backward)
        def note_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(tensors, Tensor | GradientEdge):
                tensors = (*tensors,)  # once: it may be an iterator
            self._before_backward(tensors)
            backward(tensors, *args, **kwargs)

        self._patches.replace(Optimizer, "__init__", note)
        self._patches.replace(torch.autograd, "backward", note_backward)
        self._patches.replace(sys, "exit", note_exit)
        # Hooks of all optimizers are public in torch, so that no method is replaced for a step.
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
        if probed:
            # The first step's own forward pass is probed, too.
            register = torch.nn.modules.module.register_module_forward_pre_hook
            self._hooks.callback(register(self._before_forward).remove)
        self._finish_at_exit()

    def _end_ledger(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            error = self._find_error()
            self._attempt(lambda: run.__exit__(None, error, None))

    @contextmanager
    def separated(self) -> Iterator[None]:
        """Record the steps of the body in ledgers without other steps, with numbers from 0."""
        self.finish()
        first, self._first = self._first, self._ledgers
        # Those of earlier runs may exist until Python collects them.
        made, self._made = self._made, []
        try:
            yield
        finally:
            self.finish()
            self._first, self._made = first, [*made, *self._made]

    def _list_errors(self) -> list[BaseException]:
        """Return the errors that may end the program."""
        # The first is there while it ends a process of multiprocessing, or a `with` block.
        found = sys.exc_info()[1], self._exit, getattr(sys, "last_value", None)
        return [error for error in found if error is not None]

    def _find_error(self) -> BaseException | None:
        """Return the error that ended the training: no step followed it."""
        for error in self._list_errors():
            if id(error) in self._known:
                continue
            if not isinstance(error, SystemExit):
                return error
            if error.code:  # a program may report an error so, as torch's spawned processes do
                return error.__context__ or error
        return None

    def _before_forward(self, module: torch.nn.Module, _: object) -> None:
        if self._run is None and torch.is_grad_enabled() and module.training:
            optimizers = self._list_optimizers()
            trained = set(map(id, list_parameters(optimizers)))
            if not trained.isdisjoint(map(id, module.parameters())):
                self._before_step(optimizers[0])

    def _before_backward(self, roots: Any) -> None:
        """End a step of code without an optimizer of torch, or find out whether there is any."""
        if not self._passes_left or self._is_idle():
            return
        if self._unknown is not None:
            self._open_or_continue(self._unknown)
            self._after_step()
            return
        self._passes_left -= 1
        trained = set(map(id, list_parameters(self._list_optimizers())))
        roots = roots if type(roots) is tuple else [roots]
        try:
            leaves = [leaf for leaf in list_leaves(roots) if id(leaf) not in trained]
            digests = digest_many(leaves)
        except Exception:  # noqa: BLE001 - such as of tensors without memory, those of a transform
            return
        digested = zip(leaves, digests, strict=True)
        if any(self._reached.get(leaf, digest) != digest for leaf, digest in digested):
            self._unknown = UnknownOptimizer(leaves)
            self._open_or_continue(self._unknown)
        self._reached.update(zip(leaves, digests, strict=True))

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._is_idle():
            # An optimizer of torch makes the steps of this program, so that backward passes need
            # not be looked at.
            self._passes_left = 0
            self._open_or_continue(optimizer)

    def _open_or_continue(self, optimizer: Optimizer) -> None:
        with self._lock:
            if self._is_forked():
                self._run, self._ledgers, self._first = None, 0, 0
            # Another model is trained now, and has a ledger to itself.
            if self._run is None or not self._run.covers(optimizer):
                self._attempt(lambda: self._open(optimizer))

    def _after_step(self, *_: object) -> None:
        if self._run is not None and not self._is_idle():
            with self._lock:
                self._exit = None
                self._known = set(map(id, self._list_errors()))
                self._attempt(self._run.end_step)

    def _is_idle(self) -> bool:
        """Return whether this step is not recorded here."""
        session = active_session()
        if self._stopped or session is None or session.in_trainer or torch.compiler.is_compiling():
            return True
        own_run = None if self._run is None else self._run.run
        # A Trainer or a Recorder writes a ledger, which has these steps in it.
        if any(run is not own_run for run in Run.open_runs):
            return True
        # Reading a tensor in the capture of a CUDA graph is an error.
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def _open(self, optimizer: Optimizer) -> None:
        session = active_session()
        assert session is not None, "checked before"
        if self._ledgers == _MOST_LEDGERS:
            raise D9mError(f"This process has written {_MOST_LEDGERS} ledgers, one for each model.")
        optimizers = self._list_optimizers()
        if optimizer not in optimizers:  # it was unpickled
            optimizers.append(optimizer)
        number, self._ledgers = self._ledgers, self._ledgers + 1
        following = StepRecorder(session, optimizers, number, number - self._first)
        # Only now: an error above ends the ledger before, which would otherwise seem complete.
        self.finish()
        if not self._stopped:
            self._run = following
            self._run.begin()
            self._run.start_batch()

    def _list_optimizers(self) -> list[Optimizer]:
        """Return the optimizers that exist, in the order in which they were made."""
        self._made = [made for made in self._made if made() is not None]
        return [optimizer for made in self._made if (optimizer := made()) is not None]

    def _attempt(self, func: Callable[[], object]) -> None:
        """Call a function, whose error only ends the recording, unless there is a reference."""
        # The program did not ask for a ledger itself, and must not fail for lack of one.
        try:
            func()
        except Exception as error:
            # Stopped for good: the next step would fail likewise, with another warning.
            self._stopped, run, self._run = True, self._run, None
            if run is not None:
                # Without the state: two runs that end so are not equal, as both went on.
                run.run.end(End.failed(error))
            if isinstance(error, D9mError) and os.environ.get(variable_of("reference")):
                raise
            cause = str(error) if isinstance(error, D9mError) else repr(error)
            warnings.warn(
                f"lightning_d9m no longer records the optimizer steps of this program: {cause}",
                stacklevel=2,
            )


def _identify(optimizer: Optimizer) -> tuple[int, ...]:
    """Return what tells an optimizer, and whether its tensors were replaced or others added."""
    return id(optimizer), *map(id, list_parameters([optimizer]))


def _make_folder(rank: int, size: int, number: int) -> Path:
    """Return the folder of a ledger; rank 0 makes it and passes its path through the store.

    The other ranks wait for a limited time: rank 0 may not step at all.
    """
    # torch has no public function for it.
    store: Any = None if size == 1 else distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    key, given = f"{_FOLDER_KEY}/{number}", os.environ.get(LEDGER_VARIABLE)
    if rank == 0:
        folder = create_ledger_folder(Path(given) if given else state_folder())
        if not given:
            print(
                f"lightning_d9m: the optimizer steps of this program are recorded in {folder}. Set "
                f"{LEDGER_VARIABLE} to choose another folder.",
                file=sys.stderr,
            )
        if store is not None:
            store.set(key, str(folder.absolute()))
        return folder
    try:
        store.wait([key], timedelta(seconds=_FOLDER_SECONDS))
    except RuntimeError as error:
        raise D9mError(
            f"Rank {rank} made its first optimizer step and rank 0 made none within "
            f"{_FOLDER_SECONDS:g} s, so there is no ledger to add to."
        ) from error
    folder = Path(store.get(key).decode())
    folder.mkdir(parents=True, exist_ok=True)
    return folder
