"""One op on one shape: how its inputs are drawn, and which lines of torch's documentation it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Call: TypeAlias = Callable[[], Tensor | tuple[Tensor, ...]]
Scalar: TypeAlias = str | int | float | bool

FLOATS = ("float32", "float64", "bfloat16", "float16")


class NotHereError(Exception):
    """A case cannot be run here; the message says why."""


class Inputs:
    """Draws the inputs of a case: the same numbers on every device and in every arm.

    They are drawn on the CPU, rounded to ``drawn`` and converted to ``dtype``, so that the oracle
    in float64 computes with the very numbers that the others see.

    Args:
        device: Where the tensors are to be.
        dtype: Of floating-point tensors.
        drawn: The dtype whose rounding the numbers have; None takes ``dtype``.
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
        """Draw a tensor that asks for its gradient."""
        return self.normal(*shape).requires_grad_()

    def whole(self, high: int, *shape: int) -> Tensor:
        """Draw whole numbers from 0 to ``high`` - 1."""
        return torch.randint(high, shape, generator=self._generator).to(self.device)

    def gradient(self, output: Tensor, *leaves: Tensor) -> Call:
        """Return the backward pass of ``output`` alone; its graph is kept."""
        given = self.normal(*output.shape)
        return lambda: torch.autograd.grad(output, leaves, given, retain_graph=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op on one shape.

    Attributes:
        op: The op: its name in the catalog where it has one for itself.
        entry: Its name in the catalog where it shares that with others; empty where it does not.
        parameters: What the shape is; enough to tell the op's cases apart.
        make: Builds the inputs and returns the call that is measured. Run within the arm, because
            some ops choose their kernel in the forward pass.
        documented: Lines of torch's documentation that speak of it: the name, and words of the line
            that tell it from others of the name.
        quick: Whether ``--quick`` runs it.
        dtypes: The dtypes it is defined for, by name.
        devices: The kinds of device that have it; empty for all.
    """

    op: str
    entry: str = ""
    parameters: Mapping[str, Scalar]
    make: Callable[[Inputs], Call]
    documented: tuple[tuple[str, str], ...] = ()
    quick: bool = False
    dtypes: tuple[str, ...] = FLOATS
    devices: tuple[str, ...] = field(default=())

    def key(self, dtype: str) -> str:
        """Return the name of the case in one dtype; no two cases share it."""
        shape = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.op}({shape}) {dtype}"
