"""A Trainer's run under control: session, seeds by epoch, loaders, and validation set apart."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning_d9m.control.attribute_patches import AttributePatches
from lightning_d9m.control.loaders import LoaderControl
from lightning_d9m.control.method_wrapping import wrap_method
from lightning_d9m.control.seeding import (
    RngState,
    capture_rng,
    derive_seed,
    restore_rng,
    rng_restored,
    seed_all,
)
from lightning_d9m.control.session import deterministic, next_fit
from lightning_d9m.control.settings import Settings
from lightning_d9m.lightning.checkpoint_io import loads_checked
from lightning_d9m.lightning.lightning_private import fit_data_sources

# Lightning's stage -> ours: sanity-check batches are validation batches.
_STAGES = {"sanity_check": "validate"}


class TrainerSession:
    """Everything that is switched, seeded and wrapped from ``setup`` to ``teardown``.

    Args:
        trainer: The Trainer whose run begins.
        settings: What to switch; its seed is the base of all others.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

    Raises:
        SettingError: When the Trainer asks for the opposite.
        TooLateError: When a switch can no longer take effect.
    """

    def __init__(self, trainer: Any, settings: Settings, stage: str) -> None:
        self.settings = settings
        self.stage = stage
        self.fit = next_fit() if stage == "fit" else 0
        self._trainer = trainer
        self._rank = _data_rank(trainer)
        self._evaluations = 0
        self._training_rng: RngState | None = None
        self._loaded_epochs: Mapping[str, int | None] = {}
        self._place_loaders: Callable[[object], None] = _do_nothing
        with ExitStack() as stack:
            self._session = stack.enter_context(deterministic(settings))
            self._loaders = LoaderControl(
                settings.seed,
                fit=self.fit,
                rank=self._rank,
                per_sample_rng=settings.per_sample_rng,
            )
            stack.callback(self._loaders.release)
            stack.enter_context(loads_checked(trainer.strategy))
            replacements = AttributePatches()
            stack.callback(replacements.undo)
            self._wrap_process_dataloader(replacements)
            if stage == "fit":
                self._seed_loader_hooks(stack)
                self._set_validation_apart(replacements)
            # The same on every rank, so that weights made in `configure_model` agree.
            seed_all(derive_seed(settings.seed, "setup", fit=self.fit))
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Undo everything, in reverse."""
        self._stack.close()

    def resume(
        self, resumed: AbstractContextManager[object], place: Callable[[object], None]
    ) -> None:
        """Let a fit be resumed.

        Args:
            resumed: What is wrapped for it, until the run is closed.
            place: Called with each loader of the training before it is started.
        """
        self._place_loaders = place
        self._stack.enter_context(resumed)

    def resume_fit(self, fit: int, loaded_epochs: Mapping[str, int | None]) -> None:
        """Draw what another process's fit would have drawn.

        Args:
            fit: Its ordinal.
            loaded_epochs: The epoch for which it loaded the loaders of a stage, by stage.
        """
        self.fit = fit
        self._loaders.resume(fit)
        self._loaded_epochs = loaded_epochs

    def resume_loaders(
        self,
        epoch: int,
        batches: int,
        cycled: Callable[[], bool],
        samplers: Mapping[str, Any],
    ) -> None:
        """Let the loaders of the training go on within an epoch, after some batches of it."""
        self._loaders.resume_epoch(
            "train", epoch, batches=batches, cycled=cycled, samplers=samplers
        )

    def capture_samplers(self, *, within: bool) -> dict[str, Any]:
        """Return the generators of the user's samplers, for ``resume_loaders``."""
        return self._loaders.capture_samplers("train", within=within)

    def verify(self) -> None:
        """Raise if somebody has switched off since what was switched on."""
        self._session.verify()

    def start_epoch(self, epoch: int) -> None:
        """Seed what training draws in ``epoch``, whatever was drawn before it."""
        self._loaders.start_epoch("train", epoch)
        seed_all(self._seed("train", epoch))

    def restart_epoch(self, epoch: int) -> None:
        """Let the loaders of training start their epoch anew, before they are iterated again."""
        self._loaders.restart_epoch("train", epoch)

    def start_evaluation(self, stage: str) -> None:
        """Set aside the RNG of training and seed that of an evaluation."""
        self._training_rng = capture_rng()
        if self.stage == "fit":
            self._loaders.restart(stage)
            self._loaders.start_epoch(stage, self._evaluation)
        seed_all(self._seed(stage, self._evaluation))

    def capture_rng(self) -> RngState:
        """Return the generators of training, also while an evaluation has set them aside."""
        return self._training_rng or capture_rng()

    def end_evaluation(self, stage: str) -> None:
        """Give training its RNG back, as if there had been no evaluation."""
        self._evaluations += 1
        if self.stage != "fit":
            self._loaders.start_epoch(stage, self._evaluation)
        if self._training_rng is not None:
            restore_rng(self._training_rng)
            self._training_rng = None

    @property
    def _evaluation(self) -> int:
        """What tells one evaluation from another.

        Within a fit it is the number of batches that were trained: the same with and without a
        sanity check before, and in a run that was resumed in between.
        """
        if self.stage != "fit":
            return self._evaluations
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    def _seed(self, purpose: str, epoch: int) -> int:
        return derive_seed(self.settings.seed, purpose, fit=self.fit, rank=self._rank, epoch=epoch)

    def _set_validation_apart(self, replacements: AttributePatches) -> None:
        """Let the validation of a fit draw from a stream of its own, from first to last.

        Lightning makes its iterators, which may draw, before ``on_validation_start``, and the hooks
        of the module and of other callbacks may draw after our ``on_validation_end``.
        """
        loop = self._trainer.fit_loop.epoch_loop.val_loop
        original: Callable[[], object] = loop.run

        def run() -> object:
            self.start_evaluation("validate")
            try:
                return original()
            finally:
                self.end_evaluation("validate")

        replacements.replace(loop, "run", run)

    def _seed_loader_hooks(self, stack: ExitStack) -> None:
        """Seed ``train_dataloader`` and ``val_dataloader`` alike, whenever Lightning calls them.

        All ranks get the same seed, so that they divide the same data.
        """
        sources = fit_data_sources(self._trainer)
        for stage, source in sources.items():
            wrap_method(stack, source, "dataloader", partial(self._loader_hook_seeded, stage))

    @contextmanager
    def _loader_hook_seeded(self, stage: str) -> Iterator[None]:
        epoch = self._loader_epoch(stage)
        with rng_restored():
            purpose = f"{stage} dataloader"
            seed_all(derive_seed(self.settings.seed, purpose, fit=self.fit, epoch=epoch))
            yield

    def _loader_epoch(self, stage: str) -> int:
        """Return the epoch for which loaders are loaded; 0 if they are loaded once."""
        trainer = self._trainer
        every = trainer.reload_dataloaders_every_n_epochs
        if not every:
            return 0
        # Not `current_epoch`: of a run that is resumed between epochs it is the one before.
        train = stage == "train"
        epoch = (
            trainer.fit_loop.epoch_progress.current.processed if train else trainer.current_epoch
        )
        loaded = self._loaded_epochs.get(stage)
        return int(epoch) if loaded is None or epoch - loaded >= every else loaded

    def _wrap_process_dataloader(self, replacements: AttributePatches) -> None:
        """Take each loader over after Lightning has put its sampler in, before it is iterated."""
        strategy = self._trainer.strategy
        original: Callable[[object], object] = strategy.process_dataloader

        def process_dataloader(loader: object) -> object:
            processed = original(loader)
            name = self._trainer.state.stage.value
            stage = _STAGES.get(name, name)
            taken = self._loaders.wrap_loader(processed, stage)
            if stage != "train":
                self._loaders.start_epoch(stage, self._evaluation)
                return taken
            self._place_loaders(taken)
            # Not `current_epoch`: of a run that is resumed between epochs it is the one before.
            epoch = self._trainer.fit_loop.epoch_progress.current.processed
            self._loaders.start_epoch(stage, epoch)
            # In the first epoch Lightning fetches a batch of an iterable dataset before the epoch
            # is seeded; without this all ranks would draw alike for it.
            seed_all(self._seed("first batch", epoch))
            return taken

        replacements.replace(strategy, "process_dataloader", process_dataloader)


def _do_nothing(loader: object) -> None:
    """Stand for what only a resumed fit does."""


def _data_rank(trainer: Any) -> int:
    """Return the rank among those that see different data (tensor-parallel peers share one)."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(kwargs.get("rank", 0))
