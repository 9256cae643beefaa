"""``with Recorder("runs", model, optimizer) as run:`` writes the ledger of any training loop."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from lightning_d9m.control.data.samplers import list_unsaved
from lightning_d9m.control.seeding import (
    capture_rng,
    decode_rng,
    derive_seed,
    encode_rng,
    find_lost_devices,
    restore_rng,
    rng_restored,
    seed_all,
)
from lightning_d9m.control.session import Session, next_fit
from lightning_d9m.control.settings import read_path
from lightning_d9m.errors import CheckpointError, InexactResumeError, SettingError
from lightning_d9m.hashing.shards import find_hybrid_sharding
from lightning_d9m.launch.interruption_points import InterruptRequest, read_request
from lightning_d9m.ledger.format.records import End, Resume
from lightning_d9m.ledger.kinds import VALIDATION
from lightning_d9m.loop.batches import Batches, EpochBatches, unwrap_model, unwrap_optimizer
from lightning_d9m.loop.interruption import Interruption, name_parts
from lightning_d9m.loop.probing import LoopProbes, read_probe_settings
from lightning_d9m.loop.run_setup import as_tuple, find_ranks, find_session, make_folder
from lightning_d9m.probes.settings import ProbeSettings, make_settings
from lightning_d9m.probes.trace import ProbePoint, StatePoint
from lightning_d9m.ranks.ranks import Ranks
from lightning_d9m.recording.run_recorder import Policy, RunRecorder, describe_training

if TYPE_CHECKING:
    from typing_extensions import Self


_FORMAT = 1


@dataclass(frozen=True)
class SavedLoop:
    """The position of a recorded loop, and what its rest depends on.

    Attributes:
        rank: The rank that saved it.
        world_size: Number of ranks.
        seed: The base seed.
        fit: Ordinal of the fit within its process.
        epoch: The epoch that is next or under way.
        step: The global step.
        batch: Number of batches of the epoch that were given out.
        rng: The state of all generators.
        samplers: The states of the samplers' generators, by number of the loader.
        loss: ``float.hex()`` of the last loss; None without one.
        scalars: The same of each scalar, by name.
        folder: The ledger's folder; empty without one.
        check: The check of its last record.
    """

    rank: int
    world_size: int
    seed: int
    fit: int
    epoch: int
    step: int
    batch: int
    rng: dict[str, Any]
    samplers: dict[str, Any]
    loss: str | None
    scalars: dict[str, str]
    folder: str
    check: str

    def as_plain(self) -> dict[str, Any]:
        """Return plain values, which ``torch.load(weights_only=True)`` reads."""
        return {"format": _FORMAT, **asdict(self)}

    def as_record(self) -> dict[str, Any]:
        """Return the record that names the ledger which a resumed run continues."""
        return Resume(
            parent=self.folder,
            parent_check=self.check,
            epoch=self.epoch,
            step=self.step,
            batch=self.batch,
        ).as_record()

    @classmethod
    def from_plain(cls, state: object) -> "SavedLoop":
        """Read what ``as_plain`` returned.

        Raises:
            CheckpointError: If it is not such a state.
        """
        names = {part.name for part in fields(cls)} | {"format"}
        if not isinstance(state, Mapping) or state.keys() != names or state["format"] != _FORMAT:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise CheckpointError(
                f"The state for Recorder.load_state_dict has {found}, and this version of "
                f"lightning_d9m reads format {_FORMAT} with {sorted(names)}. Pass what "
                "Recorder.state_dict() returned."
            )
        return cls(**{name: value for name, value in state.items() if name != "format"})

    def check_run(self, *, rank: int, world_size: int, seed: int) -> None:
        """Raise a ``CheckpointError`` unless a run may continue from here."""
        for name, actual in (("rank", rank), ("world_size", world_size), ("seed", seed)):
            expected = getattr(self, name)
            if expected != actual:
                raise CheckpointError(
                    f"The saved Recorder has {name} {expected}, and this run has {actual}, so it "
                    "would not end at the same bits. Let each rank load the state that it saved, "
                    "with the same seed and as many ranks."
                )


T = TypeVar("T")
_CALLS = "Use it as `with lightning_d9m.Recorder(...) as run:`, and iterate run.batches(loader)."


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
        reference: Ledger of an earlier run to compare this run with.
        on_drift: ``"raise"`` stops the training with a ``DriftError``; ``"warn"`` warns.
        on_stack_difference: What to do if the stack differs from the reference's: ``"raise"``,
            ``"warn"`` or ``"ignore"``.
        probes: Kinds of values whose digests are recorded in every batch, such as ``"weight"``,
            ``"loss"`` or ``"output"``; ``"all"`` for all of them.
        probe_modules: Patterns of the names of modules that are probed.
        probe_steps: Global steps that are probed, ``"a:b"`` from a up to but without b.
        probe_ranks: Ranks that record probes; None means all.
        portable: Compute the same bits on every machine within the ``with`` block; see
            ``lightning_d9m.portable``. The initial weights are portable only if the model was
            built so.

    Raises:
        SettingError: If a value is not allowed.

    Attributes:
        next_epoch: The epoch that is next or under way; above 0 in a run that was resumed.
        global_step: Number of calls of ``step``, including those before a resume.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each setting
        self,
        ledger_dir: str | Path,
        model: torch.nn.Module,
        optimizers: Any = (),
        schedulers: Any = (),
        *,
        reference: str | Path | None = None,
        on_drift: Literal["raise", "warn"] = "raise",
        on_stack_difference: Literal["raise", "warn", "ignore"] = "raise",
        probes: str | Sequence[str] = (),
        probe_modules: str | Sequence[str] = "*",
        probe_steps: str | None = None,
        probe_ranks: int | Sequence[int] | None = None,
        portable: bool = False,
    ) -> None:
        self._wrapped = model
        self._model = unwrap_model(model)
        self._optimizers = tuple(map(unwrap_optimizer, as_tuple(optimizers)))
        self._schedulers = as_tuple(schedulers)
        self._ledger_dir = Path(ledger_dir)
        path = read_path("reference", reference)
        self._policy = Policy(path, on_drift, on_stack_difference)
        self._probe_settings = make_settings(
            probes=probes,
            probe_modules=probe_modules,
            probe_steps=probe_steps,
            probe_ranks=probe_ranks,
        )
        self._portable, self._switched = portable, ExitStack()
        self._session: Session | None = None
        self._ranks, self._world_size = Ranks(0), 1
        self._run = RunRecorder(self._policy)
        self._probes = self._make_probes(ProbeSettings())
        self._batches: Batches | None = None
        self._resumed: SavedLoop | None = None
        self._interruption = self._interrupt(InterruptRequest())
        self._fit = self._batch = 0
        self.next_epoch = self.global_step = 0
        self._iterated = 0  # iterations of `batches` in this epoch
        self._stepped = False  # in this epoch
        self._validated = 0  # batches of validations since the last step
        self._scalars: dict[str, float] = {}

    def __enter__(self) -> "Self":
        self._ranks, self._world_size = find_ranks()
        self._session = session = self._ranks.raise_on_all(self._check_setup)
        self._fit = next_fit()
        self._batches = Batches(session.settings, self._fit, self._ranks.rank)
        if self._portable:
            from lightning_d9m.portability.mode import portable

            self._switched.enter_context(portable())
        self._interruption.resume()
        return self

    def _check_setup(self) -> Session:
        """Check what the arguments and variables name; return the session."""
        session = find_session()
        self._probe_settings = read_probe_settings(self._probe_settings, self._world_size)
        self._policy.check_reference()
        self._interruption = self._interrupt(read_request())
        return session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._fail(error)
            else:
                self._finish()
        finally:
            if self._batches is not None:
                self._batches.release()
            self._session = self._batches = None
            self._switched.close()

    @property
    def ledger(self) -> Path | None:
        """The folder of the ledger; None before the first batch."""
        return self._run.folder

    @property
    def digest(self) -> str | None:
        """The digest of the weights in the last record, 32 hex digits; None before the first."""
        return self._run.digest

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
        if self._run.folder is not None:
            return
        session, resumed = self._open_session, self._resumed
        self._run.begin(
            self._ranks,
            self._model,
            lambda: describe_training(
                self._ranks,
                replace(session.settings, portable=self._portable or session.settings.portable),
                {"world.size": self._world_size},
                self._model,
                self._wrapped,
                fit=self._fit,
                further=self._probe_settings.as_record(),
                loaders=[] if loader is None else [loader],
                optimizers=self._optimizers,
                schedulers=self._schedulers,
            ),
            lambda: make_folder(self._ranks, self._ledger_dir),
            wrapped=self._wrapped,
            resumed=None if resumed is None else resumed.as_record(),
        )
        if self._probe_settings.takes_rank(self._ranks.rank):
            self._probes = self._make_probes(self._probe_settings)
        if resumed is None:
            self._record("initial", 0)

    def _make_probes(self, settings: ProbeSettings) -> LoopProbes:
        rank, append = self._ranks.rank, self._run.append
        return LoopProbes(settings, self._model, self._optimizers, rank, append)

    def batches(self, loader: Iterable[T]) -> EpochBatches[T]:
        """Return the batches of a loader, whose order and draws depend on seed and epoch only.

        Each iteration gives those of the epoch that is next or under way, and ``len`` their number
        if the loader has one. The first iteration in an epoch seeds all generators. In a run that
        was resumed within the epoch, the first batches are left out.
        """
        return EpochBatches(loader, self._iterate)

    def _iterate(self, loader: Iterable[T]) -> Iterator[T]:
        source, epoch = self._open_batches, self.next_epoch
        self.begin(loader)
        resumed, self._resumed = self._resumed, None
        if self._iterated == 0:
            self._interruption.start_epoch(epoch)
            source.start_epoch(epoch, loader)
        self._iterated += 1
        self._batch = 0 if resumed is None else resumed.batch
        found = source.iterate(loader, epoch, self._batch, resumed.samplers if resumed else {})
        if resumed is not None and resumed.batch:
            restore_rng(decode_rng(resumed.rng))
        for batch in found:
            self.start_batch(batch)
            yield batch
            self._interruption.end_batch(epoch)

    def start_batch(self, batch: object = None) -> None:
        """Begin the next batch of the epoch; ``batches`` does it.

        Call it after ``begin`` in a loop that cannot iterate through ``batches`` and so seeds its
        generators and restores its position itself.
        """
        if not self._run.is_open:
            raise SettingError(f"start_batch() was called before the training began. {_CALLS}")
        resumed, self._resumed = self._resumed, None
        self._batch = self._batch if resumed is None else resumed.batch
        point = ProbePoint(self.next_epoch, self.global_step, self._batch)
        self._probes.start(point)
        if batch is not None:
            self._probes.take_batch(batch)
        self._batch += 1

    def take_batch(self, batch: object) -> None:
        """Probe what the model is given, in a loop that does not show its batches before."""
        self._probes.take_batch(batch)

    def validation(self, loader: Iterable[T]) -> Iterator[T]:
        """Give out the batches of a validation within the training, which probes record too.

        What it draws depends on the seed and the steps before it, and the training continues with
        the numbers that it draws without a validation.
        """
        settings = self._open_session.settings
        with rng_restored():
            seed_all(
                derive_seed(
                    settings.seed,
                    "validate",
                    fit=self._fit,
                    rank=self._ranks.rank,
                    epoch=self.global_step,
                )
            )
            for batch in loader:
                self.start_validation_batch(batch)
                yield batch
                self.end_validation_batch()

    def start_validation_batch(self, batch: object) -> None:
        """Probe a batch of a validation; ``validation`` does it."""
        # It belongs to the training batch before it.
        step, number = max(self.global_step - 1, 0), VALIDATION + self._validated
        self._validated += 1
        self._probes.start(ProbePoint(self.next_epoch, step, number))
        self._probes.take_batch(batch)

    def end_validation_batch(self) -> None:
        """Write the probes of a batch of a validation; ``validation`` does it."""
        self._probes.end(None, {})

    def step(self, loss: torch.Tensor | float | None = None, **scalars: float) -> None:
        """Count a step of the optimizer, after it.

        Args:
            loss: The loss; it is kept on its device until the epoch is recorded.
            **scalars: Further numbers, of which the epoch records the last.
        """
        if not self._run.is_open:
            raise SettingError(f"step() was called before the training began. {_CALLS}")
        self.log(loss, **scalars)
        self._probes.end(None if loss is None else self._run.loss, scalars)
        self.global_step += 1
        self._run.keep_step(self.global_step, self._optimizers, self._schedulers)
        self._stepped, self._validated = True, 0
        self._interruption.end_step()

    def log(self, loss: torch.Tensor | float | None = None, **scalars: float) -> None:
        """Keep a loss and numbers for the next record."""
        if isinstance(loss, torch.Tensor):
            self._run.loss = loss.detach()
        elif loss is not None:
            self._run.loss = torch.tensor(loss, dtype=torch.float64)
        self._scalars.update(scalars)

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
        if not self._run.is_open:
            raise SettingError(f"epoch() was called before the training began. {_CALLS}")
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
        self._probes.flush()
        self._record("epoch", self.next_epoch)
        self._interruption.end_epoch(self.next_epoch, self._iterated)
        self.next_epoch += 1
        self._batch = self._iterated = 0
        self._stepped = False

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume: plain values, for the program's own checkpoint.

        Raises:
            SettingError: Within an epoch in which ``batches`` was called more than once.
        """
        session, source = self._open_session, self._open_batches
        if self._iterated > 1:
            raise SettingError(
                f"state_dict() was called within epoch {self.next_epoch}, in which batches() was "
                f"called {self._iterated} times, so the position in each loader is not known. "
                "Save checkpoints after epoch()."
            )
        self._probes.flush()
        position = self._run.ledger_position or {"folder": "", "check": ""}
        return SavedLoop(
            rank=self._ranks.rank,
            world_size=self._world_size,
            seed=session.settings.seed,
            fit=self._fit,
            epoch=self.next_epoch,
            step=self.global_step,
            batch=self._batch,
            rng=encode_rng(capture_rng()),
            samplers=source.capture_samplers(within=self._batch > 0),
            loss=self._run.loss_text,
            scalars=self._list_scalars(),
            **position,
        ).as_plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run that returned this state, and its ledger, before the first batch.

        Load model, optimizer and scheduler too, and restore the generators last, that is: call this
        when everything is built and loaded, on every rank.

        Raises:
            CheckpointError: If the state is not one, or of another rank, seed or number of ranks.
            InexactResumeError: If FSDP1 shards the model within groups of ranks, the generator of a
                device cannot be restored, or a sampler has changed what no checkpoint can hold.
            SettingError: After the training has begun.
        """
        _ = self._open_session
        if self._run.is_open:
            raise SettingError(
                "load_state_dict() was called after the first batch. Call it at the start of the "
                "`with` block."
            )
        self._ranks.raise_on_all(lambda: self._load_state(state))

    def _load_state(self, state: Mapping[str, Any]) -> None:
        session, saved = self._open_session, SavedLoop.from_plain(state)
        rank, seed = self._ranks.rank, session.settings.seed
        saved.check_run(rank=rank, world_size=self._world_size, seed=seed)
        sharding = find_hybrid_sharding(self._wrapped.modules())
        problems = [*filter(None, [sharding]), *find_lost_devices(saved.rng)]
        if problems := problems + list_unsaved(saved.samplers):
            text = f"This loop would not resume exactly: {' '.join(problems)}"
            raise InexactResumeError(text, reasons=problems)
        self._open_batches.release()
        self._fit = saved.fit
        self._batches = Batches(session.settings, saved.fit, rank)
        self._resumed = saved
        self.next_epoch, self.global_step = saved.epoch, saved.step
        self._stepped = saved.batch > 0
        self._run.load_loss(saved.loss)
        self._scalars = {name: float.fromhex(text) for name, text in saved.scalars.items()}
        restore_rng(decode_rng(saved.rng))

    def _interrupt(self, request: InterruptRequest) -> Interruption:
        """Return what interrupts the loop as a request says."""
        parts = name_parts(self._model, self._optimizers, self._schedulers, self)
        return Interruption(request, parts, self._ranks)

    @property
    def _open_session(self) -> Session:
        if self._session is None:
            raise SettingError(f"The Recorder is not open. {_CALLS}")
        return self._session

    @property
    def _open_batches(self) -> Batches:
        _ = self._open_session
        assert self._batches is not None, "both are set together"
        return self._batches

    def _record(self, moment: str, epoch: int) -> None:
        self._probes.save_state(StatePoint(epoch, self.global_step, moment))
        digests = self._run.take(
            moment,
            epoch=epoch,
            step=self.global_step,
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            scalars=self._list_scalars(),
            verify=self._open_session.verify,
        )
        self._run.record(digests)

    def _list_scalars(self) -> dict[str, str]:
        return {name: float(value).hex() for name, value in sorted(self._scalars.items())}

    def _finish(self) -> None:
        if not self._run.is_open:
            return
        self._probes.close()
        try:
            self._record("final", max(0, self.next_epoch - 1 + (self._iterated > 0)))
            self._interruption.finish()
        except BaseException as error:
            self._run.end(End.failed(error))
            raise
        self._run.end(End(status="finished"))

    def _fail(self, error: BaseException) -> None:
        with suppress(Exception):  # do not hide the error that is being raised
            self._probes.close()
        self._run.end(End.failed(error))
