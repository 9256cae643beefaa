"""Fused steps of optimizers, taken apart by torch's own code for single tensors."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from lightning_d9m.portability.registry import composed


def _step(
    function: Callable[..., None],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    *state: Sequence[Tensor],
    lr: Any,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **options: Any,
) -> None:
    """Take the step that an optimizer takes with ``foreach=False``."""
    if found_inf is not None and found_inf.item():
        return
    if grad_scale is not None:
        grads = [grad / grad_scale for grad in grads]
    if function is not sgd:  # it counts the step that the caller has counted
        state = (*state[:-1], [one - 1 for one in state[-1]])
    rate = lr.item() if isinstance(lr, Tensor) else lr
    function(list(params), list(grads), *state, foreach=False, fused=False, lr=rate, **options)


for _function in (adam, adamw, adagrad):
    composed(f"_fused_{_function.__name__}_")(partial(_step, _function))


@composed("_fused_sgd_")
def fused_sgd(
    params: Any, grads: Any, buffers: Any, *, is_first_step: bool, **options: Any
) -> None:
    """A step of SGD, which fills the buffers of the momentum at first."""
    found: list[Any] = [None] * len(params) if is_first_step or not buffers else list(buffers)
    _step(sgd, params, grads, found, **options)
    for buffer, values in zip(buffers, found, strict=False):
        if values is not None and values is not buffer:
            buffer.copy_(values)


@composed("_amp_foreach_non_finite_check_and_unscale_")
def unscale(grads: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply gradients, and tell whether one is infinite or NaN."""
    for grad in grads:
        if not bool(grad.isfinite().all()):
            found_inf.fill_(1.0)
        grad.mul_(inverse_scale)
