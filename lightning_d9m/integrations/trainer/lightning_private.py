# ruff: noqa: SLF001 - the one file that touches underscored names of Lightning
"""Access to private attributes of Lightning; no other file of this package touches them.

Where Lightning has a similar public name, the docstring says why it does not serve. Lightning 2.2
is the oldest version; `dev.py test-oldest-lightning` trains and resumes with it.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from lightning_d9m.attribute_patches import AttributePatches, replace_method
from lightning_d9m.integrations.trainer.trainer_attributes import Trainer

# The method of a fit loop that loads the states of the training loaders from a checkpoint. No hook
# runs between the setup of these loaders and this call.
LOAD_LOADER_STATES = "_load_combined_loader_states"

# The method of a LightningModule that calls its hook `on_before_batch_transfer`.
BEFORE_BATCH_TRANSFER = "_on_before_batch_transfer"

# The method of a training epoch loop that sends whether rank 0 got SIGTERM, before each batch, if
# torch's default process group is there. Lightning 2.6 has it.
BROADCAST_SIGTERM = "_broadcast_sigterm_tensor"


def list_loaders(loop: Any) -> list[Any]:
    """Return the DataLoaders of a fit, evaluation or prediction loop; empty before their setup.

    ``Trainer.train_dataloader`` returns the user's nested collection; it has no flat list.
    """
    combined = loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def fit_data_sources(trainer: Trainer) -> dict[str, Any]:
    """Return the objects whose ``dataloader()`` gives a fit's loaders, by stage.

    Replacing ``train_dataloader`` of a module itself would hide that the module overrides it.
    """
    fit = trainer.fit_loop
    return {"train": fit._data_source, "validate": fit.epoch_loop.val_loop._data_source}


def resume_next_fit(trainer: Trainer, path: Path) -> None:
    """Let the fit that is being set up resume from a checkpoint.

    By the time that a callback runs, ``fit(ckpt_path=...)`` has been called without one.
    """
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(_: object = None, **options: Any) -> None:
        # For one call: a second fit of the Trainer must not resume.
        del connector.resume_start
        original(path, **options)

    connector.resume_start = resume_start


def wrap_resume_start(
    trainer: Trainer,
    around: Callable[[Any, Callable[[], Mapping[str, Any]]], None],
    stack: ExitStack,
) -> None:
    """Call a function instead of the load of a checkpoint, until ``stack`` is closed.

    It gets the path, None if the run starts from the beginning, and a function that loads the
    checkpoint and returns it; empty without one.
    """
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(*args: Any, **words: Any) -> None:
        def load() -> Mapping[str, Any]:
            original(*args, **words)
            return connector._loaded_checkpoint if connector._ckpt_path else {}

        around(args[0] if args else words.get("checkpoint_path"), load)

    replace_method(stack, connector, "resume_start", resume_start)


def get_checkpoint_connector(trainer: Trainer) -> Any:
    """Return the object whose ``dump_checkpoint`` collects what a checkpoint holds."""
    return trainer._checkpoint_connector


def can_stop_early(trainer: Trainer) -> bool:
    """Return whether ``Trainer.should_stop`` ends the fit: its least epochs and steps are done."""
    return bool(trainer.fit_loop._can_stop_early)


def wrap_launches(package: str, around: Callable[..., Any], patches: AttributePatches) -> None:
    """Call a function instead of each launch that forks or spawns processes.

    A second call for a package does nothing.

    Args:
        package: The Lightning package.
        around: Called with the Trainer, the method of it that the processes call, and a function
            that starts processes that call its argument instead.
        patches: Restores the launcher.
    """
    launcher = import_module(f"{package}.strategies.launchers")._MultiProcessingLauncher
    original = launcher.launch
    # Every callback calls this, and its process would otherwise launch through several wrappers.
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def launch(self: Any, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        def start(called: Any) -> Any:
            return original(self, called, *args, trainer=trainer, **kwargs)

        # Lightning allows a launch without a Trainer, which has no callbacks.
        return start(function) if trainer is None else around(trainer, function, start)

    patches.replace(launcher, "launch", launch)


def has_loaders(loop: Any) -> bool:
    """Return whether a loop has set up its DataLoaders; the list of them may be empty."""
    return loop._combined_loader is not None


def cycles_shorter_loaders(trainer: Trainer) -> bool:
    """Return whether a fit starts its shorter loaders again until the longest one ends.

    ``Trainer.train_dataloader`` returns the user's collection without its mode.
    """
    combined = trainer.fit_loop._combined_loader
    return combined is not None and combined._mode == "max_size_cycle"


def list_pending_loader_states(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the states of the checkpoint that the training loaders have not yet loaded."""
    return list(trainer.fit_loop._combined_loader_states_to_load)


