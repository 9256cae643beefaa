"""Gradients so large that they are summed where autograd has put them, without a copy."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_d9m.logical_ranks.accumulation import GradientFold
from lightning_d9m.logical_ranks.bucket_layout import ALIGNMENT_BYTES, Slot, view_like
from lightning_d9m.logical_ranks.exchange import RootExchange, end_sum

# One message for each costs less than a copy of it.
_WHOLE_BYTES = 2**20
_DTYPES = (torch.float32, torch.float64)  # halves are summed as float32
# What autograd adds to in place is the same object, so it keeps its attributes.
_MARK = "d9m_sum_of_a_step"


class WholeGradient:
    """A gradient on its way, which has no place in a bucket.

    It has the interface of a `RootBucket` with one slot. The sum is in the memory of the last root.

    ``is_whole`` is true of the parameter; the index is that by which the `GradientFold` counts
    it.
    """

    large = 1

    def __init__(
        self, name: str, parameter: Parameter, exchange: RootExchange, divisor: int, index: int
    ) -> None:
        layout = view_like(torch.empty(parameter.numel(), device="meta"), 0, parameter)
        self.slots = [Slot(name, parameter, 0, parameter.numel(), layout)]
        self.indices: Sequence[int] = [index]
        self.fired: set[int] = set()
        self.packed: set[int] = set()
        self._stride = layout.stride()
        self._parameter = parameter
        self._exchange = exchange
        self._divisor = divisor
        self._is_alone = exchange.blocks.processes == 1
        self._roots: list[Tensor] = []
        self._wait: Callable[[], None] | None = None
        self._was_missing: bool | None = None
        self._late: Tensor | None = None  # the sum, if no logical rank of here has a gradient

    @property
    def is_complete(self) -> bool:
        """True once the gradient has arrived."""
        return bool(self.fired)

    def describe(self) -> Iterator[str]:
        """Yield what must be the same on every process."""
        slot = self.slots[0]
        yield f"{slot.name} {tuple(slot.view.shape)} {self._parameter.dtype} whole"

    def is_stale(self, _position: int, gradient: Tensor) -> bool:
        """Return whether a gradient was added to the sum of the last step."""
        return hasattr(gradient, _MARK)

    def fold_small(self, lacking: Collection[int], _fold: GradientFold) -> None:
        """Note whether the next logical rank has a gradient; ``pack_small`` does, of the last."""
        self._was_missing = bool(lacking) and self._was_missing is not False

    pack_small = fold_small

    def pack_one(self, position: int, gradient: Tensor | None, fold: GradientFold) -> None:
        """Add the gradient of the last logical rank, and take the memory of each root."""
        part = self.indices[0]
        if gradient is not None and not fold.merges:
            gradient = self._take_over(gradient)
        count = len(self._exchange.roots[self._exchange.process])
        values = [held[part] for held in fold.held[: count - 1]]
        for held in fold.held[: count - 1]:
            held[part] = None
        values.append(
            fold.fold_one(
                part,
                gradient,
                end=partial(end_sum, divisor=self._divisor) if self._is_alone else None,
            )
        )
        self._roots = [self._settle(value) for value in values]
        self.packed.add(position)

    def _take_over(self, gradient: Tensor) -> Tensor:
        """Return a gradient that nothing else refers to, or a copy of it."""
        is_ours = not gradient.requires_grad and _count_uses(gradient) <= _USES
        return self._settle(gradient) if is_ours else self._copy(gradient)

    def _settle(self, value: Tensor | None) -> Tensor:
        """Return a value in the memory that the sum may have at every number of processes."""
        if value is None:
            return torch.zeros_like(self._make_empty())
        is_settled = (
            value.stride() == self._stride
            and value.dtype == self._parameter.dtype
            and value.data_ptr() % ALIGNMENT_BYTES == 0
        )
        return value if is_settled else self._copy(value)

    def _copy(self, value: Tensor) -> Tensor:
        return self._make_empty().copy_(value)

    def _make_empty(self) -> Tensor:
        return torch.empty_strided(self._parameter.shape, self._stride, dtype=self._parameter.dtype)

    def start(self, *, in_background: bool) -> None:
        """Start the exchange of the roots."""
        if self._is_alone:
            return
        roots = [root.as_strided((root.numel(),), (1,)) for root in self._roots]
        self._wait = self._exchange.submit(
            roots, roots[-1], self._divisor, in_background=in_background
        )

    def finish(self) -> None:
        """Wait for the sum, and set the gradient to it."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        gradient = self._roots[-1]
        setattr(gradient, _MARK, True)
        self._roots = []
        self._late = gradient if self._was_missing else None
        if self._late is None:
            self._parameter.grad = gradient
        self._was_missing = None
        self.fired.clear()
        self.packed.clear()

    @property
    def is_missing(self) -> bool:
        """Whether all logical ranks of here lack the gradient."""
        return self._late is not None

    def settle(self, *, is_found: bool) -> None:
        """Set a gradient that is missing here, if another process has it."""
        if self._late is not None and is_found:
            self._parameter.grad = self._late
        self._late = None


class MissingGradients:
    """Finds the whole gradients that no logical rank has, by one small sum.

    The gradients are all whole ones, the same on every process.
    """

    def __init__(self, gradients: Sequence[WholeGradient], exchange: RootExchange) -> None:
        self._gradients = gradients
        self._exchange = exchange

    def settle(self) -> None:
        """Set the gradients that only other processes have, when all sums have ended."""
        if not self._gradients:
            return
        count = len(self._exchange.roots[self._exchange.process])
        roots = [torch.zeros(len(self._gradients)) for _ in range(count)]
        missing = [gradient.is_missing for gradient in self._gradients]
        roots[-1].copy_(torch.tensor(missing, dtype=torch.bool).logical_not())
        self._exchange.start(roots, roots[-1]).finish()
        for gradient, found in zip(self._gradients, roots[-1].tolist(), strict=True):
            gradient.settle(is_found=bool(found))


def is_whole(parameter: Parameter) -> bool:
    """Return whether the gradient of a parameter is summed without a bucket."""
    return (
        parameter.device.type == "cpu"
        and parameter.dtype in _DTYPES
        and parameter.nbytes >= _WHOLE_BYTES
    )


def _count_uses(tensor: Tensor) -> int:
    """Return how many objects share the memory of a tensor."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))  # noqa: SLF001 - torch has no public counter


_USES = _count_uses(torch.empty(1))  # of memory that nothing shares
