"""The difference of two trainings, compared with that of runs which differ by noise alone.

The runs without a change show how much noise moves a value: their standard deviation s. If the
change does nothing, the difference of two runs over ``s * sqrt(2)`` follows Student's distribution
with one degree of freedom less than there are runs (for values that are spread normally).
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_d9m.engine.ledger.folder import Ledger
from lightning_d9m.engine.ledger.stack import LAST_BITS_SETTING
from lightning_d9m.errors import LedgerError
from lightning_d9m.tools.comparison.timeline import read_ends

FEWEST_RUNS = 3
# The chance below which a difference is not noise; divided by the number of values.
LEVEL = 0.05


@dataclass(frozen=True)
class ValueChange:
    """A logged value at one moment of the two trainings and of the runs that show the noise.

    Attributes:
        name: Its name.
        expected: The value of the reference.
        actual: The value of this run.
        noise: The values of the runs without a change.
        change: The difference of the two trainings.
        deviation: The standard deviation of the runs without a change.
        chance: The probability that noise alone makes a difference at least this large.
    """

    name: str
    expected: float
    actual: float
    noise: Sequence[float]
    change: float
    deviation: float
    chance: float


@dataclass(frozen=True)
class NoiseVerdict:
    """The result of a comparison with noise.

    Attributes:
        runs: The runs that show the noise, in words.
        values: The logged values at the end, those that noise explains least first.
        left_out: Names of values that are not finite, or that some run did not log.
        lines: (step, first value) at the ends of epochs, of the two trainings and of the others.
    """

    runs: str
    values: Sequence[ValueChange]
    left_out: Sequence[str]
    lines: Sequence[Sequence[tuple[int, float]]]

    @property
    def verdict(self) -> Literal["within noise", "beyond noise"]:
        """``"beyond noise"`` if noise does not explain one of the values."""
        beyond = self.values[0].chance * len(self.values) < LEVEL
        return "beyond noise" if beyond else "within noise"


def judge_change(
    expected: Ledger,
    actual: Ledger,
    noise: Sequence[Ledger],
    progress: Callable[[int], None] | None = None,
) -> NoiseVerdict:
    """Compare the difference of two trainings with that of runs without a change.

    Args:
        expected: The training before the change.
        actual: The training with it.
        noise: At least three runs without it, such as reruns of the reference.
        progress: Called with the number of runs read so far.

    Raises:
        LedgerError: If there are too few runs, one did not finish, or no value is there.
    """
    described = _describe_runs(expected, actual, noise)
    runs = []
    for ledger in (expected, actual, *noise):
        runs.append(read_ends(ledger))
        if progress is not None:
            progress(len(runs))
    values, left_out = _list_changes([run[-1].list_values() for run in runs])
    if not values:
        raise LedgerError(
            "The runs have no value that all of them log at the end, so nothing can be compared "
            "with noise. Log one with self.log() or lightning_d9m.record_final()."
        )
    name = values[0].name
    lines = [[(end.step, end.list_values().get(name, math.nan)) for end in run] for run in runs]
    return NoiseVerdict(described, values, left_out, lines)


def _describe_runs(expected: Ledger, actual: Ledger, noise: Sequence[Ledger]) -> str:
    """Return the runs that show the noise in words, if they can show it."""
    count, seeds = len(noise), len({ledger.header.seed for ledger in noise})
    if count < FEWEST_RUNS:
        raise LedgerError(
            f"{count} runs show the noise, and at least {FEWEST_RUNS} are needed. Run the "
            "reference more often, for example with d9m repeat -n 5 -- COMMAND."
        )
    if any(ledger.path.samefile(actual.path) for ledger in noise):
        raise LedgerError(
            f"{actual.path} is among the runs that show the noise. These are to run without the "
            "change: name another folder with --noise."
        )
    if seeds == 1 and expected.header.seed != actual.header.seed:
        raise LedgerError(
            f"The two trainings have the seeds {expected.header.seed} and {actual.header.seed}, "
            "and the runs that show the noise have one. Use one seed for both, or name runs with "
            "several seeds."
        )
    if seeds > 1:
        return f"{count} runs with {seeds} seeds"
    if any(LAST_BITS_SETTING in ledger.header.settings for ledger in noise):
        return f"{count} runs with changed last bits"
    return f"{count} reruns"


_HALF = 0.5


def _list_changes(logged: Sequence[Mapping[str, float]]) -> tuple[list[ValueChange], list[str]]:
    """Return the values of all runs, and the names of those that some run does not have."""
    values, left_out = [], []
    for name in dict.fromkeys([*logged[0], *logged[1]]):
        expected, actual, *noise = (run.get(name, math.nan) for run in logged)
        if not all(map(math.isfinite, (expected, *noise))) or math.isnan(actual):
            left_out.append(name)
            continue
        change, deviation = actual - expected, statistics.stdev(noise)
        chance = 0.0 if change else 1.0
        if deviation and math.isfinite(change):
            chance = _find_chance(abs(change) / deviation / math.sqrt(2), len(noise) - 1)
        values.append(ValueChange(name, expected, actual, noise, change, deviation, chance))
    return sorted(values, key=lambda value: value.chance), left_out


def _find_chance(ratio: float, freedom: int) -> float:
    """Return the probability that Student's t is beyond a ratio on either side.

    >>> round(_find_chance(2.776445, 4), 5), round(_find_chance(3.182446, 3), 5)
    (0.05, 0.05)
    """
    within = freedom / (freedom + ratio**2)
    if within > _HALF:  # the series converges slowly there
        return 1.0 - _find_beta(0.5, freedom / 2, 1.0 - within)
    return _find_beta(freedom / 2, 0.5, within)


def _find_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function, for x up to 1/2, by its power series."""
    if x == 0.0:
        return 0.0
    size = math.lgamma(a + b) - math.lgamma(a + 1) - math.lgamma(b)
    size += a * math.log(x) + b * math.log1p(-x)
    total, term, count = 0.0, 1.0, 0
    while total + term != total:
        total += term
        term *= x * (a + b + count) / (a + 1 + count)
        count += 1
    return math.exp(size) * total
