"""Steps of SGD, Adam and AdamW: one kernel for each parameter, whichever loop torch chooses.

With ``foreach=True`` or ``fused=True``, and on other devices, torch takes other formulas.
"""

import math
import sys
from collections.abc import Callable, Iterator
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


def _take_steps(
    by_torch: Callable[..., None],
    step: Callable[..., None] | None,
    params: list[Tensor],
    grads: list[Tensor],
    *state: Any,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **given: Any,
) -> None:
    """Take the steps of an optimizer, by a kernel or else by torch's code for single tensors.

    ``grad_scale`` and ``found_inf`` come from a ``GradScaler``.
    """
    if found_inf is not None and found_inf.item():
        return  # as torch's fused kernels, which leave the step out
    grads = grads if grad_scale is None else [grad / grad_scale for grad in grads]
    types = {one.dtype for own in (params, grads, *state) for one in own if one is not None}
    others = given.get("differentiable") or given.get("capturable")
    if step is None or others or types - {torch.float32, torch.float64}:
        # Steps of Adagrad in lists keep the formula that their digests have.
        given |= {"fused": False, "foreach": given.get("foreach") if step is None else False}
        by_torch(params, grads, *state, **given)
    else:
        with torch._C._DisableTorchDispatch():  # noqa: SLF001 - whole numbers, and our kernels
            step(params, grads, *state, **given)


def _step_adam(decoupled: bool, *lists: list[Tensor], **given: Any) -> None:
    # `adam` and `adamw` are called with the same lists; only the meaning of the decay differs.
    *lists_of_numbers, most, counts = lists
    decoupled = given.get("decoupled_weight_decay", decoupled)  # of torch 2.7 and later
    names = ("lr", "beta1", "beta2", "weight_decay")
    lr, beta1, beta2, decay = (float(given[name]) for name in names)
    shrink, decay = (1 - lr * decay, 0.0) if decoupled else (1, decay)
    numbers = [-1 if given["maximize"] else 1, shrink, decay, 1 - beta1, beta2, 1 - beta2]
    torch._foreach_add_(counts, 1)  # whole numbers in float32, which no order can change
    for place, (x, gradient, average, squares) in enumerate(zip(*lists_of_numbers, strict=True)):
        count = int(counts[place].item())
        length, divisor = lr / (1 - _power(beta1, count)), math.sqrt(1 - _power(beta2, count))
        kernels.compute(
            "adam",
            x=x,
            gradient=gradient,
            average=average,
            squares=squares,
            numbers=[*numbers, length, divisor, given["eps"]],
            most=most[place] if given["amsgrad"] else None,
        )


def _step_sgd(params: list[Tensor], grads: list[Tensor], momenta: list[Any], **given: Any) -> None:
    names = ("weight_decay", "lr", "momentum", "dampening")
    decay, lr, momentum, dampening = (float(given[name]) for name in names)
    numbers = [-1 if given["maximize"] else 1, decay, lr, momentum, 1 - dampening]
    for place, (x, gradient) in enumerate(zip(params, grads, strict=True)):
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


def list_replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield the module, the name and the replacement of each function that optimizers call."""
    steps = {"adam": partial(_step_adam, False), "adamw": partial(_step_adam, True)}
    for name, step in {**steps, "sgd": _step_sgd, "adagrad": None}.items():
        module = sys.modules[f"torch.optim.{name}"]
        yield module, name, partial(_take_steps, getattr(module, name), step)
