"""The values at the place where two runs diverge: how far they are apart, and why.

For an operation: whether its inputs were equal, and whether it gives different outputs if it runs
alone. Reads the dumps of two runs; does not import Lightning.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_d9m.engine.hashing.digest import digest_value
from lightning_d9m.engine.ledger.differences import Divergence
from lightning_d9m.engine.ledger.stack import MISSING
from lightning_d9m.engine.probes.dumps import (
    find_batches,
    find_dumps,
    find_states,
    read_dump,
    read_index,
    replay_op,
    revive,
    take_generators,
)
from lightning_d9m.ops.patches.catalog.catalog import OPS, Op
from lightning_d9m.tools.comparison.numeric_difference import Magnitude, measure_difference

# An operation that gives a second result in 1 of 7 runs shows it with 95%.
_REPLAYS = 20


@dataclass(frozen=True)
class OpFinding:
    """The evidence on an operation in the dumps of two runs.

    Attributes:
        op: Its name, such as ``"aten.index_put_.default"``.
        source: The line of the program that called it, or in a backward pass the line that called
            the operation whose gradient it computes; None if there is none.
        backward: Whether it computes the gradient of the operation that the line called.
        inputs_equal: Whether both runs gave it equal inputs.
        only_numbers_differ: Whether its inputs differ in numbers alone, which it does not read from
            the memory of a tensor.
        generator_equal: Whether the generator that it draws from had the same state.
        magnitude: How far its outputs are apart; None if their shapes or dtypes differ.
        replays: Number of runs on the dumped inputs alone; 0 if that is not possible.
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
    magnitude: Magnitude | None
    replays: int
    outcomes: int
    obstacle: str
    patch: Op | None = None


def examine_op(found: Divergence, dumps: Sequence[Path]) -> OpFinding | None:
    """Examine the operation at which two runs diverge; None if it was not dumped."""
    where, place = _batch_filter(found), (found.kind, name_op(found.name), found.call)
    files = [
        next(find_dumps(folder, step=found.step, place=place, **where), None) for folder in dumps
    ]
    if None in files:
        return None
    one, other = read = [read_dump(file) for file in files if file is not None]
    states: list[list[Any]] = [[content.get("rng")] for content in read]
    inputs = [
        take_generators([content["args"], content["kwargs"]], own)
        for content, own in zip(read, states, strict=True)
    ]
    is_equal = digest_value(inputs[0]) == digest_value(inputs[1])
    # Filled memory cannot change a number: reading it from a tensor is an operation, which would
    # have differed first.
    others = [digest_value(tree_map(_leave_out_number, own)) for own in inputs]
    generators = [digest_value(own) for own in states]
    outputs = zip(one["outputs"], other["outputs"], strict=False)
    differing = (pair for pair in outputs if digest_value(pair[0]) != digest_value(pair[1]))
    magnitude = _measure(*next(differing, (None, None)))
    replays, outcomes, obstacle = _replay(one)
    return OpFinding(
        op=str(one["op"]),
        source=one.get("source"),
        backward=bool(one.get("backward")),
        inputs_equal=is_equal,
        only_numbers_differ=not is_equal and others[0] == others[1],
        generator_equal=generators[0] == generators[1],
        magnitude=magnitude,
        replays=replays,
        outcomes=outcomes,
        obstacle=obstacle,
        patch=find_patch(one),
    )


def measure_saved(
    found: Divergence, kind: str, dumps: Sequence[Path], *, ranks: Sequence[int] = ()
) -> Magnitude | None:
    """Measure the first value at a place that differs; None if it was not dumped.

    Without ``ranks``, one for each run, both values are of the rank of the place.
    """
    ranks = ranks or (found.rank, found.rank)
    one, other = (
        dict(_read_values(found, kind, folder, rank))
        for rank, folder in zip(ranks, dumps, strict=True)
    )
    for place, value in one.items():
        if place in other and digest_value(value) != digest_value(other[place]):
            return _measure(value, other[place])
    return None


def measure_recorded(found: Divergence) -> Magnitude | None:
    """Measure a logged number, which the ledger itself holds."""
    texts = (found.expected, found.actual)
    if found.moment == "batch" or found.kind not in ("loss", "scalars") or MISSING in texts:
        return None
    values = torch.tensor(
        [float.fromhex(text) for text in texts], dtype=torch.float64, device="cpu"
    )
    if torch.equal(values.float().double(), values):
        values = values.float()  # its dtype when it was logged; ulps of float64 are too small
    return measure_difference(values[0], values[1])


def find_patch(dumped: Mapping[str, Any]) -> Op | None:
    """Return the catalog's entry for an operation, or None.

    >>> find_patch({"op": "aten.put_.default", "args": []}).name
    'put_'
    """
    overload = str(dumped["op"]).removeprefix("aten.").removesuffix(".default")
    operator = overload.partition(".")[0].removesuffix("_")
    accumulates = any(argument is True for argument in dumped["args"])
    names = [f"{operator}_accumulate"] * accumulates + [overload, operator]
    found = {
        name: entry
        for entry in OPS
        for name in (entry.name.removesuffix("_"), *entry.operators, *entry.kernels)
    }
    return next((found[name] for name in names if name in found), None)


def name_op(name: str) -> str:
    """Return the operation of an operation's place, without the path of a leaf.

    >>> name_op("encoder::aten.max.dim:1")
    'encoder::aten.max.dim'
    """
    module, _, rest = name.partition("::")
    return f"{module}::{rest.partition(':')[0]}"


def _read_values(
    found: Divergence, kind: str, folder: Path, rank: int
) -> Iterator[tuple[tuple[str, str, int], Any]]:
    """Yield (place, value) for each value that was saved at a place or its leaves."""
    batches = find_batches(folder, step=found.step, **_batch_filter(found) | {"rank": rank})
    if found.moment != "batch":
        states = find_states(folder, step=found.step, rank=rank, moment=found.moment)
        batches = states or batches
    for batch in batches:
        for entry in read_index(batch):
            own = entry["name"] == found.name or entry["name"].startswith(f"{found.name}:")
            if own and entry["kind"] == kind and entry["call"] == found.call:
                place = (batch.name, entry["name"], entry["call"])
                yield place, read_dump(batch / entry["file"])["value"]


def _leave_out_number(value: object) -> object:
    return None if isinstance(value, int | float | complex) else value


def _batch_filter(found: Divergence) -> dict[str, int | None]:
    """Return the batch of a divergence's dumps; only the rank for a divergence outside batches."""
    if found.moment != "batch":
        return {"rank": found.rank}
    return {"rank": found.rank, "epoch": found.epoch, "batch": found.batch}


def _measure(*values: object) -> Magnitude | None:
    """Measure the difference of two tensors or numbers; None for other values."""
    if not all(isinstance(value, Tensor | int | float) for value in values):
        return None
    one, other = (
        torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        for value in values
    )
    return measure_difference(one, other)


def _replay(dumped: dict[str, Any]) -> tuple[int, int, str]:
    """Run the operation alone several times; return (runs, different outputs, obstacle)."""
    seen = set()
    try:
        revive(dumped["args"])
        for _ in range(_REPLAYS):
            outputs = replay_op(dumped)
            leaves = outputs if isinstance(outputs, list | tuple) else [outputs]
            seen.add(digest_value(list(leaves)))
    except Exception as error:  # noqa: BLE001 - an operation may raise anything; it is reported
        return 0, 0, f"{type(error).__name__}: {error}"
    return _REPLAYS, len(seen), ""
