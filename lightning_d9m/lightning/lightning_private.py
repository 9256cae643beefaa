# ruff: noqa: SLF001 - the one file that touches underscored names of Lightning
"""Access to private attributes of Lightning; no other file of this package touches them.

Each function says why Lightning's public interface does not serve. The test file of the same name
checks every function against the installed version; Lightning 2.5 is the oldest supported one.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def list_loaders(loop: Any) -> list[Any]:
    """Return the DataLoaders of a fit, evaluation or prediction loop; empty before their setup.

    ``Trainer.train_dataloader`` returns the user's nested collection; it has no flat list.
    """
    combined = loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def fit_data_sources(trainer: "Trainer") -> dict[str, Any]:
    """Return the objects whose ``dataloader()`` gives a fit's loaders, by stage.

    Replacing ``train_dataloader`` of a module itself would hide that the module overrides it.
    """
    fit = trainer.fit_loop
    return {"train": fit._data_source, "validate": fit.epoch_loop.val_loop._data_source}


def resume_next_fit(trainer: "Trainer", path: Path) -> None:
    """Let the fit that is being set up resume from a checkpoint.

    By the time that a callback runs, ``fit(ckpt_path=...)`` has been called without one.
    """
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(_: object = None, **options: Any) -> None:
        del connector.resume_start
        original(path, **options)

    connector.resume_start = resume_start  # type: ignore[assignment] # it takes any arguments
