"""``d9m audit model``: the distances between trainings, by epoch and by layer.

The ledgers of runs with and without determinism come in; a report goes out.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from lightning_d9m.engine.ledger.folder import Ledger
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.engine.ledger.kinds import ROOT
from lightning_d9m.errors import CommandError
from lightning_d9m.text import pluralize
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.comparison.timeline import (
    STANDARD_ERROR,
    Distance,
    add_up,
    measure_distances,
    read_ends,
)
from lightning_d9m.tools.launch.run import Run
from lightning_d9m.tools.output.columns import Column, format_markdown_table, format_table, short
from lightning_d9m.tools.output.repeat_text import list_run_columns, make_run_row

CONDITIONS = ("without", "with")
_EXPLANATION = f"""\
Each run is compared with the first one in its condition. *distance* is the norm of the difference
of the weights, relative to that of the weights, as a mean over the runs: 0 exactly if all bits
agree, else estimated from the ledgers with a standard error of {STANDARD_ERROR:.0%}. *tensors* is
the greatest number of weights that differ. *Without* is the same program with the same seeds and
every determinism setting off."""
# The distances of the weights of each layer; None for a weight that differs and has no sketch.
_Layers: TypeAlias = Mapping[str, Sequence[Distance | None]]
# The figures of one moment, layer or value in both conditions.
_Pair: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any]]


def summarize(trainings: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return all figures of the runs in each condition.

    Raises:
        CommandError: The runs did not fit the same models, or a fit did not finish.
    """
    names = list(trainings[CONDITIONS[0]][0].fits)
    for run in (run for runs in trainings.values() for run in runs):
        if list(run.fits) != names:
            raise CommandError(
                f"The runs left different numbers of ledgers: {len(names)} and {len(run.fits)}. "
                "Each run must fit the same models in the same order."
            )
    seconds = {name: [run.seconds or 0.0 for run in trainings[name]] for name in trainings}
    medians = {name: statistics.median(seconds[name]) for name in CONDITIONS}
    fits: list[dict[str, Any]] = [
        {"fit": name}
        | {
            condition: _summarize_fit([run.fits[name] for run in trainings[condition]])
            for condition in CONDITIONS
        }
        for name in names
    ]
    return {
        "runs": len(seconds["with"]),
        "seconds": seconds,
        "medians": medians,
        "ratio": round(medians["with"] / medians["without"], 3),
        "equal": all(fit["with"]["equal"] for fit in fits),
        "fits": fits,
    }


def _summarize_fit(ledgers: Sequence[Ledger]) -> dict[str, Any]:
    """Return the figures of one fit in one condition."""
    equal = [compare_ledgers(ledgers[0], ledger).equal for ledger in ledgers[1:]]
    words = ["reference", *("equal" if same else "differs" for same in equal)]
    rows = [
        make_run_row(number, 1, ledger, word)
        for number, (ledger, word) in enumerate(zip(ledgers, words, strict=True), start=1)
    ]
    ends = [read_ends(ledger) for ledger in ledgers]
    last = [run[-1] for run in ends]
    scalars = sorted(set.intersection(*(set(record.scalars) for record in last)))
    values = {name: [record.scalars[name] for record in last] for name in scalars}
    losses = [record.loss for record in last if record.loss is not None]
    if losses:
        values = {"final loss": losses} | values
    moments = list(zip(*ends, strict=False))
    layers = [_measure_layers(last[0], record) for record in last[1:]]
    return {
        "equal": all(equal),
        "distinct": len({record.totals["weights"] for record in last}),
        "runs": rows,
        "scalars": {name: _spread_of(texts) for name, texts in values.items()},
        "moments": [
            {
                "moment": first.moment,
                "epoch": first.epoch,
                "distinct": len({record.totals["weights"] for record in (first, *others)}),
                **_vary([_measure_layers(first, record) for record in others]),
            }
            for first, *others in moments
        ],
        "layers": {
            layer or ROOT: _vary([{layer: run[layer]} for run in layers if layer in run])
            for layer in layers[0]
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


def _measure_layers(expected: Digests, actual: Digests) -> _Layers:
    layers: dict[str, list[Distance | None]] = {}
    for name, distance in measure_distances(expected, actual).items():
        layers.setdefault(name.rpartition(".")[0], []).append(distance)
    return layers


def _vary(runs: Sequence[_Layers]) -> dict[str, Any]:
    """Return the figures of all runs but the first, which is their reference."""
    sizes, tensors = [], []
    for found in (list(chain.from_iterable(layers.values())) for layers in runs):
        sizes.append(add_up(found))
        tensors.append(sum(distance is None or distance.differing for distance in found))
    known = all(map(math.isfinite, sizes))
    return {
        "distance": statistics.fmean(sizes) if known else None,
        "distance_max": max(sizes) if known else None,
        "tensors": max(tensors),
    }


def render_text(result: Mapping[str, Any]) -> str:
    """Return the result for a terminal; only the page has the layers."""
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
        tables = [f"{title}\n{table}" for title, table in _format_tables(fit, format_table)]
        parts += [*([fit["fit"]] if of_fit else []), *tables[:-1]]
    return "\n\n".join([*parts, _describe_time(result)])


def _describe_time(result: Mapping[str, Any]) -> str:
    with_, without = (result["medians"][name] for name in ("with", "without"))
    return (
        f"time: {with_:.2f} s with, {without:.2f} s without (medians of the whole command): "
        f"{result['ratio']} times."
    )


def render_markdown(result: Mapping[str, Any], command: Sequence[str]) -> str:
    """Return the result as a page."""
    runs = f"`{' '.join(command)}`, {result['runs']} runs in each condition."
    parts = ["# Audit of a training", runs, _EXPLANATION]
    for fit in result["fits"]:
        parts.append(f"## {fit['fit']}")
        for title, table in _format_tables(fit, format_markdown_table):
            parts += [f"### {title}", table]
    return "\n\n".join([*parts, _describe_time(result)]) + "\n"


def _format_tables(fit: Mapping[str, Any], form: Callable[..., str]) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each table of a fit."""
    without, with_ = (fit[condition] for condition in CONDITIONS)
    for condition in CONDITIONS:
        rows = fit[condition]["runs"]
        yield f"Runs {condition} determinism", form(list_run_columns(rows), rows)
    values, distances = ("distinct", "least", "greatest", "deviation"), ("distance", "tensors")
    moments = [
        (str(one["epoch"]) if one["moment"] == "epoch" else one["moment"], (one, other))
        for one, other in zip(without["moments"], with_["moments"], strict=False)
    ]
    scalars, layers = (
        [(name, (found, with_[key].get(name, {}))) for name, found in without[key].items()]
        for key in ("scalars", "layers")
    )
    for title, first, names, pairs in (
        ("Loss and metrics", "value", values, scalars),
        ("Weights by epoch", "epoch", ("distinct", *distances), moments),
        ("Weights by layer, at the end", "layer", distances, layers),
    ):
        yield title, form(_list_columns(first, names), pairs)


def _list_columns(first: str, names: Sequence[str]) -> list[Column[tuple[str, _Pair]]]:
    """Return the columns of figures in both conditions."""

    def make(name: str, number: int) -> Column[tuple[str, _Pair]]:
        title = f"{name}, {CONDITIONS[number]}"
        return Column(title, lambda row: short(row[1][number].get(name)), is_number=True)

    named: Column[tuple[str, _Pair]] = Column(first, lambda row: row[0])
    return [named, *(make(name, number) for number in range(len(CONDITIONS)) for name in names)]
