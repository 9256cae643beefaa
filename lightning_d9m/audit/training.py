"""``d9m audit model``: the distances between trainings, by epoch and by layer.

The ledgers and weights of runs with and without determinism come in; a report goes out.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.errors import CommandError
from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.ledger.format.records import Digests
from lightning_d9m.output.columns import format_table, markdown_table, short
from lightning_d9m.output.run_table import RunRow, list_columns
from lightning_d9m.output.svg.charts import draw_lines
from lightning_d9m.output.terminal import WIDTH
from lightning_d9m.text import pluralize

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_d9m.comparison.numeric_difference import Variation

CONDITIONS = ("without", "with")
_EXPLANATION = """\
Each run is compared with the first one in its condition. Vermv is the mean of |A - B| / |A| over
all weights, Vc the fraction of the weights that differ in any bit (Shanmugavelu et al. 2024, arXiv
2408.05148), ulps the greatest distance in representable numbers. *Without* is the same program with
the same seeds and every determinism setting off."""


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
        from lightning_d9m.lightning.recording.trainer_recorder import (
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


def render_json(trainings: Mapping[str, Sequence[Training]]) -> dict[str, Any]:
    """Return all figures."""
    names = list(trainings[CONDITIONS[0]][0].fits)
    seconds = {name: [round(run.seconds, 3) for run in trainings[name]] for name in CONDITIONS}
    fits = []
    for name in names:
        entry: dict[str, Any] = {"fit": name}
        for condition in CONDITIONS:
            runs = trainings[condition]
            entry[condition] = _summarize(runs, [run.fits[name] for run in runs])
        fits.append(entry)
    medians = {condition: statistics.median(seconds[condition]) for condition in CONDITIONS}
    return {
        "runs": len(seconds["with"]),
        "seconds": seconds,
        "ratio": round(medians["with"] / medians["without"], 3),
        "equal": all(fit["with"]["equal"] for fit in fits),
        "fits": fits,
    }


def _summarize(runs: Sequence[Training], fits: Sequence[Fit]) -> dict[str, Any]:
    scalars = sorted(set.intersection(*(set(fit.last.scalars) for fit in fits)))
    values = {name: [fit.last.scalars[name] for fit in fits] for name in scalars}
    losses = [fit.last.loss for fit in fits if fit.last.loss is not None]
    if losses:
        values = {"final loss": losses} | values
    moments = min(len(fit.epochs) for fit in fits)
    return {
        "equal": all(fit.equal for fit in fits),
        "distinct": len({fit.last.totals["weights"] for fit in fits}),
        "runs": [
            {
                "run": number,
                "seed": run.seed,
                "weights": fit.last.totals["weights"],
                "loss": fit.last.loss,
                "equal": fit.equal,
            }
            for number, (run, fit) in enumerate(zip(runs, fits, strict=True), start=1)
        ],
        "scalars": {name: _spread_of(texts) for name, texts in values.items()},
        "moments": [
            {
                "moment": fits[0].moments[place].moment,
                "epoch": fits[0].moments[place].epoch,
                "distinct": len({fit.moments[place].totals["weights"] for fit in fits}),
                **_vary([fit.epochs[place] for fit in fits]),
            }
            for place in range(moments)
        ],
        "layers": {
            layer: _vary([fit.layers[layer] for fit in fits if layer in fit.layers])
            for layer in fits[0].layers
        },
    }


def _spread_of(texts: Sequence[str]) -> dict[str, Any]:
    numbers = [float.fromhex(text) for text in texts]
    return {
        "distinct": len(set(texts)),
        "least": repr(min(numbers)),
        "greatest": repr(max(numbers)),
        "deviation": repr(statistics.pstdev(numbers)),
    }


def _vary(variations: Sequence[Any]) -> dict[str, Any]:
    """Return the figures of all runs but the first, which is their reference."""
    others = variations[1:]
    return {
        "vermv": statistics.fmean(one.vermv for one in others),
        "vermv_max": max(one.vermv for one in others),
        "vc": statistics.fmean(one.vc for one in others),
        "vc_max": max(one.vc for one in others),
        "ulps": max(one.ulps for one in others),
    }


def render_plot(entry: Mapping[str, Any]) -> str:
    """Return a plot of the spread of one fit by epoch, as SVG."""
    series = {
        f"{condition}: {name}": [
            m[key] for m in entry[condition]["moments"] if m["moment"] == "epoch"
        ]
        for condition in CONDITIONS
        for name, key in (("Vermv", "vermv"), ("Vc", "vc"))
    }
    title = "Distance between the weights of the runs"
    return draw_lines(title, ("epoch", "mean over the runs"), series)


def render_text(result: Mapping[str, Any]) -> str:
    """Return the result for a terminal."""
    fits = result["fits"]
    shown = next((fit for fit in fits if not fit["with"]["equal"]), fits[0])
    of_fit = f" of {shown['fit']}" if len(fits) > 1 else ""
    verdict = (
        f"{'equal' if result['equal'] else 'different'}: {result['runs']} runs with determinism "
        f"left {pluralize(shown['with']['distinct'], 'digest')} of the weights{of_fit}, without "
        f"{shown['without']['distinct']}."
    )
    parts = [verdict]
    for fit in fits:
        if len(fits) > 1:
            parts.append(fit["fit"])
        for condition in CONDITIONS:
            entry = fit[condition]
            parts.append(
                f"{condition} determinism: {entry['distinct']} distinct of {result['runs']}"
            )
            parts.append(_format_runs(entry))
        names = fit["without"]["scalars"]
        parts += ["\n".join(_describe_scalar(fit, c, name) for c in CONDITIONS) for name in names]
    parts.append(
        f"time: {statistics.median(result['seconds']['with']):.2f} s with, "
        f"{statistics.median(result['seconds']['without']):.2f} s without (medians of the whole "
        f"command): {result['ratio']} times."
    )
    return "\n\n".join(parts)


def _describe_scalar(fit: Mapping[str, Any], condition: str, name: str) -> str:
    entry = fit[condition]["scalars"].get(name)
    if entry is None:
        return f"{name}, {condition}: not logged in every run"
    if entry["distinct"] == 1:
        return f"{name}, {condition}: {entry['least']} in every run"
    span = f"{entry['least']} to {entry['greatest']}"
    return f"{name}, {condition}: {entry['distinct']} values, {span}"


def _format_runs(entry: Mapping[str, Any]) -> str:
    """Return the table of the runs in one condition."""
    rows = [
        RunRow(
            run=run["run"],
            fit=1,
            seed=run["seed"],
            weights=run["weights"],
            loss=run["loss"],
            verdict="reference" if run["run"] == 1 else "equal" if run["equal"] else "differs",
        )
        for run in entry["runs"]
    ]
    return format_table(list_columns(rows), rows, WIDTH)


def render_markdown(result: Mapping[str, Any], command: Sequence[str]) -> str:
    """Return the result as a page."""
    runs = f"`{' '.join(command)}`, {result['runs']} runs in each condition."
    parts = ["# Audit of a training", runs]
    parts.append(_EXPLANATION)
    for fit in result["fits"]:
        parts.append(f"## {fit['fit']}")
        parts.append(f"![Spread by epoch]({fit['fit']}.svg)")
        parts += [
            f"### Runs {condition} determinism\n\n```\n{_format_runs(fit[condition])}\n```"
            for condition in CONDITIONS
        ]
        parts.append("### Loss and metrics\n\n" + _scalar_table(fit))
        parts.append("### Weights by epoch\n\n" + _moment_table(fit))
        parts.append("### Weights by layer, at the end\n\n" + _layer_table(fit))
    parts.append(
        "## Time\n\nSeconds of the whole command, imports included: "
        + "; ".join(f"{condition} {result['seconds'][condition]}" for condition in CONDITIONS)
        + f". With over without, medians: {result['ratio']}."
    )
    return "\n\n".join(parts) + "\n"


def _scalar_table(fit: Mapping[str, Any]) -> str:
    rows = []
    for name in fit["without"]["scalars"]:
        for condition in CONDITIONS:
            entry = fit[condition]["scalars"].get(name)
            if entry:
                span = (entry["least"], entry["greatest"], entry["deviation"])
                rows.append((name, condition, str(entry["distinct"]), *span))
    return markdown_table(("", "condition", "distinct", "least", "greatest", "deviation"), rows)


def _moment_table(fit: Mapping[str, Any]) -> str:
    rows = []
    for without, with_ in zip(fit["without"]["moments"], fit["with"]["moments"], strict=False):
        title = str(without["epoch"]) if without["moment"] == "epoch" else without["moment"]
        rows.append((title, *_figures(without), *_figures(with_)))
    return markdown_table(("epoch", *_columns("distinct")), rows)


def _layer_table(fit: Mapping[str, Any]) -> str:
    rows = [
        (f"`{layer}`", *_figures(entry), *_figures(fit["with"]["layers"].get(layer, entry)))
        for layer, entry in fit["without"]["layers"].items()
    ]
    return markdown_table(("layer", *_columns()), rows)


def _columns(*first: str) -> list[str]:
    names = (*first, "Vermv", "Vc", "ulps")
    return [f"{name}, {condition}" for condition in CONDITIONS for name in names]


def _figures(entry: Mapping[str, Any]) -> list[str]:
    first = [str(entry["distinct"])] if "distinct" in entry else []
    return [*first, short(entry["vermv"]), short(entry["vc"]), str(entry["ulps"])]
