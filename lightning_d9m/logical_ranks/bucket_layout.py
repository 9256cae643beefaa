"""Assign gradients to buckets by the order, size, dtype and device of the parameters alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_d9m.errors import SettingError

# Vectorized reductions (the norm of a gradient that is clipped) add in a different order at an
# address that is not aligned like a separate allocation.
ALIGNMENT_BYTES = 64
# A gradient of at least this size is packed as soon as it arrives: it is still in the cache, and
# the next gradient reuses its memory. Smaller ones are packed in one call, which costs less, and so
# they follow the large ones in their bucket.
_LARGE_BYTES = 2**16
# The first bucket is small, as in DDP, so that the first reduction starts early.
_FIRST_BYTES = 2**20


@dataclass(frozen=True)
class SumOptions:
    """The rules of a sum of gradients, as `LogicalGradients` takes them.

    Attributes:
        divisor: Divides the sum, once.
        sparse_as_dense: Whether sparse gradients are summed as dense ones.
        adds: Whether a gradient may be that of the last step, to which autograd has added.
        sent_as: The dtype to which gradients of float32 and float64 are rounded before they are
            sent; None rounds none.
    """

    divisor: int
    sparse_as_dense: bool = False
    adds: bool = False
    sent_as: torch.dtype | None = None


@dataclass(slots=True)
class Slot:
    """One parameter's range of a bucket's buffer, and the view of it."""

    name: str
    parameter: Parameter
    start: int
    stop: int
    view: Tensor

    def describe(self) -> str:
        """Return the name and layout, which must be the same on every process."""
        return f"{self.name} {tuple(self.view.shape)} {self.view.dtype} {self.start}"


@dataclass(slots=True)
class Bucket:
    """A flat buffer and its slots.

    Attributes:
        flat: The buffer; slots begin at multiples of 64 bytes, with zeros between. One flag per
            slot follows.
        slots: One slot per parameter, the large parameters first.
        large: The number of large parameters.
    """

    flat: Tensor
    slots: list[Slot]
    large: int

    @property
    def flags(self) -> Tensor:
        """The elements after the last slot."""
        return self.flat[self.slots[-1].stop :]


def lay_out(parameters: Sequence[tuple[str, Parameter]], bucket_bytes: int) -> list[Bucket]:
    """Lay out buckets in reverse order of registration, in which gradients tend to arrive.

    Args:
        parameters: Names and parameters in their order of registration.
        bucket_bytes: Size at which a bucket is closed, in bytes. The first bucket of each dtype and
            device is closed at 1 MiB. With 0, each parameter has its own bucket.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[str, Parameter]]] = {}
    for name, parameter in reversed(parameters):
        by_kind.setdefault((parameter.device, parameter.dtype), []).append((name, parameter))
    return [
        _make_bucket(chunk, device, dtype)
        for (device, dtype), members in by_kind.items()
        for chunk in _chunks(members, bucket_bytes)
    ]


def _chunks(
    members: Sequence[tuple[str, Parameter]], limit: int
) -> Iterator[list[tuple[str, Parameter]]]:
    """Yield chunks of at least ``limit`` bytes, the first of at least ``_FIRST_BYTES``."""
    chunk: list[tuple[str, Parameter]] = []
    held = 0
    enough = min(limit, _FIRST_BYTES)
    for name, parameter in members:
        chunk.append((name, parameter))
        held += parameter.numel() * parameter.element_size()
        if held >= enough:
            yield chunk
            chunk, held, enough = [], 0, limit
    if chunk:
        yield chunk


def _make_bucket(
    members: Sequence[tuple[str, Parameter]], device: torch.device, dtype: torch.dtype
) -> Bucket:
    step = max(1, ALIGNMENT_BYTES // members[0][1].element_size())
    members = sorted(members, key=lambda member: not _is_large(member[1]))
    starts = [0]
    for _, parameter in members:
        starts.append(starts[-1] + -(-parameter.numel() // step) * step)
    flat = torch.zeros(starts[-1] + len(members), dtype=dtype, device=device)
    slots = []
    for (name, parameter), start, stop in zip(members, starts[:-1], starts[1:], strict=True):
        view = view_like(flat, start, parameter)
        slots.append(Slot(name, parameter, start, stop, view))
    large = sum(_is_large(parameter) for _, parameter in members)
    return Bucket(flat, slots, large)


def _is_large(parameter: Parameter) -> bool:
    return parameter.nbytes >= _LARGE_BYTES


def view_like(flat: Tensor, start: int, parameter: Parameter) -> Tensor:
    """Return a view with the parameter's shape and, for channels_last, its strides."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(parameter.dim())
    if last is not None and parameter.is_contiguous(memory_format=last):
        return flat.as_strided(parameter.shape, parameter.stride(), start)
    return flat[start : start + parameter.numel()].view(parameter.shape)


def check_options(*, op: str, bucket_bytes: int, compression: str | None = None) -> None:
    """Check the arguments of a sum of gradients.

    Raises:
        SettingError: A value is not allowed.
    """
    if op not in {"average", "sum"}:
        raise SettingError(f"op={op!r} is not known: pass 'average' or 'sum'.")
    if type(bucket_bytes) is not int or bucket_bytes < 0:
        raise SettingError(
            f"bucket_bytes={bucket_bytes!r} is not allowed: pass a whole number, 0 or more."
        )
    if compression not in {None, "fp16", "bf16"}:
        raise SettingError(
            f"compression={compression!r} is not known: pass 'fp16', 'bf16' or None."
        )


def refuse_second_gradient(name: str) -> NoReturn:
    """Raise an error about a gradient that came after the sum had taken the first one."""
    raise SettingError(
        f"The parameter {name!r} got a second gradient in one backward pass, after its first was "
        "added to the sum. Reentrant activation checkpointing of a shared parameter does that: "
        "pass use_reentrant=False to torch.utils.checkpoint."
    )


def refuse_removed(name: str) -> NoReturn:
    """Raise an error about a gradient that another hook has taken away."""
    raise SettingError(
        f"The gradient of {name!r} was removed before the ranks could reduce it. An "
        "optimizer that steps inside a backward hook works on one rank only: let Lightning "
        "step it."
    )
