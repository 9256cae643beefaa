"""The samples of an epoch in two runs: the same ones in another order, or different ones."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lightning_d9m.hashing.digest import digest_value
from lightning_d9m.probes.dumps import read_dump, read_index


@dataclass(frozen=True)
class SampleComparison:
    """The samples of an epoch in two runs, compared as multisets over all ranks.

    Attributes:
        expected: Number of samples in the first run.
        actual: Number in the second run.
        common: Number of samples that both runs have, by their digests.
    """

    expected: int
    actual: int
    common: int

    @property
    def same(self) -> bool:
        """Whether both runs have the same samples, in whatever order."""
        return self.expected == self.actual == self.common


def compare_samples(dumps: Sequence[Path]) -> SampleComparison | None:
    """Compare the samples in the dumped batches of two runs.

    Returns:
        None if nothing was dumped, or if samples cannot be told apart in a batch: it has no tensor
        with a first dimension, or tensors whose first dimensions differ.
    """
    counts = [_count_samples(folder) for folder in dumps]
    expected, actual = counts
    if not expected or not actual:
        return None
    return SampleComparison(expected.total(), actual.total(), (expected & actual).total())


def measure_dump(folder: Path) -> int:
    """Return the size of the dumps below a folder in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*.pt"))


def _count_samples(folder: Path) -> Counter[str] | None:
    samples: Counter[str] = Counter()
    for batch in sorted(folder.glob("rank-*/epoch-*.step-*.batch-*")):
        leaves = [
            read_dump(batch / entry["file"])["value"]
            for entry in sorted(read_index(batch), key=lambda entry: str(entry["name"]))
            if entry["kind"] == "batch"
        ]
        columns = [leaf for leaf in leaves if _has_samples(leaf)]
        if len({len(column) for column in columns}) != 1:
            return None
        samples.update(digest_value(list(sample)) for sample in zip(*columns, strict=True))
    return samples


def _has_samples(leaf: object) -> bool:
    return isinstance(leaf, list) or (isinstance(leaf, Tensor) and leaf.dim() > 0)
