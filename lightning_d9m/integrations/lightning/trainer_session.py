"""A Trainer's run under control: switches, seeds by epoch, loaders, and isolated validation."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_d9m.attribute_patches import replace_method, wrap_method
from lightning_d9m.engine.control.data.loaders import LoaderControl
from lightning_d9m.engine.control.seeding import (
    RngState,
    capture_rng,
    derive_seed,
    restore_rng,
    rng_restored,
    seed_all,
)
from lightning_d9m.engine.control.session import (
    active_session,
    deterministic,
    give_back_fit,
    next_fit,
)
from lightning_d9m.engine.control.settings import HIGHEST_SEED, Settings, read_names
from lightning_d9m.engine.hashing.shards import reshard
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.lightning.saved_state import check_loads
from lightning_d9m.integrations.trainer.lightning_private import fit_data_sources
from lightning_d9m.integrations.trainer.trainer_attributes import Trainer
from lightning_d9m.ops.portability import is_portable


class TrainerSession:
    """The switches, seeds and wrapped methods of a run, from ``setup`` to ``teardown``.

    The stage is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

    Attributes:
        loaders: The control of the run's loaders.
        evaluated: The stage of an evaluation in it.
        has_trained: Whether a fit has begun to train; otherwise it does not count.
        resumed_epoch: The epoch that a resumed fit begins with.
        verify: Raises a ``SettingError`` if a switch has been changed since the run began.

    Raises:
        SettingError: If a setting of the program contradicts these, or another thread holds a
            session open.
        TooLateError: If a switch can no longer take effect.
    """

    def __init__(self, trainer: Trainer, settings: Settings, stage: str) -> None:
        self.settings = settings
        self.stage = stage
        self.evaluated = "validate" if stage == "fit" else str(trainer.state.fn.value)
        self._trainer = trainer
        # Of data parallelism: tensor-parallel peers share one.
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self._rank = int(sampler.get("rank", 0))
        self._evaluations = 0
        self._training_rng: RngState | None = None
        self.resumed_epoch = 0
        self._loaded_epochs: Mapping[str, int | None] = {}
        self._resume_loader: Callable[[object], None] = lambda _: None
        self.has_trained = False
        with ExitStack() as stack:
            # Read before the session switches it off.
            self.overridden = ["cudnn.benchmark"] if torch.backends.cudnn.benchmark else []
            # Counted in the session around the run, before the run opens its own.
            self.fit = counted = next_fit() if stage == "fit" else 0
            if stage == "fit":
                # A fit that has not begun to train does not count, so that the next one draws its
                # numbers.
                stack.callback(lambda: None if self.has_trained else give_back_fit(counted))
            session = stack.enter_context(deterministic(settings))
            # The recorder of optimizer steps records nothing then: the run has a ledger.
            session.in_trainer = True
            self.verify = session.verify
            self.loaders = LoaderControl(
                settings.seed,
                fit=self.fit,
                rank=self._rank,
                per_sample_rng=settings.per_sample_rng,
                host_sets_epochs=True,
            )
            stack.callback(self.loaders.release)
            if (connect := getattr(trainer.strategy, "connect_session", None)) is not None:
                connect(self)
                stack.callback(connect, None)
            check_loads(trainer, stack)
            self._control_loading(stack)
            # The same seed on every rank, so that weights made in `configure_model` agree.
            seed_all(derive_seed(settings.seed, "setup", fit=self.fit))
            self._stack = stack.pop_all()

    def _control_loading(self, stack: ExitStack) -> None:
        """Seed the hooks that make loaders, and control each loader, until a stack is closed."""
        # Lightning has set the sampler when this method returns, and has not iterated the loader.
        strategy = self._trainer.strategy
        process = partial(self._process_dataloader, strategy.process_dataloader)
        replace_method(stack, strategy, "process_dataloader", process)
        if self.stage == "fit":
            # Whenever Lightning calls `train_dataloader` or `val_dataloader`.
            for stage, source in fit_data_sources(self._trainer).items():
                around = partial(self._loader_hook_seeded, stage)
                wrap_method(stack, source, "dataloader", around)

    def __deepcopy__(self, memo: dict[int, object]) -> "TrainerSession":
        """Return this session: a program that copies the Trainer within a run opens no other."""
        return self

    def close(self) -> None:
        """Undo everything, in reverse."""
        self._stack.close()

    def resume(
        self, resume_loader: Callable[[object], None], release: Callable[[], object]
    ) -> None:
        """Prepare a fit that may resume from a checkpoint.

        ``resume_loader`` is called with each training loader before it is started,
        ``release`` when the run is closed.
        """
        self._resume_loader = resume_loader
        self._stack.callback(release)

    def resume_fit(self, fit: int, loaded_epochs: Mapping[str, int | None]) -> None:
        """Draw the numbers of the fit with this ordinal, which another process began.

        It loaded the loaders of a stage for the epoch that ``loaded_epochs`` has.
        """
        self.fit = fit
        self.loaders.fit = fit
        self._loaded_epochs = loaded_epochs

    def start_epoch(self, epoch: int) -> None:
        """Seed the training of ``epoch``, independently of what was drawn before it."""
        self.loaders.start_epoch("train", epoch)
        seed_all(self._seed("train", epoch))

    def start_evaluation(self) -> None:
        """Keep the RNG state of training and seed the evaluation."""
        self._training_rng = capture_rng()
        if self.stage == "fit":
            # The epoch of an evaluation is the number of batches trained, which two validations may
            # share.
            self.loaders.restart(self.evaluated)
            self.loaders.start_epoch(self.evaluated, self.evaluation)
        seed_all(self._seed(self.evaluated, self.evaluation))

    def capture_rng(self) -> RngState:
        """Return the RNG state of training, also during an evaluation."""
        return self._training_rng or capture_rng()

    def end_evaluation(self) -> None:
        """Restore the RNG state of training, as if there had been no evaluation."""
        self._evaluations += 1
        if self.stage != "fit":
            self.loaders.start_epoch(self.evaluated, self.evaluation)
        if self._training_rng is not None:
            restore_rng(self._training_rng)
            self._training_rng = None

    @property
    def evaluation(self) -> int:
        """The number that seeds an evaluation.

        Within a fit it is the number of batches trained so far, which does not depend on a sanity
        check before it, nor on whether the run was resumed in between.
        """
        if self.stage != "fit":
            return self._evaluations
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    def _seed(self, purpose: str, epoch: int) -> int:
        return derive_seed(self.settings.seed, purpose, fit=self.fit, rank=self._rank, epoch=epoch)

    @contextmanager
    def validation_isolated(self) -> Iterator[None]:
        """Give the whole validation of a fit its own random stream."""
        # Around the loop, and not in hooks: Lightning makes the iterators, which may draw, before
        # `on_validation_start`, and hooks of the module and of other callbacks may draw after our
        # `on_validation_end`.
        self.start_evaluation()
        try:
            yield
        finally:
            self.end_evaluation()
            # As without a validation, which gathers the shards of modules.
            reshard(self._trainer.lightning_module)

    @contextmanager
    def _loader_hook_seeded(self, stage: str) -> Iterator[None]:
        """Give all ranks the same seed, so that they divide the same data."""
        trainer, epoch = self._trainer, 0  # the epoch for which loaders are loaded once
        counts, loaded = trainer.fit_loop.epoch_progress.current, self._loaded_epochs.get(stage)
        if every := trainer.reload_dataloaders_every_n_epochs:
            # Not `current_epoch`: in a run that resumes between epochs it is the epoch before.
            epoch = int(counts.processed if stage == "train" else trainer.current_epoch)
            epoch = epoch if loaded is None or epoch - loaded >= every else loaded
        # With overfit_batches Lightning shows training and validation the same batches.
        alike = trainer.overfit_batches > 0
        # Loading data within a fit, such as every n epochs, must not change what the training draws
        # next.
        with rng_restored():
            purpose = f"{'train' if alike else stage} dataloader"
            seed_all(derive_seed(self.settings.seed, purpose, fit=self.fit, epoch=epoch))
            # The hook may read `current_epoch`, which is another one when a resumed fit loads data.
            completed = counts.completed
            if every:
                counts.completed = epoch
            elif loaded is not None:
                counts.completed = loaded
            try:
                yield
            finally:
                counts.completed = completed

    def _process_dataloader(
        self, process: Callable[[object], object], dataloader: object
    ) -> object:
        """Control each loader after Lightning has set its sampler and before it is iterated."""
        # Lightning's stage -> ours. Batches of the sanity check are validation batches.
        stage = str(self._trainer.state.stage.value).replace("sanity_check", "validate")
        controlled = self.loaders.wrap_loader(process(dataloader), stage)
        if stage != "train":
            self.loaders.start_epoch(stage, self.evaluation)
            return controlled
        self._resume_loader(controlled)
        # Not `current_epoch`: in a run that resumes between epochs it is the epoch before. The
        # count is still 0 if `estimated_stepping_batches` loads the data.
        counts = self._trainer.fit_loop.epoch_progress.current
        epoch = max(self.resumed_epoch, counts.processed)
        self.loaders.start_epoch(stage, epoch)
        # In the first epoch Lightning fetches a batch of an iterable dataset before the epoch is
        # seeded; without this, all ranks would draw the same numbers for it.
        seed_all(self._seed("first batch", epoch))
        return controlled


def select_given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the callback that are ``Settings``; None means not given.

    Raises:
        SettingError: If a value is not allowed.
    """
    values = {name: arguments.get(name) for name in Settings.__dataclass_fields__}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    for name in ("unpatched_ops", "varying_ops"):
        if names := given.get(name):
            given[name] = read_names(name, names)
    replace(Settings(), **given)
    return given


