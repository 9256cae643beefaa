"""The comparison of a change with noise: as text, as JSON types, and as a plot."""

import html
from dataclasses import asdict

from lightning_d9m.comparison.noise import LEVEL, NoiseVerdict, ValueChange
from lightning_d9m.output.columns import Column, format_table
from lightning_d9m.output.svg import HEIGHT, WIDTH, draw_chart, draw_key
from lightning_d9m.output.terminal import wrap
from lightning_d9m.text import describe_names, escape, pluralize

COLUMNS = (
    Column[ValueChange]("value", lambda value: escape(value.name)),
    Column[ValueChange]("reference", lambda value: f"{value.expected:.6g}", is_number=True),
    Column[ValueChange]("this run", lambda value: f"{value.actual:.6g}", is_number=True),
    Column[ValueChange]("change", lambda value: f"{value.change:+.3g}", is_number=True),
    Column[ValueChange]("noise (s)", lambda value: f"{value.deviation:.3g}", is_number=True),
    Column[ValueChange]("chance", lambda value: describe_chance(value.chance), is_number=True),
)
_SMALLEST = 0.001


def list_noise_facts(found: NoiseVerdict) -> dict[str, object]:
    """Return the result as JSON types."""
    named = ("change", "deviation", "chance")
    values = [asdict(v) | {name: getattr(v, name) for name in named} for v in found.values]
    facts = {name: value for name, value in asdict(found).items() if name != "lines"}
    return {"verdict": found.verdict, "sentence": state_noise(found), **facts, "values": values}


def describe_chance(chance: float) -> str:
    """Return a probability in percent.

    >>> describe_chance(0.0), describe_chance(0.0123), describe_chance(0.4)
    ('<0.1%', '1.2%', '40%')
    """
    if chance < _SMALLEST:
        return "<0.1%"
    return f"{chance:.1%}" if chance < 2 * LEVEL else f"{chance:.0%}"


def state_noise(found: NoiseVerdict) -> str:
    """Return the verdict as one sentence, which can be pasted into an issue."""
    value = found.values[0]
    if not value.change:
        return f"{found.verdict}: no logged value changes, and {found.runs} show the noise."
    name = escape(value.name)
    spread = max(value.noise) - min(value.noise)
    if not spread:
        return (
            f"{found.verdict}: {name} changes by {value.change:+.3g}, and {found.runs} all agree."
        )
    of = f", of {pluralize(len(found.values), 'value')} the clearest," if found.values[1:] else ""
    return (
        f"{found.verdict}: {name}{of} changes by {value.change:+.3g}, and {found.runs} spread over "
        f"{spread:.3g}. Noise alone changes it that much in {describe_chance(value.chance)} of "
        "pairs of runs."
    )


def format_noise(found: NoiseVerdict) -> list[str]:
    """Return the lines of the result below the verdict."""
    lines = format_table(COLUMNS, found.values).splitlines()
    if found.weights is not None:
        low, high = min(found.noise_weights), max(found.noise_weights)
        lines += ["", *wrap(
            f"Weights: {found.weights:.1e} of their norm apart; those of the runs without the "
            f"change, {low:.1e} to {high:.1e}."
        )]  # fmt: skip
    if found.left_out:
        names = describe_names(found.left_out, len(found.left_out))
        lines += wrap(f"Left out, because some run has no finite value: {names}.")
    return lines


def draw_noise(found: NoiseVerdict) -> str:
    """Return a plot of the first value of all runs at the ends of epochs, as an SVG file."""
    what = html.escape(escape(found.values[0].name))
    legend = "".join(
        f'<g transform="translate({8 + 160 * number} 26)">{draw_key(number)}'
        f'<text x="32" y="9">{name}</text></g>'
        for number, name in enumerate(("reference", "this run", "others: without the change"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{46 + HEIGHT}">'
        "<style>text{font:12px sans-serif}.axis{stroke:#888}</style>"
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="16">{what}</text>{legend}'
        f'<g transform="translate(0 46)">{draw_chart("Values", found.lines, name="run")}</g></svg>'
    )
