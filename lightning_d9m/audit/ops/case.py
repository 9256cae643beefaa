"""A case: one op on one shape, with its inputs and the documentation lines about it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Call: TypeAlias = Callable[[], Tensor | tuple[Tensor, ...]]
Scalar: TypeAlias = str | int | float | bool

FLOATS = ("float32", "float64", "bfloat16", "float16")


class NotHereError(Exception):
    """A case cannot run here; the message contains the reason."""


class Inputs:
    """Generator of the inputs of a case: the same numbers on every device and in every condition.

    They are drawn on the CPU, rounded to ``drawn`` and converted to ``dtype``, so the oracle in
    float64 computes with the same numbers as the other conditions.

    Args:
        device: The device of the tensors.
        dtype: The dtype of floating-point tensors.
        drawn: The dtype that the numbers are rounded to; None for ``dtype``.
    """

    def __init__(self, device: str, dtype: torch.dtype, drawn: torch.dtype | None = None) -> None:
        self.device = device
        self.dtype = dtype
        self._drawn = drawn or dtype
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        """Draw from the standard normal distribution."""
        drawn = torch.randn(shape, generator=self._generator)
        return drawn.to(self._drawn).to(self.dtype).to(self.device)

    def leaf(self, *shape: int) -> Tensor:
        """Draw a tensor that requires its gradient."""
        return self.normal(*shape).requires_grad_()

    def whole(self, high: int, *shape: int) -> Tensor:
        """Draw integers from 0 to ``high`` - 1."""
        return torch.randint(high, shape, generator=self._generator).to(self.device)

    def gradient(self, output: Tensor, *leaves: Tensor) -> Call:
        """Return a call of the backward pass of ``output``; the graph is kept."""
        given = self.normal(*output.shape)
        return lambda: torch.autograd.grad(output, leaves, given, retain_graph=True)


Make: TypeAlias = Callable[[Inputs], Call]


def called(function: Callable[..., Tensor], *shapes: Sequence[int]) -> Make:
    """Return what makes calls of a function of tensors of these shapes."""

    def make(inputs: Inputs) -> Call:
        drawn = [inputs.normal(*shape) for shape in shapes]
        return lambda: function(*drawn)

    return make


def graded(function: Callable[..., Tensor], *shapes: Sequence[int]) -> Make:
    """Return what makes backward passes of a function of tensors of these shapes."""

    def make(inputs: Inputs) -> Call:
        leaves = [inputs.leaf(*shape) for shape in shapes]
        return inputs.gradient(function(*leaves), *leaves)

    return make


@dataclass(frozen=True)
class Case:
    """One op on one shape.

    Attributes:
        op: The op: its name in the catalog if the entry covers this op only.
        parameters: The shape; unique among the op's cases.
        make: Builds the inputs and returns the measured call. It runs within the condition, because
            some ops select their kernel in the forward pass.
        documented: The lines of torch's documentation about it: each the name, a blank, and words
            that only this line of that name contains.
        entry: The name of a catalog entry that covers several ops; else empty.
        quick: Whether ``--quick`` runs it.
        dtypes: Names of the dtypes that it is defined for.
        devices: The types of device that have it; empty for all.
    """

    op: str
    parameters: Mapping[str, Scalar]
    make: Make
    documented: tuple[str, ...] = ()
    entry: str = ""
    quick: bool = True
    dtypes: tuple[str, ...] = FLOATS
    devices: tuple[str, ...] = ()

    def key(self, dtype: str) -> str:
        """Return the unique name of the case in one dtype."""
        shape = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.op}({shape}) {dtype}"
