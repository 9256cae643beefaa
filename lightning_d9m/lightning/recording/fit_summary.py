"""The summary of a fit: one line when it ends, and what the callback shows of itself."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_d9m.lightning.packages import rank_zero
from lightning_d9m.text import cut_digests, escape, pluralize

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LONGEST = 4096


@dataclass
class FitSummary:
    """The last fit in a few words.

    The digest is that of the weights in the last record; the number of epochs that of those
    recorded.
    """

    ledger: str | None = None
    digest: str | None = None
    epochs: int = 0

    def add(self, moment: str, digest: str) -> None:
        """Note a record."""
        self.digest = digest
        self.epochs += moment == "epoch"

    def log(self, trainer: "Trainer", fit: int, seed: int) -> None:
        """Log one line on rank 0."""
        if self.ledger is None or self.digest is None:
            return
        if trainer.is_global_zero:
            folder = os.path.relpath(self.ledger)
            folder = self.ledger if folder.startswith("..") else folder
            rank_zero().rank_zero_info(
                f"d9m: {pluralize(self.epochs, 'epoch')} recorded, weights "
                f"{cut_digests([self.digest])[0]}, ledger {escape(folder, _LONGEST)}"
                + (_describe_second_fit(seed) if fit == 1 else "")
            )


def _describe_second_fit(seed: int) -> str:
    """Return what a program may not expect that seeds again before its second fit."""
    return (
        ". This second fit drew other numbers than the first, even after seed_everything(); to "
        f"repeat a fit, train within `with lightning_d9m.deterministic(seed={seed}):`."
    )
