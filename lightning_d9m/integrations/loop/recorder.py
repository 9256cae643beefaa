"""``with Recorder("runs", model, optimizer) as run:`` writes the ledger of any training loop.

Ranks are those of ``torch.distributed``, as launched by torchrun, Fabric or Accelerate.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler

from lightning_d9m.engine.control.data.data_state import UNKNOWN_DATA, list_paths, list_unsaved
from lightning_d9m.engine.control.data.loaders import LoaderControl, find_control
from lightning_d9m.engine.control.seeding import (
    capture_rng,
    decode_rng,
    derive_seed,
    encode_rng,
    find_lost_devices,
    restore_rng,
    rng_restored,
    seed_all,
)
from lightning_d9m.engine.control.session import Session, active_session, next_fit
from lightning_d9m.engine.control.settings import Settings
from lightning_d9m.engine.hashing.shards import find_hybrid_sharding
from lightning_d9m.engine.ledger.folder import LEDGER_VARIABLE, create_ledger_folder
from lightning_d9m.engine.ledger.format.records import Checkpoint, End, Resume, Scalar
from lightning_d9m.engine.probes.training import ProbePoint, Training
from lightning_d9m.engine.ranks.groups import ranks_of_group
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording.description import describe_training
from lightning_d9m.engine.recording.interruption import (
    RESUME,
    Interruption,
    InterruptRequest,
    read_request,
)
from lightning_d9m.engine.recording.run import OptionArguments, Run, RunOptions, share_new_folder
from lightning_d9m.engine.state.changes import describe_unsaved
from lightning_d9m.errors import CheckpointError, DriftError, SettingError
from lightning_d9m.integrations.loop.wrapping import (
    find_controllable,
    unwrap_model,
    unwrap_optimizer,
)
from lightning_d9m.integrations.trainer.lightning_private import set_fabric_epoch

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


_FORMAT = 1
# Compared exactly: a state with another key comes from a version that needs it.
# What `Recorder.state_dict` returns.
_STATE = {
    *("format", "rank", "world_size", "seed", "fit", "epoch", "step", "batch", "rng", "samplers"),
    *("loss", "data", "scalars", "folder", "check"),
}
_CALLS = "Use it as `with lightning_d9m.Recorder(...) as run:`, and iterate run.batches(loader)."
_STAGE = "train"
T = TypeVar("T")


def find_ranks() -> tuple[Ranks, int]:
    """Return the ranks of the default process group and their number; one without a group."""
    if not distributed.is_available() or not distributed.is_initialized():
        return ranks_of_group(), 1
    return ranks_of_group(), distributed.get_world_size()


def find_session() -> Session:
    """Return the session that a recorder opens in.

    Raises:
        SettingError: If there is none.
    """
    session = active_session()
    if session is None:
        raise SettingError(
            "There is no deterministic session, so this training would be recorded but not "
            "repeatable. Put it into `with lightning_d9m.deterministic(seed=...):`, or call "
            "lightning_d9m.enable(seed=...) first."
        )
    return session


def _as_tuple(given: Any) -> tuple[Any, ...]:
    """Return one object, several, or None for none as a tuple."""
    if given is None:
        return ()
    # Of a mapping Python would iterate the keys.
    several = isinstance(given, Iterable) and not isinstance(given, Mapping)
    return tuple(given) if several else (given,)


def _make_folder(ranks: Ranks, ledger_dir: Path, *, kind: str = "fit") -> Path:
    """Make the folder of a new ledger on rank 0, and return it on all ranks.

    ``ledger_dir`` is its parent, if no variable names another one.

    Raises:
        LedgerError: If it cannot be made.
    """
    parent = Path(os.environ.get(LEDGER_VARIABLE) or ledger_dir)
    create = partial(create_ledger_folder, parent, kind)
    return share_new_folder(ranks, create if ranks.rank == 0 else None)


def record_final(
    model: torch.nn.Module, *, ledger_dir: str | Path = "d9m", **scalars: float
) -> Path | None:
    """Record the model with which a program ends, so that ``d9m repeat`` compares it too.

    The ledgers of fits show nothing that a program does after them, such as loading other weights.
    Call this once, where the program has its result. On several ranks, rank 0 records its model,
    which must hold whole parameters.

    Args:
        model: The model.
        ledger_dir: Parent of the folder ``final-NNN``; ``d9m repeat`` and ``d9m locate`` name their
            own.
        scalars: Results by name, such as ``accuracy=0.93``.

    Returns:
        The folder of the ledger; None on other ranks.

    Raises:
        LedgerError: If the ledger cannot be written.
    """
    if find_ranks()[0].rank:
        return None
    run = open_alone(model, Path(ledger_dir), "final")
    run.record("final", epoch=0, step=0, scalars=_to_hex(scalars))
    run.end(End(status="finished"))
    return run.folder


def open_alone(model: torch.nn.Module, ledger_dir: Path, kind: str) -> Run:
    """Open the ledger of one process that is not that of a training.

    Raises:
        LedgerError: If it cannot be made.
    """
    session, alone, training = active_session(), Ranks(0), Training(model)
    settings = Settings() if session is None else session.settings
    run = Run(RunOptions())
    run.begin(
        alone,
        training,
        lambda: describe_training(alone, settings, {"world.size": 1}, training, fit=0),
        partial(_make_folder, alone, ledger_dir, kind=kind),
    )
    return run


def _to_hex(scalars: Mapping[str, float]) -> dict[str, str]:
    # Exact, and the same text for the same bits.
    return {name: float(value).hex() for name, value in sorted(scalars.items())}


class EpochBatches(Generic[T]):
    """The batches of a loader, as ``Recorder`` returns them: each iteration is an epoch of them."""

    def __init__(self, loader: Iterable[T], iterate: Callable[[Iterable[T]], Iterator[T]]) -> None:
        self._loader, self._iterate = loader, iterate

    def __iter__(self) -> Iterator[T]:
        return self._iterate(self._loader)

    def __len__(self) -> int:
        return len(cast(Sized, self._loader))


class Recorder:
    """Writes the ledger of a training loop, and checks it as ``DeterminismCallback`` does.

    Use it within a deterministic session. Iterate the training data through ``batches``, call
    ``step`` after each step of the optimizer, and ``epoch`` when an epoch ends. If
    ``torch.distributed`` is initialized, every rank makes one, and ranks are compared.

    Args:
        ledger_dir: Folder in which the run makes a new folder ``fit-NNN``. The variable
            ``LIGHTNING_D9M_LEDGER_DIR``, which ``d9m repeat`` sets, takes precedence.
        model: The model; also one that DDP, Fabric or Accelerate has wrapped.
        optimizers: One optimizer or several.
        schedulers: One learning rate scheduler or several.
        portable: Compute the same bits on every machine within the ``with`` block; see
            ``lightning_d9m.portable``. The initial weights are portable only if the model was
            built so.
        **options: ``reference``, ``on_drift``, ``on_stack_difference``, ``probes``,
            ``probe_modules`` and ``probe_steps``, as of ``DeterminismCallback``.

    Raises:
        SettingError: If a value is not allowed.

    Attributes:
        next_epoch: The epoch that is next or under way; above 0 in a run that was resumed.
        global_step: Number of calls of ``step``, including those before a resume.
        epoch_steps: Those in this epoch, since this process began it.
        interruption: What interrupts the loop for ``d9m repeat --interrupt``.
        run: What writes the ledger, with the probes of a loop that this does not iterate.
        is_hosted: Whether something else iterates the loop, and saves and resumes it.
    """

    def __init__(
        self,
        ledger_dir: str | Path,
        model: torch.nn.Module,
        optimizers: Any = (),
        schedulers: Any = (),
        *,
        portable: bool = False,
        **options: "Unpack[OptionArguments]",
    ) -> None:
        self.run, self.is_hosted = Run(RunOptions(**cast(dict[str, Any], options))), False
        inner, self._schedulers = unwrap_model(model), _as_tuple(schedulers)
        self._optimizers = tuple(map(unwrap_optimizer, _as_tuple(optimizers)))
        self._training = Training(inner, model, lambda: self._optimizers, lambda: self._schedulers)
        self._make_folder: Callable[[], Path] = lambda: _make_folder(self._ranks, Path(ledger_dir))
        self._further: dict[str, Scalar] = {}  # what the header records, too
        self._portable, self._opened = portable, ExitStack()
        self._session: Session | None = None
        self._ranks, self._world_size = Ranks(0), 1
        self._resumed: Mapping[str, Any] | None = None
        self.interruption = Interruption(InterruptRequest(), self._ranks)
        self._fit = self._batch = 0
        self.next_epoch = self.global_step = self.epoch_steps = 0
        self._iterated = 0  # iterations of `batches` in this epoch
        self._stepped = False  # in this epoch
        self._scalars: dict[str, float] = {}
        self._validating = ExitStack()  # restores the generators of the training

    def __enter__(self) -> "Self":
        self._ranks, self._world_size = find_ranks()
        request = self._ranks.raise_on_all(self._check_setup)
        self._fit, settings, rank = next_fit(), self._open_session.settings, self._ranks.rank
        self._loaders = LoaderControl(
            settings.seed, fit=self._fit, rank=rank, per_sample_rng=settings.per_sample_rng
        )
        with ExitStack() as stack:  # `__exit__` is not called if this method raises
            stack.callback(setattr, self, "_session", None)
            stack.callback(self._loaders.release)
            if self._portable:
                from lightning_d9m.ops.portability.mode import portable

                stack.enter_context(portable())
            self.interruption = Interruption(request, self._ranks, before_stop=self.run.end)
            self.run.stop = request.stop
            if request.resume is not None and not self.is_hosted:
                path = self._path_of_rank(request.resume)
                saved = self._ranks.raise_on_all(lambda: self._load(path))
                for name, part in self._name_parts().items():
                    part.load_state_dict(saved[name])
            self._opened = stack.pop_all()
        return self

    def _check_setup(self) -> InterruptRequest:
        """Check what the arguments and variables name; return what interrupts the loop."""
        self._session = find_session()
        if self.run.folder is not None:
            raise SettingError(
                f"This Recorder has written the ledger {self.run.folder}, and the numbers of its "
                "epochs and steps belong to that. Make a new Recorder for each training."
            )
        self.run.prepare()
        request = read_request()
        if request.debugger is not None:
            request.debugger.check_terminal(self._ranks.rank)
        return request

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # First the validation that the program may have left: its generators are not those of the
        # training, whose last record follows.
        end = End(status="finished") if error is None else End.failed(error)
        self._validating.close()
        with self._opened:
            try:
                if error is None and self.run.is_open:
                    # The epoch that is under way, else the last one that ended.
                    self._record("final", max(0, self.next_epoch - 1 + (self._iterated > 0)))
                    # After the last record, because it ends the process of a segment.
                    self.interruption.stop()
                elif error is not None:
                    self.run.record_exception(epoch=self.next_epoch, step=self.global_step)
                    # A difference is found after the step, before the next one begins.
                    step = self.global_step - isinstance(error, DriftError)
                    if isinstance(error, Exception) and step >= 0:  # not Ctrl-C
                        self.run.log_return(step)
            except BaseException as failure:
                # The final record itself may raise, for example if it differs from the reference.
                end = End.failed(failure)
                raise
            finally:
                self.run.end(end)

    @property
    def ledger(self) -> Path | None:
        """The folder of the ledger; None before the first batch."""
        return self.run.folder

    @property
    def digest(self) -> str | None:
        """The digest of the weights in the last record, 32 hex digits; None before the first."""
        return self.run.digest

    def __repr__(self) -> str:
        return (
            f"Recorder(ledger={str(self.ledger) if self.ledger else None!r}, "
            f"epochs={self.next_epoch}, steps={self.global_step}, digest={self.digest!r})"
        )

    def begin(self, loader: object = None) -> None:
        """Open the ledger and record the state that training starts from.

        ``batches`` does it; call it before the first step of a loop that has no loader.

        Raises:
            LedgerError: If the ledger cannot be written, or the reference not be read.
            ReferenceRefusedError: If the reference comes from another experiment.
            StackDifferenceError: If the reference's stack differs, unless the settings allow it.
        """
        settings = self._open_session.settings
        if self.run.folder is not None:
            return
        is_new = self.run.begin(
            self._ranks,
            self._training,
            lambda: describe_training(
                self._ranks,
                settings,
                {"world.size": self._world_size},
                self._training,
                fit=self._fit,
                further={**self.run.options.as_record(), **self._further},
                loaders=[] if loader is None else [loader],
            ),
            self._make_folder,
        )
        if is_new:
            self._record("initial", 0)

    def batches(self, loader: Iterable[T]) -> EpochBatches[T]:
        """Return the batches of a loader, whose order and draws depend on seed and epoch only.

        Each iteration gives those of the epoch that is next or under way, and ``len`` their number
        if the loader has one. The first iteration in an epoch seeds all generators. In a run that
        was resumed within the epoch, the first batches are left out.
        """
        return EpochBatches(loader, self._iterate)

    def _iterate(self, loader: Iterable[T]) -> Iterator[T]:
        self.begin(loader)
        loaders, epoch, inner = self._loaders, self.next_epoch, find_controllable(loader)
        resumed, self._resumed = self._resumed, None
        # Once an epoch: a second loader in it continues the streams, as the program would without a
        # recorder.
        if self._iterated == 0:
            if epoch:
                self._reach("epoch", epoch - 1)
            sampler = getattr(inner, "sampler", None)
            # Ranks that it gives the same data, as those of tensor parallelism, draw alike.
            if isinstance(sampler, DistributedSampler) and sampler.rank != loaders.rank:
                loaders.release()
                loaders.rank = sampler.rank
            moment = {"fit": self._fit, "rank": loaders.rank, "epoch": epoch}
            seed_all(derive_seed(loaders.seed, _STAGE, **moment))
        self._iterated += 1
        self._batch = 0 if resumed is None else resumed["batch"]
        samplers = None if resumed is None else resumed["samplers"]
        # Also at the start of an epoch: samplers and datasets may have changed in those before it.
        if inner is not None and samplers is not None:
            loaders.resume_epoch(
                _STAGE, epoch, batches=self._batch, cycled=lambda: False, samplers=samplers
            )
        batches = self._start_loader(loader, inner, _STAGE, epoch, skipped=self._batch)
        if resumed is not None and self._batch:
            # After the loader has begun, whose start draws in the main process.
            restore_rng(decode_rng(resumed["rng"]))
        for batch in batches:
            self.start_batch(batch)
            before = self.epoch_steps
            debugger = self.interruption.open_debugger(self.global_step, self.ledger)
            if debugger is not None:
                loop = sys._getframe(1)  # noqa: SLF001 - what iterates
                debugger.stop_in(loop, self.interruption.leave)
            yield batch
            self._validating.close()
            if self.epoch_steps > before:  # gradients between steps are not saved
                if self._iterated == 1:  # within an epoch of several loaders nothing can be saved
                    self._reach("step", epoch)
                self.interruption.pass_step(self.global_step, self._save)

    def _start_loader(
        self, loader: Any, inner: DataLoader[Any] | None, stage: str, epoch: int, skipped: int = 0
    ) -> Any:
        """Return an iterator of an epoch's batches without the first ones.

        Of any other iterable than a ``DataLoader`` the first ones are made and discarded.
        """
        loaders = self._loaders
        if inner is None:
            batches = iter(loader)
            for _ in zip(range(skipped), batches, strict=False):
                pass
            return batches
        controlled = loaders.wrap_loader(inner, stage)
        if stage != _STAGE:
            # Two validations may share an epoch, and which loader is the first to be iterated
            # depends on where the run was resumed.
            find_control(controlled).first_epoch = epoch
            loaders.restart(stage)
        loaders.start_epoch(stage, epoch)
        if inner is loader:
            # A loader that iterates by itself makes its first batches again.
            return (
                batch
                for number, batch in enumerate(controlled)
                if number >= skipped or not find_control(controlled).is_bypassed
            )
        # The wrapper passes its own count of iterations to the samplers.
        if hasattr(loader, "iteration"):
            loader.iteration = epoch
        else:
            set_fabric_epoch(loader, epoch)
        return iter(loader)

    def _reach(self, kind: str, epoch: int) -> None:
        """Save what the recorder knows, or end the loop, if the request says so."""
        # Called where the loop asks for its next batch, after all that follows `step` and `epoch`
        # in the program.
        path = self.interruption.reach(kind, epoch)
        if path is not None:
            self._save(path)

    def _save(self, path: Path) -> None:
        """Save all parts; each rank saves its own file."""
        saved = {name: part.state_dict() for name, part in self._name_parts().items()}
        own_path = self._path_of_rank(path)
        save = unwrap(torch.save)  # it is not a file of the program, see ``saved_files.py``
        self._ranks.raise_on_all(lambda: save(saved, own_path))
        # After all ranks have saved, so that a checkpoint in the ledger is complete.
        self.note_checkpoint(path)

    def note_checkpoint(self, path: Path) -> None:
        """Record that a checkpoint is complete, on every rank."""
        step, batch = self.global_step, self._batch
        checkpoint = Checkpoint(path=str(path), epoch=self.next_epoch, step=step, batch=batch)
        self.run.note_checkpoint(checkpoint)

    def _load(self, path: Path) -> dict[str, Any]:
        """Read what ``_save`` has written.

        Raises:
            CheckpointError: If the file has other parts.
        """
        # The parts copy what they load to their own devices; a file names the device of the rank
        # that saved it, which may not exist here.
        saved: Any = torch.load(path, map_location="cpu", weights_only=True)
        expected = [*self._name_parts()]
        content = [*saved] if isinstance(saved, dict) else type(saved).__name__
        if content != expected:
            raise CheckpointError(
                f"{path}, which {RESUME} names, has {content}, and this Recorder resumes "
                f"{expected}. Name a file that a Recorder of this program has saved."
            )
        return cast(dict[str, Any], saved)

    def _name_parts(self) -> dict[str, Any]:
        """Return all that is saved by name; this recorder, which restores generators, is last."""
        named: dict[str, Any] = {"model": self._training.model}
        for kind, parts in (("optimizer", self._optimizers), ("scheduler", self._schedulers)):
            named |= {f"{kind} {number}": part for number, part in enumerate(parts)}
        return {**named, "recorder": self}

    def _path_of_rank(self, path: Path) -> Path:
        rank = self._ranks.rank
        # Rank 0 has the path itself, which a ledger and a request name.
        return path if rank == 0 else path.with_name(f"{path.name}-{rank}")

    def start_batch(self, batch: object = None) -> None:
        """Begin the next batch of the epoch; ``batches`` does it.

        Call it after ``begin`` in a loop that cannot iterate through ``batches`` and so seeds its
        generators and restores its position itself.
        """
        self._check_begun("start_batch")
        self._validating.close()
        resumed, self._resumed = self._resumed, None
        self._batch = self._batch if resumed is None else resumed["batch"]
        point = ProbePoint(self.next_epoch, self.global_step, self._batch)
        if batch is not None:
            self.run.take_data(batch)
        self.run.probes.start(point, batch)
        self._batch += 1

    def _check_begun(self, call: str) -> None:
        if not self.run.is_open:
            raise SettingError(f"{call}() was called before the training began. {_CALLS}")

    def validation(self, loader: Iterable[T]) -> EpochBatches[T]:
        """Return the batches of a validation within the training, which probes record too.

        What it draws depends on the seed and the steps before it, and the training continues with
        the numbers that it draws without a validation, even if you leave the loop early.

        Raises:
            SettingError: If an iterator is continued after the training was.
        """
        return EpochBatches(loader, self._validate)

    def _validate(self, loader: Iterable[T]) -> Iterator[T]:
        seed, stage = self._open_session.settings.seed, "validate"
        moment = {"fit": self._fit, "rank": self._ranks.rank, "epoch": self.global_step}
        self._validating.close()
        with ExitStack() as self._validating:
            # Leaving a loop closes this iterator; the training does so if the program has kept it.
            is_open = [True]
            self._validating.callback(is_open.clear)
            self._validating.enter_context(rng_restored())
            inner = find_controllable(loader)
            batches = self._start_loader(loader, inner, stage, self.global_step)
            seed_all(derive_seed(seed, stage, **moment))
            for batch in batches:
                self.run.probes.start_validation(self.next_epoch, self.global_step, batch)
                yield batch
                if not is_open:
                    raise SettingError(
                        "A validation was continued after the training: its numbers would be "
                        "those of the training. Iterate run.validation(loader) from the start."
                    )
                self.run.probes.end()

    def step(self, loss: torch.Tensor | float | None = None, **scalars: float) -> None:
        """Count a step of the optimizer, after it.

        Args:
            loss: The loss; it is kept on its device until the epoch is recorded.
            **scalars: Further numbers, of which the epoch records the last.
        """
        self._check_begun("step")
        self._validating.close()
        self.log(loss, **scalars)
        losses = [] if loss is None or self.run.loss is None else [("step", self.run.loss)]
        # Before the step is counted: what is not finite belongs to this one.
        self.interruption.check_finite(self.global_step, "loss", losses)
        # A generator, which only a segment that looks for such a number reads.
        weights = self._training.model.named_parameters()
        self.interruption.check_finite(self.global_step, "weight", weights)
        self.run.probes.end(None if loss is None else self.run.loss, scalars)
        self.global_step += 1
        self.epoch_steps += 1
        self._stepped = True
        self.run.end_step(self.next_epoch, self.global_step)

    def log(self, loss: torch.Tensor | float | None = None, **scalars: float) -> None:
        """Keep a loss and numbers for the next record.

        Raises:
            SettingError: If the loss is a tensor of several numbers.
        """
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise SettingError(
                    f"The loss has the shape {tuple(loss.shape)}; allowed: one number. Give the "
                    "mean or the sum that you differentiate, such as loss.mean()."
                )
            # Without its graph, which would keep the activations of the step, and not read: that
            # would wait for the device in each step.
            self.run.loss = loss.detach()
        elif loss is not None:
            # A number of Python has 64 bits, which the record keeps.
            self.run.loss = torch.tensor(loss, dtype=torch.float64, device="cpu")
        given: dict[str, Any] = scalars  # a tensor is kept without its graph, as above
        for name, value in given.items():
            given[name] = value.detach() if isinstance(value, torch.Tensor) else value
        self._scalars.update(given)

    def epoch(self, epoch: int | None = None, **scalars: float) -> None:
        """Record the end of an epoch; compare it with the reference and across ranks.

        Args:
            epoch: Its number, which is checked.
            **scalars: Further numbers, such as a validation loss.

        Raises:
            DriftError: If it differs from either and ``on_drift`` is ``"raise"``.
            LedgerError: If the ledger cannot be written.
            SettingError: If a switch was changed since the session began, or the epoch has another
                number.
        """
        self._check_begun("epoch")
        self._validating.close()
        if epoch is not None and epoch != self.next_epoch:
            raise SettingError(
                f"epoch({epoch}) was called at the end of epoch {self.next_epoch}. Count epochs "
                "from 0; in a run that resumes, from run.next_epoch."
            )
        if not self._stepped:
            raise SettingError(
                f"Epoch {self.next_epoch} ends without a call of step(): it has trained nothing. "
                "Iterate run.batches(loader) in each epoch, over a loader that can be iterated "
                "again, and call run.step() after each step of the optimizer."
            )
        self.log(**scalars)
        self._record("epoch", self.next_epoch)
        self.next_epoch += 1
        self._batch = self._iterated = self.epoch_steps = 0
        self._stepped = False

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume: plain values, for the program's own checkpoint.

        Raises:
            SettingError: Within an epoch in which ``batches`` was called more than once.
        """
        session = self._open_session
        self._validating.close()
        if self._iterated > 1:
            raise SettingError(
                f"state_dict() was called within epoch {self.next_epoch}, in which batches() was "
                f"called {self._iterated} times, so the position in each loader is not known. "
                "Save checkpoints after epoch()."
            )
        self.run.probes.flush()
        # The digests of the next steps are recorded, and a run that resumes is compared with them.
        self.run.note_save(self.global_step)
        return {
            "format": _FORMAT,
            "rank": self._ranks.rank,
            "world_size": self._world_size,
            "seed": session.settings.seed,
            "fit": self._fit,
            "epoch": self.next_epoch,
            "step": self.global_step,
            "batch": self._batch,
            "rng": encode_rng(capture_rng()),
            "samplers": self._loaders.capture_samplers(_STAGE, within=self._batch > 0),
            "loss": self.run.loss_text,
            "data": self.run.data,
            "scalars": _to_hex(self._scalars),
            **(self.run.ledger_position or {"folder": "", "check": ""}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run that returned this state, and its ledger, before the first batch.

        Load model, optimizer and scheduler too, and restore the generators last, that is: call this
        when everything is built and loaded, on every rank.

        Raises:
            CheckpointError: If the state is not one, or of another rank, seed or number of ranks.
            InexactResumeError: If FSDP1 shards the model within groups of ranks, the generator of a
                device cannot be restored, or a sampler has changed what no checkpoint can hold;
                unless ``on_inexact_resume="warn"``.
            SettingError: After the training has begun.
        """
        _ = self._open_session
        if self.run.is_open:
            raise SettingError(
                "load_state_dict() was called after the first batch. Call it at the start of the "
                "`with` block."
            )
        self._ranks.raise_on_all(lambda: self._load_state(state))

    def _load_state(self, saved: Mapping[str, Any]) -> None:
        seed, rank = self._open_session.settings.seed, self._ranks.rank
        _check_state(saved, rank=rank, world_size=self._world_size, seed=seed)
        wrapped = self._training.wrapped or self._training.model
        sharding = find_hybrid_sharding(wrapped.modules())
        problems = [*filter(None, [sharding]), *find_lost_devices(saved["rng"])]
        problems += list_unsaved(saved["samplers"])
        problems += describe_unsaved(list_paths(saved["samplers"], UNKNOWN_DATA))
        if problems:
            text = f"This loop would not resume exactly: {' '.join(problems)}"
            self._report(text, problems)
        self._loaders.release()
        self._fit = self._loaders.fit = saved["fit"]
        self._resumed = saved
        place = {name: saved[name] for name in ("epoch", "step", "batch")}
        parent = Resume(
            parent=saved["folder"], parent_check=saved["check"], inexact=tuple(problems), **place
        )
        self.run.resume(parent, saved["loss"], self._report, data=saved["data"])
        self.next_epoch, self.global_step = saved["epoch"], saved["step"]
        self._stepped = saved["batch"] > 0
        self._scalars = {name: float.fromhex(text) for name, text in saved["scalars"].items()}
        # Last: loading parts of the program, and what this method calls, may draw.
        restore_rng(decode_rng(saved["rng"]))

    def _report(self, said: str, problems: Sequence[str] = ()) -> None:
        """Raise or warn if this loop does not continue the one that saved its state."""
        place = {"epoch": self.next_epoch, "step": self.global_step, "batch": self._batch}
        first = self._ranks.rank == 0
        self.run.break_resume(said, problems or [said], is_first=first, **place)

    @property
    def _open_session(self) -> Session:
        if self._session is None:
            raise SettingError(f"The Recorder is not open. {_CALLS}")
        return self._session

    def _record(self, moment: str, epoch: int) -> None:
        step, scalars = self.global_step, _to_hex(self._scalars)
        self.run.record(moment, epoch=epoch, step=step, scalars=scalars, verify=self._verify)

    def _verify(self) -> None:
        self._open_session.verify()


def _check_state(state: object, **run: int) -> None:
    """Raise a ``CheckpointError`` unless a run may continue from what ``state_dict`` returned.

    ``run`` has the facts of the run that must be those of the state.
    """
    if not isinstance(state, Mapping) or state.keys() != _STATE or state["format"] != _FORMAT:
        content = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            f"The state for Recorder.load_state_dict has {content}, and this version of "
            f"lightning_d9m reads format {_FORMAT} with {sorted(_STATE)}. Pass what "
            "Recorder.state_dict() returned."
        )
    for name, actual in run.items():
        if state[name] != actual:
            raise CheckpointError(
                f"The saved Recorder has {name} {state[name]}, and this run has {actual}, so it "
                "would not end at the same bits. Let each rank load the state that it saved, "
                "with the same seed and as many ranks."
            )
