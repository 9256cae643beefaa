"""What a Trainer's fit says about itself: read off the Trainer, handed to the recorder."""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_d9m import __version__
from lightning_d9m.control.settings import Settings
from lightning_d9m.errors import LedgerError
from lightning_d9m.evidence.ledger import create_ledger_folder
from lightning_d9m.evidence.recorder import Policy, Recorder
from lightning_d9m.evidence.records import Digests, End, Header, LoaderFacts, RunFacts
from lightning_d9m.evidence.snapshot import describe_model, replicated_names, take_snapshot
from lightning_d9m.evidence.stack import capture_stack

LEDGER_VARIABLE = "LIGHTNING_D9M_LEDGER_DIR"

# Under these each rank holds a part of every parameter, so that no two are to be equal.
_SHARDING = ("FSDPStrategy", "DeepSpeedStrategy")


class Testimony:
    """The evidence of one Trainer's fits, one after the other.

    Args:
        policy: What the fits are held against, and what a difference means.
        ledger_dir: Folder for ledgers; None takes ``d9m`` under the log directory.
    """

    def __init__(self, policy: Policy, ledger_dir: Path | None) -> None:
        self._policy = policy
        self._ledger_dir = ledger_dir
        self._recorder: Recorder | None = None
        self._loss: torch.Tensor | None = None
        self._epoch = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_recorder": None, "_loss": None}

    def check_reference(self) -> None:
        """Raise now, rather than after the set-up, if the reference cannot be read."""
        self._policy.check_reference()

    def begin(self, trainer: Any, module: Any, settings: Settings, fit: int) -> None:
        """Open the ledger of a fit and record the state that training starts from."""
        self._loss = None
        self._epoch = trainer.current_epoch
        header = Header(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            fit=fit,
            seed=settings.seed,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            settings=settings.as_record(),
            stack=capture_stack(_layout(trainer)),
            package=__version__,
        )
        self._recorder = Recorder(
            self._make_folder(trainer),
            header,
            policy=self._policy,
            gather=_gather_of(trainer),
            replicated=_replicated(trainer, module),
        )
        self._recorder.begin(_facts_of(trainer, module))
        self.record(trainer, module, "initial")

    def keep_loss(self, outputs: object) -> None:
        """Keep the loss of a step as it is, on its device."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._loss = loss.detach()

    def record(
        self, trainer: Any, module: Any, moment: Literal["initial", "epoch", "final"]
    ) -> None:
        """Record one moment, and hold it against the reference and the other ranks.

        Raises:
            DriftError: When it disagrees with one of them, unless that is to be a warning.
            LedgerError: When the ledger cannot be written.
        """
        if self._recorder is None:  # no batch was trained
            return
        if moment == "epoch":
            self._epoch = trainer.current_epoch
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        snapshot = take_snapshot(module, trainer.optimizers, schedulers)
        metrics = {} if moment == "initial" else trainer.callback_metrics
        # A metric may be a vector; what training depends on is digested above.
        scalars = {name: value for name, value in metrics.items() if torch.numel(value) == 1}
        differing = self._recorder.record(
            Digests(
                moment=moment,
                epoch=self._epoch,
                step=trainer.global_step,
                totals=snapshot.totals,
                groups=snapshot.groups,
                loss=None if self._loss is None else float(self._loss).hex(),
                scalars={name: float(value).hex() for name, value in sorted(scalars.items())},
            )
        )
        if self._recorder.compares and moment != "final":  # the loggers are closed by then
            for logger in trainer.loggers:
                logger.log_metrics({"d9m/drift": float(differing)}, step=trainer.global_step)

    def end(self, status: Literal["finished", "failed"], error: str | None = None) -> None:
        """Close the ledger of the fit, if one is open."""
        recorder, self._recorder = self._recorder, None
        self._loss = None
        if recorder is not None:
            recorder.end(End(status=status, error=error))

    def _make_folder(self, trainer: Any) -> Path:
        """Make the fit's folder on rank 0 and tell the other ranks its name."""
        # A collective: every rank asks. Some loggers have no folder of their own.
        log_dir = trainer.log_dir or trainer.default_root_dir
        chosen = os.environ.get(LEDGER_VARIABLE) or self._ledger_dir or Path(log_dir, "d9m")
        made: tuple[str, str | None] = ("", None)
        if trainer.is_global_zero:
            try:
                made = (str(create_ledger_folder(Path(chosen))), None)
            except LedgerError as error:
                made = ("", str(error))
        folder, problem = trainer.strategy.broadcast(made)
        if problem is not None:  # on all ranks together, so that none waits for the others
            raise LedgerError(problem)
        # Several nodes need not share a file system: each keeps the ledgers of its own ranks.
        with suppress(OSError):  # the file in it cannot be made either, and says why
            Path(folder).mkdir(parents=True, exist_ok=True)
        return Path(folder)


def _layout(trainer: Any) -> dict[str, str | int | bool | None]:
    return {
        "world.size": trainer.world_size,
        "world.nodes": trainer.num_nodes,
        "world.devices_per_node": trainer.num_devices,
        "world.strategy": type(trainer.strategy).__name__,
        "world.accelerator": type(trainer.accelerator).__name__,
    }


def _facts_of(trainer: Any, module: Any) -> RunFacts:
    model, parameters = describe_model(module)
    loaders = trainer.fit_loop._combined_loader.flattened  # noqa: SLF001 - no public way to them
    return RunFacts(
        model=model,
        parameters=parameters,
        train=[_facts_of_loader(loader) for loader in loaders],
        trainer={
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": str(trainer.gradient_clip_val),
            "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm or "norm"),
        },
    )


def _facts_of_loader(loader: object) -> LoaderFacts:
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:  # a batch sampler of the user's, or no automatic batching
        batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return LoaderFacts(
        samples=_length(getattr(loader, "dataset", None)),
        batch_size=batch_size if isinstance(batch_size, int) else None,
        batches=_length(loader),
    )


def _length(sized: object) -> int | None:
    """Return a length, or None for what has none: an iterable dataset, say."""
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _gather_of(trainer: Any) -> Any:
    """Return a function that gathers whole numbers from all ranks; None where there is one rank."""
    if trainer.world_size == 1:
        return None

    def gather(numbers: Sequence[int]) -> list[list[int]]:
        local = torch.tensor(numbers, dtype=torch.int64, device=trainer.strategy.root_device)
        gathered = trainer.strategy.all_gather(local)
        rows: list[list[int]] = gathered.reshape(trainer.world_size, -1).tolist()
        return rows

    return gather


def _replicated(trainer: Any, module: Any) -> list[str]:
    if any(base.__name__ in _SHARDING for base in type(trainer.strategy).__mro__):
        return []
    return replicated_names(module)
