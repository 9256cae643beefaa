"""A training of ``d9m audit model``: its ledgers, and the distance of its weights from run 1's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.errors import CommandError
from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.ledger.format.records import Digests

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_d9m.comparison.numeric_difference import Variation

CONDITIONS = ("without", "with")


@dataclass
class Fit:
    """One fit of one training.

    Attributes:
        moments: Digests of the end of each epoch, then of the end of the fit.
        equal: Whether the whole ledger equals that of the first run.
        epochs: Distance of all weights from the first run's, for each of ``moments``.
        layers: The same by layer, at the end of the fit.
    """

    moments: list[Digests]
    equal: bool = True
    epochs: "list[Variation]" = field(default_factory=list)
    layers: "dict[str, Variation]" = field(default_factory=dict)

    @property
    def last(self) -> Digests:
        """The digests of the end of the fit."""
        return self.moments[-1]


class Training:
    """One run of the command.

    Args:
        folder: Its ledgers, and its weights until they are measured.
        seconds: Duration of the command.
        ledgers: By name of the fit; its folder may have another name, as after ``pair_fits``.

    Raises:
        CommandError: A fit did not finish.
    """

    def __init__(self, folder: Path, seconds: float, ledgers: Mapping[str, Ledger]) -> None:
        self.folder = folder
        self.seconds = seconds
        self.ledgers = dict(ledgers)
        self.fits = {name: Fit(_moments(ledger)) for name, ledger in ledgers.items()}

    @property
    def seed(self) -> int:
        """The base seed of the first fit."""
        return next(iter(self.ledgers.values())).header.seed

    def measure(self, first: "Training") -> None:
        """Compare ledgers and weights with those of the first run in the condition.

        Raises:
            CommandError: The runs did not fit the same models.
        """
        if list(first.fits) != list(self.fits):
            raise CommandError(
                f"The runs left different numbers of ledgers: {len(first.fits)} in "
                f"{first.folder}, {len(self.fits)} in {self.folder}. Each run must fit the same "
                "models in the same order."
            )
        for name, fit in self.fits.items():
            fit.equal = compare_ledgers(first.ledgers[name], self.ledgers[name]).equal
            known = {(moment.moment, moment.epoch) for moment in first.fits[name].moments}
            for moment in fit.moments:
                if (moment.moment, moment.epoch) in known:
                    self._measure_moment(first, name, moment)

    def _measure_moment(self, first: "Training", name: str, moment: Digests) -> None:
        from lightning_d9m.comparison.numeric_difference import measure_variation

        fit = self.fits[name]
        expected, actual = (run.load(name, moment) for run in (first, self))
        fit.epochs.append(measure_variation(list(expected.values()), list(actual.values())))
        if moment is fit.last:
            layers = sorted({layer.rpartition(".")[0] for layer in expected})
            for layer in layers:
                old, new = (
                    [weights[name] for name in weights if name.rpartition(".")[0] == layer]
                    for weights in (expected, actual)
                )
                fit.layers[layer or "(top)"] = measure_variation(old, new)

    def load(self, name: str, moment: Digests) -> "dict[str, Tensor]":
        """Load the weights of one moment.

        Raises:
            CommandError: They were not saved.
        """
        from lightning_d9m.lightning.recording.weight_snapshots import (
            load_weight_snapshot,
            weight_snapshot_path,
        )

        written_as = self.ledgers[name].path.name
        path = weight_snapshot_path(
            self.folder / "weights", written_as, moment.moment, moment.epoch
        )
        if not path.exists():
            raise CommandError(
                f"The run left no weights in {path}: its lightning_d9m is an older version. "
                "Install this version in the environment of the command."
            )
        return load_weight_snapshot(path)


def _moments(ledger: Ledger) -> list[Digests]:
    records = ledger.list_ends()
    if not records:
        raise CommandError(
            f"The training of {ledger.path} did not finish, so it cannot be measured. See its log, "
            "output.log in the same folder."
        )
    return records