def set_pending_loader_states(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    """Replace the states that ``list_pending_loader_states`` returns."""
    trainer.fit_loop._combined_loader_states_to_load = states


def load_loader_states(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    """Load states into the training loaders; Lightning loads them only once, in its setup."""
    trainer.fit_loop._combined_loader._load_state_dicts(states)


def create_loader_iterator(trainer: Trainer) -> None:
    """Create the iterator over the training loaders again, as Lightning does for each epoch."""
    iter(trainer.fit_loop._data_fetcher)


def get_reload_epoch(trainer: Trainer, stage: Literal["train", "validate"]) -> int | None:
    """Return the epoch in which the loaders of a stage were last loaded; None before that.

    ``Trainer.reload_dataloaders_every_n_epochs`` gives only the interval.
    """
    fit = trainer.fit_loop
    train, validate = fit._last_train_dl_reload_epoch, fit.epoch_loop.val_loop
    epoch = train if stage == "train" else validate._last_val_dl_reload_epoch
    return None if epoch == float("-inf") else int(epoch)


def set_reload_epoch(trainer: Trainer, stage: Literal["train", "validate"], epoch: float) -> None:
    """Set the epoch that ``get_reload_epoch`` returns."""
    fit = trainer.fit_loop
    if stage == "train":
        fit._last_train_dl_reload_epoch = epoch
    else:
        fit.epoch_loop.val_loop._last_val_dl_reload_epoch = epoch


def has_loaded_progress(trainer: Trainer) -> bool:
    """Return whether the fit has loaded a checkpoint and has not trained an epoch since.

    ``restarting`` is false for a checkpoint that was saved at the end of an epoch.
    """
    loop = trainer.fit_loop
    epochs = loop.epoch_progress.current
    pending = loop.restarting or epochs.completed < epochs.processed  # before Lightning 2.5
    return bool(getattr(loop, "_loaded_from_state_dict", pending))


def clear_restart(loop: Any) -> None:
    """Mark one loop as not restarting; the setter of ``restarting`` also changes its children."""
    loop._restarting = False


def completes_batch(loop: Any) -> bool:
    """Return whether Lightning completes the last batch itself, if it was saved in a hook after it.

    Before 2.5 it trains that batch again, and runs a validation after it again.
    """
    return hasattr(loop, "restarted_on_train_batch_end")


def is_validation_due(trainer: Trainer) -> bool:
    """Return whether a validation follows the current batch of the fit."""
    fit = trainer.fit_loop
    fetcher: Any = fit._data_fetcher
    return bool(fit.epoch_loop._should_check_val_fx(fetcher))


def accumulates_gradients(trainer: Trainer) -> bool:
    """Return whether later batches add to the gradients before the optimizer steps."""
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


def is_search(trainer: Trainer) -> bool:
    """Return whether a fit only searches for a learning rate or a batch size, for a ``Tuner``."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)


def skips_backward(trainer: Trainer) -> bool:
    """Return whether the fit runs training steps without backward passes and optimizer steps.

    ``StochasticWeightAveraging`` has it do so for the statistics of batch normalization.
    """
    return bool(trainer.fit_loop._skip_backward)


def count_step_batch(trainer: Trainer) -> None:
    """Count one more batch after which the optimizer stepped; loggers use it as their step."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1


def update_callback_metrics(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Update the metrics for callbacks.

    Reading ``Trainer.callback_metrics`` would compute the results of the current loop.
    """
    trainer._logger_connector._callback_metrics.update(metrics)


def keep_results_at_next_batch(trainer: Trainer) -> None:
    """Prevent the next batch, the first of the loop, from resetting the logged results."""
    trainer._logger_connector._first_loop_iter = False


def create_result(
    trainer: Trainer,
    meta: Mapping[str, Any],
    *,
    is_tensor: bool,
    synced: bool,
    rank_zero_only: bool,
) -> Any:
    """Create an empty logged result; ``LightningModule.log`` creates one only in a hook.

    ``meta`` has the arguments with which a tensor or else a metric object was logged. If
    ``synced``, the ranks reduce the result.
    """
    # The module of the package that the Trainer is from.
    module = sys.modules[type(trainer.fit_loop.epoch_loop._results).__module__]
    metadata = module._Metadata(**meta)
    metadata.sync = module._Sync(
        _should=synced, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only
    )
    return module._ResultMetric(metadata, is_tensor=is_tensor)


def is_compiled(model: object) -> bool:
    """Return whether a LightningModule is the content of one that ``torch.compile`` returned.

    The Trainer unwraps that one, and compiles the steps of its content.
    """
    return getattr(model, "_compiler_ctx", None) is not None


def replace_batch_sampler(batch_sampler: Any, make: Callable[[Any], Any]) -> Any:
    """Return ``make(batch_sampler)``, within a copy of Lightning's wrapper if it has one.

    Lightning's prediction loop reads the indices of each batch from the wrapper.
    """
    inner = getattr(batch_sampler, "_batch_sampler", None)
    if inner is None:
        return make(batch_sampler)
    duplicate = copy.copy(batch_sampler)
    duplicate._batch_sampler = make(inner)
    return duplicate


def set_logged_batch(trainer: Trainer, batch: Any) -> None:
    """Set the batch whose size ``self.log`` takes for its mean."""
    results: Any = trainer._results
    if results is not None:
        results.batch = batch
        # Lightning computes the size once for each batch and keeps it here.
        results.batch_size = None


def list_result_collections(trainer: Trainer) -> list[Any]:
    """Return the logged results by key of the loops of training, its validation, and others."""
    fit: Any = trainer.fit_loop.epoch_loop
    loops: list[Any] = [fit, fit.val_loop, trainer.validate_loop, trainer.test_loop]
    return [loop._results for loop in loops]


def get_current_results(trainer: Trainer) -> Any:
    """Return the collection of logged results of the loop that runs now, or None."""
    return trainer._results


def get_logger_connector(trainer: Trainer) -> Any:
    """Return the object whose ``on_batch_end`` and ``epoch_end_reached`` read logged results."""
    return trainer._logger_connector


def find_fabric_loader(loader: Any) -> Any:
    """Return the DataLoader in what ``Fabric.setup_dataloaders`` returned.

    The wrapper has copies of its attributes, so a replaced attribute of it has no effect.
    """
    return loader._dataloader


def set_fabric_epoch(loader: Any, epoch: int) -> None:
    """Let the next iteration of a loader of Fabric tell its samplers this epoch.

    Fabric counts iterations, which in a resumed run begin at 0 again.
    """
    loader._num_iter_calls = epoch
