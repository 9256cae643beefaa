"""The evidence at the place where two runs diverge: how far values are apart, and why.

Reads the evidence of two runs; does not import Lightning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_d9m.engine.ledger.differences import Divergence
from lightning_d9m.engine.ledger.folder import Ledger
from lightning_d9m.engine.ledger.stack import MISSING
from lightning_d9m.engine.probes.evidence import find_pair, read_evidence
from lightning_d9m.engine.probes.training import ProbePoint, StatePoint
from lightning_d9m.ops.patches.catalog.catalog import OPS, Op
from lightning_d9m.tools.comparison.numeric_difference import Magnitude, measure_difference


@dataclass(frozen=True)
class OpFinding:
    """The evidence on an operation that differs in two runs.

    Attributes:
        op: Its name, such as ``"aten.index_put_.default"``.
        source: The line of the program that called it, or in a backward pass the line that called
            the operation whose gradient it computes; None if there is none.
        backward: Whether it computes the gradient of the operation that the line called.
        inputs_equal: Whether both runs gave it equal inputs.
        only_numbers_differ: Whether its inputs differ in numbers alone, which it does not read from
            the memory of a tensor.
        generator_equal: Whether the generator that it draws from had the same state.
        magnitude: How far its outputs, or the numbers that it got, are apart; None if that is not
            known.
        replays: Number of runs on the inputs alone; 0 if that is not possible.
        outcomes: Number of different outputs of these runs.
        obstacle: Why it cannot run alone; empty if it can.
        patch: Its entry in the catalog; None if it has none.
    """

    op: str
    source: str | None
    backward: bool
    inputs_equal: bool
    only_numbers_differ: bool
    generator_equal: bool
    magnitude: Magnitude | None = None
    replays: int = 0
    outcomes: int = 0
    obstacle: str = ""
    patch: Op | None = None


def examine_op(found: Divergence, run: Ledger) -> OpFinding | None:
    """Return the evidence of a second run on the operation at a place; None if it has none."""
    folder = name_moment(found)
    for (where, kind, name, call), own in read_evidence(run.path, found.rank)["found"].items():
        # The name of an output of several is that of the operation, with a number.
        same = found.name == name or found.name.startswith(f"{name}:")
        if (where, kind, call) == (folder, found.kind, found.call) and same:
            # What is left are the fields of `OpFinding`, as the evidence was written.
            flags, values = own.pop("flags"), own.pop("values")
            magnitude = None if values is None else _measure(*values)
            return OpFinding(**own, magnitude=magnitude, patch=find_patch(own["op"], flags))
    return None


def measure_kept(
    found: Divergence, kind: str, runs: Sequence[Ledger], *, ranks: Sequence[int] = ()
) -> Magnitude | None:
    """Measure the first value at a place that differs; None if it was not kept.

    Without ``ranks``, one for each run, both values are of the rank of the place.
    """
    place = (name_moment(found), kind, found.call)
    one, other = (
        {
            name: value
            for (where, kind, name, call), value in read_evidence(run.path, rank)["values"].items()
            if (where, kind, call) == place
        }
        for run, rank in zip(runs, ranks or (found.rank, found.rank), strict=True)
    )
    pairs = (find_pair(value, other[name]) for name, value in one.items() if name in other)
    return next((_measure(*pair) for pair in pairs if pair is not None), None)


def name_moment(found: Divergence) -> str:
    """Return the name of the moment of a place in the evidence."""
    if found.batch is not None and found.moment == "batch":
        return ProbePoint(found.epoch, found.step, found.batch).folder
    return StatePoint(found.epoch, found.step, found.moment).folder


def measure_recorded(found: Divergence) -> Magnitude | None:
    """Measure a logged number, which the ledger itself holds."""
    # The ledger has digests of tensors, from which no distance can be computed, but numbers
    # themselves.
    texts = (found.expected, found.actual)
    if found.moment == "batch" or found.kind not in ("loss", "scalars") or MISSING in texts:
        return None
    values = torch.tensor(
        [float.fromhex(text) for text in texts], dtype=torch.float64, device="cpu"
    )
    if torch.equal(values.float().double(), values):
        values = values.float()  # its dtype when it was logged; ulps of float64 are too small
    return measure_difference(values[0], values[1])


def find_patch(op: str, flags: Sequence[bool] = ()) -> Op | None:
    """Return the catalog's entry for an operation that was called with flags, or None.

    >>> find_patch("aten.put_.default").name
    'put_'
    """
    # From the most specific name on: an entry may be that of one overload, or of `accumulate=True`
    # alone, where the operation does not vary otherwise.
    overload = op.removeprefix("aten.").removesuffix(".default")
    operator = overload.partition(".")[0].removesuffix("_")
    names = [f"{operator}_accumulate"] * any(flags) + [overload, operator]
    found = {
        name: entry
        for entry in OPS
        for name in (entry.name.removesuffix("_"), *entry.operators, *entry.kernels)
    }
    return next((found[name] for name in names if name in found), None)


def _measure(*values: object) -> Magnitude | None:
    """Measure the difference of two tensors or numbers; None for other values."""
    if not all(isinstance(value, Tensor | int | float) for value in values):
        return None
    one, other = (
        # A number of Python has 64 bits; without a dtype, torch would round it to its default type,
        # and a difference could vanish.
        torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        for value in values
    )
    return measure_difference(one, other)