def resolve_settings(given: Mapping[str, Any], threads: int | None = None) -> Settings:
    """Return the settings of a run that begins now.

    A setting that was not given is that of the active session, whose switches stay on during the
    run and therefore belong in the ledger. ``threads`` is their number if it is neither given nor
    inherited.

    Raises:
        SettingError: If ``PL_GLOBAL_SEED`` is not a seed, or the active session has a switch on
            that this run must not have.
    """
    session = active_session()
    inherited = Settings() if session is None else session.settings
    for name, is_on, effect in (
        ("patch_ops", session and inherited.patch_ops, "has patched the operations already"),
        ("portable", is_portable(), "computes portable bits"),
    ):
        if is_on and given.get(name) is False:
            raise SettingError(
                f"{name} is False, but the active session of lightning_d9m.enable() {effect}. "
                f"Leave {name} out here, or call enable({name}=False)."
            )
    if inherited.threads is None:
        inherited = replace(inherited, threads=threads)
    return replace(inherited, **{**given, "seed": resolve_seed(given.get("seed"))})


def resolve_seed(seed: int | None) -> int:
    """Return the seed to use: the one given, the active session's, ``PL_GLOBAL_SEED``'s, or 0.

    Raises:
        SettingError: If ``PL_GLOBAL_SEED`` is not a seed.
    """
    if seed is not None:
        return seed
    session = active_session()
    if session is not None and not session.seed_is_default:
        return session.settings.seed
    text = os.environ.get("PL_GLOBAL_SEED") or "0"
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= HIGHEST_SEED:
        raise SettingError(
            f"The variable PL_GLOBAL_SEED is {text!r}, which is not a seed. Set it to a whole "
            f"number from 0 to {HIGHEST_SEED}, or pass DeterminismCallback(seed=...)."
        )
    return value
