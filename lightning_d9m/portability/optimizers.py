"""Fused and ``foreach`` optimizer operations, taken apart into operations on single tensors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.portability.registry import composed


def take_apart(name: str) -> Callable[..., Any] | None:
    """Return a function for ``_foreach_NAME`` that calls ``NAME`` for each tensor."""
    base = name.removeprefix("_foreach_")
    operation: Any = getattr(torch.ops.aten, base, None)
    if base == "norm":
        operation = torch.linalg.vector_norm
    elif operation is None and base.endswith("_"):
        plain = getattr(torch.ops.aten, base.removesuffix("_"), None)
        operation = plain and (lambda one, *rest: one.copy_(plain(one, *rest)))
    if operation is None:
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        count = next(len(one) for one in args if isinstance(one, list | tuple))
        if base.startswith("pow") and not isinstance(args[0], list | tuple):
            args = ([args[0]] * count, *args[1:])
        given = [one if isinstance(one, list | tuple) else [one] * count for one in args]
        if base.startswith(("addcmul", "addcdiv")) and len(given) > 3:
            kwargs, given = {"value": given[3], **kwargs}, given[:3]
            if isinstance(kwargs["value"], Tensor):
                kwargs["value"] = kwargs["value"].tolist()
        results = []
        for place, one in enumerate(zip(*given, strict=True)):
            named = {
                key: value[place] if isinstance(value, list | tuple) else value
                for key, value in kwargs.items()
                if value is not None
            }
            if isinstance(named.get("value"), Tensor):
                named["value"] = named["value"].item()
            results.append(operation(*one, **named))
        return None if base.endswith("_") else results

    return call


def _as_number(value: Any) -> float:
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def _take_gradients(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    weight_decay: float,
    maximize: bool,
    grad_scale: Tensor | None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (place, parameter, gradient): unscaled, turned to minimize, with the weight decay."""
    for place, param in enumerate(params):
        grad = grads[place] if grad_scale is None else grads[place] / grad_scale
        grad = -grad if maximize else grad
        yield place, param, grad + param * weight_decay if weight_decay else grad


def _adam(decoupled: bool) -> Callable[..., None]:
    def step(
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        averages: Sequence[Tensor],
        squares: Sequence[Tensor],
        greatest: Sequence[Tensor],
        steps: Sequence[Tensor],
        *,
        lr: Any,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        if found_inf is not None and found_inf.item():
            return
        rate = _as_number(lr)
        added = 0.0 if decoupled else weight_decay
        for place, param, grad in _take_gradients(params, grads, added, maximize, grad_scale):
            count = steps[place].item()
            if decoupled and weight_decay:
                param.mul_(1 - rate * weight_decay)
            averages[place].lerp_(grad, 1 - beta1)
            squares[place].mul_(beta2).add_(grad * grad * (1 - beta2))
            second = squares[place]
            if amsgrad:
                second = greatest[place].copy_(torch.maximum(greatest[place], second))
            root = (second / (1 - beta2**count)).sqrt()
            param.sub_(averages[place] / (root + eps) * (rate / (1 - beta1**count)))

    return step


composed("_fused_adam_")(_adam(decoupled=False))
composed("_fused_adamw_")(_adam(decoupled=True))


@composed("_fused_sgd_")
def fused_sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """A step of SGD."""
    if found_inf is not None and found_inf.item():
        return
    for place, param, grad in _take_gradients(params, grads, weight_decay, maximize, grad_scale):
        change = grad
        if momentum:
            buffer = buffers[place]
            if is_first_step:
                buffer.copy_(grad)
            else:
                buffer.mul_(momentum).add_(grad * (1 - dampening))
            change = grad + buffer * momentum if nesterov else buffer
        param.sub_(change * _as_number(lr))


@composed("_fused_adagrad_")
def fused_adagrad(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Any,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """A step of Adagrad."""
    if found_inf is not None and found_inf.item():
        return
    for place, param, grad in _take_gradients(params, grads, weight_decay, maximize, grad_scale):
        rate = _as_number(lr) / (1 + (steps[place].item() - 1) * lr_decay)
        sums[place].add_(grad * grad)
        param.sub_(grad / (sums[place].sqrt() + eps) * rate)


@composed("_amp_foreach_non_finite_check_and_unscale_")
def unscale(grads: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply gradients, and tell whether one is infinite or NaN."""
    for grad in grads:
        if not bool(grad.isfinite().all()):
            found_inf.fill_(1.0)
        grad.mul_(inverse_scale)
