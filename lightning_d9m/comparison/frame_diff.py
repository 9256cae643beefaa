"""The differences between the frames of the same batches in two runs, many batches at a time."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from lightning_d9m.comparison.probe_diff import match_layouts
from lightning_d9m.ledger.format.fields import DIGEST_BYTES
from lightning_d9m.ledger.format.probe_frames import Frames

if TYPE_CHECKING:
    from numpy import ndarray


class FrameDifference(NamedTuple):
    """The numbers of differences in some frames.

    Attributes:
        places: Number of places that differ.
        frames: Number of frames in which some differ.
        first: Index of the first such frame.
        last: Index of the last.
    """

    places: int
    frames: int
    first: int
    last: int


def order_like(expected: Frames, actual: Frames) -> Frames | None:
    """Return frames with their places in the order of another run; None if places are missing."""
    if actual.layout == expected.layout:
        return actual
    match = match_layouts((expected.layout,), (actual.layout,))
    if match.only_expected or match.only_actual:
        return None
    data = _as_pairs(actual)[:, match.actual].tobytes()
    return replace(actual, layout=expected.layout, data=data, start=0)


def find_differences(expected: Frames, actual: Frames) -> FrameDifference:
    """Count the places that differ in frames of the same layout, at least one of which does."""
    unequal = _as_pairs(expected) != _as_pairs(actual)
    differs = unequal[:, :, 0] | unequal[:, :, 1]
    (frames,) = differs.any(axis=1).nonzero()
    return FrameDifference(int(differs.sum()), len(frames), int(frames[0]), int(frames[-1]))


def _as_pairs(frames: Frames) -> "ndarray":
    """Return the digests as two integers each: an array [frames, places, 2]."""
    import numpy as np  # a comparison without differences does without it

    shape = (frames.count, frames.width // DIGEST_BYTES, 2)
    words = frames.count * shape[1] * 2
    return np.frombuffer(frames.data, "<u8", words, frames.start).reshape(shape)
