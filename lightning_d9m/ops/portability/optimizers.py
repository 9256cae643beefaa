"""Steps of SGD, Adam and AdamW: one kernel for each parameter, whichever loop torch chooses.

With ``foreach=True`` or ``fused=True``, and on other devices, torch takes other formulas.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.ops.portability import kernels


def _power(base: float, exponent: int) -> float:
    """Return a power by products: Python's calls the C library."""
    result = 1.0
    while exponent:
        result = result * base if exponent & 1 else result
        base, exponent = base * base, exponent >> 1
    return result


def _is_plain(*lists: Any) -> bool:
    """Return whether all numbers are float32 or float64."""
    return all(
        one.dtype in (torch.float32, torch.float64)
        for tensors in lists
        for one in tensors
        if one is not None
    )


def _unscale(
    grads: list[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None
) -> list[Tensor] | None:
    """Return the gradients without the factor of a ``GradScaler``; None if one is not finite."""
    if found_inf is not None and found_inf.item():
        return None
    return grads if grad_scale is None else [grad / grad_scale for grad in grads]


def _take_adam_steps(
    single: Callable[..., None],
    decoupled: bool,
    params: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    most: list[Tensor],
    counts: list[Tensor],
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **given: Any,
) -> None:
    finite = _unscale(grads, grad_scale, found_inf)
    if finite is None:
        return
    lists = (params, finite, averages, squares, most)
    if given.get("differentiable") or given.get("capturable") or not _is_plain(*lists):
        single(*lists, counts, grad_scale=None, found_inf=None, **given)
        return
    decoupled = given.get("decoupled_weight_decay", decoupled)
    names = ("lr", "beta1", "beta2", "weight_decay")
    lr, beta1, beta2, decay = (float(given[name]) for name in names)
    sign = -1 if given["maximize"] else 1
    shrink, decay = (1 - lr * decay, 0.0) if decoupled else (1, decay)
    with torch._C._DisableTorchDispatch():  # noqa: SLF001 - whole numbers, and our kernels
        torch._foreach_add_(counts, 1)
        for place, (x, gradient) in enumerate(zip(params, finite, strict=True)):
            step = int(counts[place].item())
            length, divisor = lr / (1 - _power(beta1, step)), math.sqrt(1 - _power(beta2, step))
            numbers = [sign, shrink, decay, 1 - beta1, beta2, 1 - beta2, length, divisor]
            kernels.compute(
                "adam",
                x=x,
                gradient=gradient,
                average=averages[place],
                squares=squares[place],
                numbers=[*numbers, given["eps"]],
                most=most[place] if given["amsgrad"] else None,
            )


def _take_sgd_steps(
    single: Callable[..., None],
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor | None],
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **given: Any,
) -> None:
    finite = _unscale(grads, grad_scale, found_inf)
    if finite is None:
        return
    if given.get("differentiable") or not _is_plain(params, finite, momenta):
        single(params, finite, momenta, grad_scale=None, found_inf=None, **given)
        return
    names = ("weight_decay", "lr", "momentum", "dampening")
    decay, lr, momentum, dampening = (float(given[name]) for name in names)
    numbers = [-1 if given["maximize"] else 1, decay, lr, momentum, 1 - dampening]
    with torch._C._DisableTorchDispatch():  # noqa: SLF001 - our kernels
        for place, (x, gradient) in enumerate(zip(params, finite, strict=True)):
            starts = bool(momentum) and momenta[place] is None
            if starts:
                momenta[place] = torch.empty_like(x)
            kernels.compute(
                "sgd",
                x=x,
                gradient=gradient,
                numbers=[*numbers, starts, given["nesterov"]],
                momenta=momenta[place] if momentum else None,
            )


def _take_fused_step(
    single: Callable[..., None],
    params: list[Tensor],
    grads: list[Tensor],
    *state: Any,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **options: Any,
) -> None:
    """Take a fused step by torch's own code for single tensors."""
    finite = _unscale(grads, grad_scale, found_inf)
    if finite is not None:
        single(params, finite, *state, grad_scale=None, found_inf=None, **options)


@contextmanager
def steps_replaced() -> Iterator[None]:
    """Take the steps of optimizers portably during the body, whichever loop is chosen."""
    saved: list[tuple[Any, str, Any]] = []
    try:
        for name in ("adam", "adamw", "sgd", "adagrad"):
            module = sys.modules[f"torch.optim.{name}"]
            single = getattr(module, f"_single_tensor_{name}", None)
            if single is None:  # since torch 2.9 AdamW is Adam
                continue
            steps = {
                "adam": partial(_take_adam_steps, single, False),
                "adamw": partial(_take_adam_steps, single, True),
                "sgd": partial(_take_sgd_steps, single),
            }
            loops = ("single_tensor", "multi_tensor", "fused") if name in steps else ("fused",)
            for loop in loops:
                if original := getattr(module, f"_{loop}_{name}", None):
                    saved.append((module, f"_{loop}_{name}", original))
                    step = steps.get(name, partial(_take_fused_step, single))
                    setattr(module, f"_{loop}_{name}", step)
        yield
    finally:
        for owner, name, original in reversed(saved):
            setattr(owner, name, original)
