"""The operation that differs: were its inputs equal, how far apart are its outputs, does it replay.

Reads the dumps of two runs; needs torch, and no Lightning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_d9m.evidence.compare import Divergence
from lightning_d9m.evidence.digest import digest, digest_value
from lightning_d9m.evidence.dumps import find_dumps, read_dump, replay_op, revive
from lightning_d9m.evidence.magnitude import Magnitude, measure
from lightning_d9m.patches.catalogue import OPS
from lightning_d9m.patches.op import Op

_REPLAYS = 20


@dataclass(frozen=True)
class OpFinding:
    """What the dumps of an operation show.

    Attributes:
        op: Its name, such as ``"aten.index_put_.default"``.
        source: The line of the program that called it; None in a backward pass without one.
        inputs_equal: Whether both runs gave it equal inputs.
        magnitude: How far its outputs are apart; None when they do not have one form.
        replays: How often it was run alone on the dumped inputs; 0 when it could not be.
        outcomes: How many different outputs these gave.
        obstacle: Why it could not be run alone; empty when it was.
    """

    op: str
    source: str | None
    inputs_equal: bool
    magnitude: Magnitude | None
    replays: int
    outcomes: int
    obstacle: str


def examine_op(found: Divergence, dumps: Sequence[Path]) -> OpFinding | None:
    """Examine the operation at which two runs diverge; None when it was not dumped."""
    name, _, leaf = found.name.partition(":") if "::" not in found.name else _split(found.name)
    place = (found.kind, name, found.call)
    files = [
        next((f for f in find_dumps(folder, step=found.step, place=place) if _of(f, found)), None)
        for folder in dumps
    ]
    if None in files or len(files) != 2:  # noqa: PLR2004 - the two runs
        return None
    one, other = (read_dump(file) for file in files if file is not None)
    replays, outcomes, obstacle = _replay(one)
    return OpFinding(
        op=str(one["op"]),
        source=one.get("source"),
        inputs_equal=_inputs(one) == _inputs(other),
        magnitude=_measure(one["outputs"], other["outputs"], leaf),
        replays=replays,
        outcomes=outcomes,
        obstacle=obstacle,
    )


def find_patch(op: str) -> Op | None:
    """Return the catalogue's entry of an operation, or None.

    >>> find_patch("aten.put_.default").name
    'put_'
    """
    overload = op.removeprefix("aten.").removesuffix(".default")
    for entry in OPS:
        if overload in entry.kernels or overload.partition(".")[0] == entry.name:
            return entry
    return None


def _split(name: str) -> tuple[str, str, str]:
    """Take the path of a leaf off a name such as ``encoder::aten.max.dim:1``."""
    module, _, rest = name.partition("::")
    op, colon, leaf = rest.partition(":")
    return f"{module}::{op}", colon, leaf


def _of(file: Path, found: Divergence) -> bool:
    folders = file.parent
    return (
        folders.parent.name == f"rank-{found.rank}"
        and folders.name == f"epoch-{found.epoch}.step-{found.step}.batch-{found.batch}"
    )


def _inputs(dumped: dict[str, Any]) -> str:
    return digest_value([dumped["args"], dumped["kwargs"]])


def _measure(expected: list[Any], actual: list[Any], leaf: str) -> Magnitude | None:
    """Measure the leaf that differs, or the first of the outputs that does."""
    chosen = int(leaf) if leaf.isdigit() else None
    for number, (one, other) in enumerate(zip(expected, actual, strict=False)):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        if number == chosen or (chosen is None and digest(one) != digest(other)):
            return measure(one, other)
    return None


def _replay(dumped: dict[str, Any]) -> tuple[int, int, str]:
    """Run the operation alone, several times; return how often, how many outcomes, or why not."""
    seen = set()
    try:
        revive(dumped["args"])
        for _ in range(_REPLAYS):
            outputs = replay_op(dumped)
            leaves = outputs if isinstance(outputs, list | tuple) else [outputs]
            seen.add(digest_value(list(leaves)))
    except Exception as error:  # noqa: BLE001 - an operation may refuse in many ways; it is told
        return 0, 0, f"{type(error).__name__}: {error}"
    return _REPLAYS, len(seen), ""
