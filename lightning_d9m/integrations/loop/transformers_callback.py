"""The recorder as a callback of Hugging Face's ``Trainer``.

The Trainer iterates its loader, and saves and restores generators and position itself.
"""

import functools
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.engine.control.settings import read_names
from lightning_d9m.engine.recording.interruption import INTERRUPT, RESUME, find_checkpoint
from lightning_d9m.engine.recording.run import OptionArguments
from lightning_d9m.errors import CheckpointError, SettingError
from lightning_d9m.integrations.loop.recorder import Recorder, find_ranks, find_session


def prepare_first_training(callback: "TransformersCallback") -> None:
    """Let the first training in this process resume, if a variable names a checkpoint."""
    if find_checkpoint() is None and not os.environ.get(INTERRUPT):
        return
    from transformers import Trainer

    # The Trainer asks no callback from where it resumes, and does not show itself to callbacks, so
    # its method is replaced until a Trainer with this callback calls it.
    original = Trainer.train

    @functools.wraps(original)
    def train(
        self: Trainer, resume_from_checkpoint: str | bool | None = None, *rest: Any, **more: Any
    ) -> Any:
        if callback in self.callback_handler.callbacks:
            Trainer.train = original
            callback.trainer, path = self, find_checkpoint()
            resume_from_checkpoint = resume_from_checkpoint if path is None else str(path)
        return original(self, resume_from_checkpoint, *rest, **more)

    Trainer.train = train


if TYPE_CHECKING:
    from transformers import TrainerCallback
    from typing_extensions import Unpack
else:
    try:
        from transformers import TrainerCallback
    except ImportError:
        TrainerCallback = None

# Logged numbers that are measured times or follow from them; and means of the loss since the last
# log or the start of the process, which a resumed run begins later.
_NOT_RECORDED = ("*_runtime", "*_per_second", "total_flos", "loss", "train_loss")


