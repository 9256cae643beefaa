"""The difference of two trainings, compared with that of runs which differ by noise alone.

The runs without a change show how much noise moves a value: their standard deviation s. If the
change does nothing, the difference of two runs over ``s * sqrt(2)`` follows Student's distribution
with one degree of freedom less than there are runs (for values that are spread normally).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_d9m.comparison.weight_distance import NO_DISTANCE, measure_distances, read_ends
from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.ledger.format.records import Digests
from lightning_d9m.ledger.stack import LAST_BITS_SETTING

FEWEST_RUNS = 3
# The chance below which a difference is not noise; divided by the number of values.
LEVEL = 0.05


@dataclass(frozen=True)
class ValueChange:
    """A logged value at the end of the two trainings and of the runs that show the noise.

    Attributes:
        name: Its name.
        expected: The value of the reference.
        actual: The value of this run.
        noise: The values of the runs without a change.
        chance: The probability that noise alone makes a difference at least this large.
    """

    name: str
    expected: float
    actual: float
    noise: Sequence[float]
    chance: float

    @property
    def change(self) -> float:
        """The difference of the two trainings."""
        return self.actual - self.expected

    @property
    def deviation(self) -> float:
        """The standard deviation of the runs without a change."""
        return statistics.stdev(self.noise)


@dataclass(frozen=True)
class NoiseVerdict:
    """The result of a comparison with noise.

    Attributes:
        runs: How many runs show the noise.
        seeds: How many different seeds they have.
        last_bits: Whether the last bits of their weights were changed.
        values: The logged values, those that noise explains least first.
        left_out: Names of values that are not finite, or that some run did not log.
        weights: The relative distance of the weights of the two trainings; None if unknown.
        noise_weights: The same for each run without a change and the first of them.
        series: (step, size) of the change and of the noise at the ends of the epochs, by name: of
            the weights, and of the value that noise explains least.
    """

    runs: int
    seeds: int
    last_bits: bool
    values: Sequence[ValueChange]
    left_out: Sequence[str]
    weights: float | None
    noise_weights: Sequence[float]
    series: Mapping[str, Sequence[tuple[int, float]]]

    @property
    def verdict(self) -> Literal["within noise", "beyond noise"]:
        """The verdict on the values; without values, the verdict on the weights."""
        if self.values:
            beyond = self.values[0].chance * len(self.values) < LEVEL
        else:
            beyond = self.weights is not None and self.weights > max(self.noise_weights)
        return "beyond noise" if beyond else "within noise"


def judge_change(
    expected: Ledger, actual: Ledger, noise: Sequence[Ledger], chosen: str | None = None
) -> NoiseVerdict:
    """Compare the difference of two trainings with that of runs without a change.

    Args:
        expected: The training before the change.
        actual: The training with it.
        noise: At least three runs without it, such as reruns of the reference.
        chosen: The name of the value that matters; None for all.

    Raises:
        LedgerError: If there are too few runs, one did not finish, or the value is not there.
    """
    if len(noise) < FEWEST_RUNS:
        raise LedgerError(
            f"{len(noise)} runs show the noise, and at least {FEWEST_RUNS} are needed. Run the "
            "reference more often, for example with d9m repeat -n 5 -- COMMAND."
        )
    if any(ledger.path.samefile(actual.path) for ledger in noise):
        raise LedgerError(
            f"{actual.path} is among the runs that show the noise. These are to run without the "
            "change: name another folder with --noise."
        )
    seeds = len({ledger.header.seed for ledger in noise})
    if seeds == 1 and expected.header.seed != actual.header.seed:
        raise LedgerError(
            f"The two trainings have the seeds {expected.header.seed} and {actual.header.seed}, "
            "and the runs that show the noise have one. Use one seed for both, or name runs with "
            "several seeds."
        )
    runs = [read_ends(ledger) for ledger in (expected, actual, *noise)]
    last = [run[-1] for run in runs]
    ends = [record.list_values() for record in last]
    names = list(dict.fromkeys(name for end in ends[:2] for name in end))
    if chosen is not None:
        if not all(chosen in end for end in ends):
            known = ", ".join(name for name in names if all(name in end for end in ends))
            raise LedgerError(
                f"The value {chosen!r} is not logged at the end of every run. Known values: "
                f"{known}."
            )
        names = [chosen]
    values, left_out = [], []
    for name in names:
        found = _judge(name, [end.get(name, math.nan) for end in ends])
        values += [found] if found else []
        left_out += [] if found else [name]
    values.sort(key=lambda value: value.chance)
    weights = _measure_weights(last[0], last[1])
    pairs = [_measure_weights(last[2], record) for record in last[3:]]
    if not values and (weights is None or None in pairs):
        raise LedgerError(
            "The runs have neither a value that all of them log nor comparable weights, so nothing "
            "can be compared with noise. Log a value with self.log()."
        )
    return NoiseVerdict(
        len(noise),
        seeds,
        any(LAST_BITS_SETTING in ledger.header.settings for ledger in noise),
        values,
        left_out,
        weights,
        [pair for pair in pairs if pair is not None],
        _list_series(runs, values[0].name if values else ""),
    )


def _list_series(
    runs: Sequence[Sequence[Digests]], name: str
) -> dict[str, list[tuple[int, float]]]:
    """Return the sizes of change and noise at the ends of the epochs that all runs have."""
    series = defaultdict[str, list[tuple[int, float]]](list)
    epochs = [[record for record in run if record.moment == "epoch"] for run in runs]
    for records in zip(*epochs, strict=False):
        value = _judge(name, [record.list_values().get(name, math.nan) for record in records])
        sizes = {
            "weights: change": _measure_weights(records[0], records[1]),
            "weights: noise": _mean([_measure_weights(records[2], r) for r in records[3:]]),
        }
        if value is not None:
            sizes[f"{name}: change"] = abs(value.change)
            sizes[f"{name}: noise"] = math.sqrt(2) * value.deviation
        for what, size in sizes.items():
            if size is not None:
                series[what].append((records[0].step, size))
    return dict(series)


def _mean(sizes: Sequence[float | None]) -> float | None:
    known = [size for size in sizes if size is not None]
    return statistics.fmean(known) if known else None


def _judge(name: str, values: Sequence[float]) -> ValueChange | None:
    """Return the change of a value; None if one of the runs without it is not finite."""
    expected, actual, *noise = values
    if not all(map(math.isfinite, (expected, *noise))) or math.isnan(actual):
        return None
    scale = statistics.stdev(noise) * math.sqrt(2)
    change = abs(actual - expected)
    if scale and math.isfinite(change):
        chance = _find_chance(change / scale, len(noise) - 1)
    else:
        chance = 0.0 if change else 1.0
    return ValueChange(name, expected, actual, noise, chance)


def _find_chance(ratio: float, freedom: int) -> float:
    """Return the probability that Student's t is beyond a ratio on either side.

    From Abramowitz and Stegun, 26.7.3 and 26.7.4, for two degrees of freedom and more.

    >>> round(_find_chance(2.776445, 4), 5), round(_find_chance(3.182446, 3), 5)
    (0.05, 0.05)
    """
    angle = math.atan(ratio / math.sqrt(freedom))
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    within = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + within) if odd else within))


def _measure_weights(expected: Digests, actual: Digests) -> float | None:
    """Return the distance of all weights, relative to their norm; None if it is not known."""
    found = measure_distances(expected, actual)
    known = [distance for distance in found.values() if distance is not None]
    if not known or len(known) < len(expected.groups.get("weights", {})):
        return None
    size = sum(known, NO_DISTANCE).relative
    return size if math.isfinite(size) else None