class TransformersCallback(TrainerCallback or object):  # type: ignore[misc]
    """Writes and checks the ledger of a ``transformers.Trainer``'s trainings.

    Build model and Trainer, and train, within a deterministic session. Each call of ``train``
    writes a ledger with a record for each epoch; the loss that the model returns and the numbers
    that the Trainer logs are recorded, and compared, too. A checkpoint of the Trainer gets a small
    file for each rank, with which a training that resumes from it continues the ledger.

    Args:
        ledger_dir: Folder in which each training makes a new folder ``fit-NNN``; None takes ``d9m``
            in the Trainer's ``output_dir``. The variable ``LIGHTNING_D9M_LEDGER_DIR`` takes
            precedence.
        resumed_from: The checkpoint that ``train(resume_from_checkpoint=...)`` gets; None takes
            ``checkpoint-STEP`` in the Trainer's ``output_dir``.
        ignored_metrics: Names, or patterns such as ``"time/*"``, of logged numbers that are not
            recorded. Measured times and means of the loss never are.
        **options: ``reference``, ``on_drift``, ``on_stack_difference``, ``probes``,
            ``probe_modules`` and ``probe_steps``, as of ``DeterminismCallback``. A batch is what
            the model is given.

    Raises:
        SettingError: If transformers is not installed.

    Attributes:
        recorder: The recorder of the last training; None before one.
        trainer: The Trainer, in a training that variables interrupt or resume; else None.
    """

    def __init__(
        self,
        ledger_dir: str | Path | None = None,
        *,
        resumed_from: str | Path | None = None,
        ignored_metrics: Sequence[str] = (),
        **options: "Unpack[OptionArguments]",
    ) -> None:
        if TrainerCallback is None:
            raise SettingError(
                "TransformersCallback is for the Trainer of transformers, which is not installed. "
                'Install it: pip install "lightning-d9m[transformers]".'
            )
        self._ledger_dir = ledger_dir
        self._resumed_from = resumed_from
        self._ignored_metrics = (*_NOT_RECORDED, *read_names("ignored_metrics", ignored_metrics))
        self._options = options
        self.recorder: Recorder | None = None
        self._is_open = False
        # What the session calls; empty after a training, whose model and optimizer it would keep.
        self._closing = ExitStack()
        self._target: Path | None = None  # of the next checkpoint, or of a copy
        self._redirected = AttributePatches()  # of the folder of a checkpoint
        self._loss: Tensor | None = None
        self.trainer: Any = None
        self._model_hooks: list[RemovableHandle] = []
        prepare_first_training(self)

    def __repr__(self) -> str:
        ledger = None if self.ledger is None else str(self.ledger)
        return f"{type(self).__name__}(ledger={ledger!r}, digest={self.digest!r})"

    @property
    def ledger(self) -> Path | None:
        """The folder of the last training's ledger; None before one."""
        return None if self.recorder is None else self.recorder.ledger

    @property
    def digest(self) -> str | None:
        """The digest of the weights in the last record, 32 hex digits; None before one."""
        return None if self.recorder is None else self.recorder.digest

    # The Trainer passes its arguments, its state and its control, and more by name.

    def on_train_begin(self, args: Any, state: Any, _: Any, **kwargs: Any) -> None:
        """Open the ledger and record the state that the training starts from."""
        self._give_up()
        ranks, _ = find_ranks()
        chosen = ranks.raise_on_all(find_checkpoint)
        folder = Path(self._ledger_dir or Path(args.output_dir) / "d9m")
        trained = (kwargs[name] for name in ("model", "optimizer", "lr_scheduler"))
        self.recorder = Recorder(folder, *trained, **self._options)
        self.recorder.is_hosted = True  # the Trainer iterates, saves and resumes itself
        self.recorder.__enter__()
        self._is_open = True
        # transformers has no event for an exception.
        # An error in a training calls no callback, so that the ledger is closed with the session,
        # or by the next training.
        self._closing.callback(self._give_up)
        find_session().call_on_close(self._closing.close)
        self._loss = None
        # The Trainer tells its callbacks only a mean over some steps.
        self._model_hooks = [
            kwargs["model"].register_forward_pre_hook(self._take_batch, with_kwargs=True),
            kwargs["model"].register_forward_hook(self._keep_loss),
        ]
        try:
            saved = ranks.raise_on_all(lambda: self._read_checkpoint(args, state, chosen))
            if saved is not None:
                # Before `begin`, which opens the ledger or continues that of the saved run.
                self.recorder.load_state_dict(saved)
            self.recorder.begin(kwargs.get("train_dataloader"))
        except Exception as error:
            self._close(error)
            raise

    def on_epoch_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Record an epoch that ended just after the checkpoint from which this run resumes."""
        if self._recorder.next_epoch < int(state.epoch or 0):
            self._record_epoch()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Probe the state that the step starts from; let it run in a debugger, if it is the one."""
        recorder = self._recorder
        recorder.start_batch()
        debugger = recorder.interruption.open_debugger(recorder.global_step, self.ledger)
        if debugger is not None:
            debugger.attach(self.trainer, "training_step", recorder.interruption.leave)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        self._recorder.step(self._loss)
        # The last step of an epoch is followed by the evaluation that ends it, which a run that
        # resumes there does not repeat.
        if state.epoch % 1:
            self._reach(args, control, "step", self._recorder.next_epoch)
        # Without a function that saves: the Trainer saves when it has called its callbacks.
        self._recorder.interruption.pass_step(self._recorder.global_step, None)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the epoch; compare it with the reference and across ranks."""
        self._record_epoch()
        self._reach(args, control, "epoch", self._recorder.next_epoch - 1)

    def _reach(self, args: Any, control: Any, kind: str, epoch: int) -> None:
        """Let the Trainer save a checkpoint, if the request names this point."""
        self._redirected.undo()
        self._target = self._recorder.interruption.reach(kind, epoch)
        # The evaluation that follows decides whether a training that keeps the best one saves.
        is_open = control.should_evaluate and args.save_strategy == "best"
        if self._target is not None and not control.should_save and not is_open:
            # To the folder of the request: in the program's own, others would be removed for it,
            # and the program could take it for the best or the last one.
            control.should_save = True
            # The Trainer has no argument for the folder of one checkpoint; it reads this one when
            # it saves.
            self._redirected.replace(args, "output_dir", str(self._target.parent))
        # The earlier run has written a checkpoint of this name.
        if self._recorder.interruption.is_segment:
            control.should_save = False

    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        """Keep the logged numbers for the next record."""
        if not self._is_open or not logs:
            return
        scalars = {
            name: float(value)
            for name, value in logs.items()
            if isinstance(value, int | float)
            and not any(fnmatchcase(name, pattern) for pattern in self._ignored_metrics)
        }
        self._recorder.log(**scalars)

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Add what the ledger of a resumed run needs to the checkpoint."""
        if self._is_open and not args.save_only_model:
            folder = _name_checkpoint(args, state)
            ranks = find_ranks()[0]
            ranks.raise_on_all(lambda: self._save_state(folder, args))
            target, self._target = self._target, None
            is_redirected = target is not None and folder.parent == target.parent
            if not is_redirected:
                self._recorder.note_checkpoint(folder)
            if target is not None:
                place = shutil.move if is_redirected else shutil.copytree
                ranks.raise_on_all(lambda: None if ranks.rank else place(folder, target))
                self._recorder.note_checkpoint(target)
        self._redirected.undo()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Record the final state, and close the ledger."""
        if self._is_open:
            self._close(None)

    @property
    def _recorder(self) -> Recorder:
        assert self.recorder is not None, "the Trainer calls on_train_begin before other events"
        return self.recorder

    def _take_batch(self, model: Module, args: object, kwargs: object) -> None:
        """Probe what the model is given; the Trainer tells its callbacks of no batch."""
        recorder, batch = self._recorder, (args, kwargs)
        if model.training:
            recorder.run.take_data(batch)
            recorder.run.probes.take_batch(batch)
        else:
            recorder.run.probes.start_validation(recorder.next_epoch, recorder.global_step, batch)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Write the probes of a batch of a validation within a training."""
        if self._is_open:
            self._recorder.run.probes.end()

    def _keep_loss(self, model: Module, _: object, outputs: object) -> None:
        """Keep the loss that the model returns, of the last batch of a step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if model.training and isinstance(loss, Tensor) and loss.numel() == 1:
            self._loss = loss.detach()

    def _read_checkpoint(self, args: Any, state: Any, chosen: Path | None) -> Any:
        """Return what this rank saved in the checkpoint that is resumed; None without one."""
        if self._recorder.interruption.is_wanted and args.save_only_model:
            raise SettingError(
                f"The variable {INTERRUPT} asks for a checkpoint from which the training can "
                "resume, and the Trainer saves only the model. Leave out save_only_model=True."
            )
        if chosen is not None and state.global_step == 0:
            raise SettingError(
                f"The variable {RESUME} is '{chosen}', and the Trainer begins at step 0, because "
                "its class overrides train(). Call super().train(resume_from_checkpoint) there."
            )
        if state.global_step == 0:
            return None
        checkpoint = Path(chosen or self._resumed_from or _name_checkpoint(args, state))
        path = _name_state(checkpoint, args)
        if not path.exists():
            raise CheckpointError(
                f"The training resumes from a checkpoint, and {path} does not exist. If the "
                f"checkpoint is not {checkpoint}, name it: TransformersCallback(resumed_from=...). "
                "It must have been saved with this callback, by as many ranks."
            )
        return torch.load(path, weights_only=True)

    def _save_state(self, folder: Path, args: Any) -> None:
        if folder.is_dir():
            torch.save(self._recorder.state_dict(), _name_state(folder, args))

    def _record_epoch(self) -> None:
        try:
            self._recorder.epoch()
        except Exception as error:
            self._close(error)
            raise

    def _give_up(self) -> None:
        """Close the ledger of a training that an error ended, of which no event tells."""
        if self._is_open:
            self._close(RuntimeError("The training was given up."))

    def _close(self, error: Exception | None) -> None:
        self._is_open = False
        self._closing.pop_all()
        self._redirected.undo()
        for hook in self._model_hooks:
            hook.remove()
        self._recorder.__exit__(None if error is None else type(error), error, None)


def _name_checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _name_state(checkpoint: Path, args: Any) -> Path:
    return checkpoint / f"d9m-{args.process_index}.pt"
