"""The sequence of operations of each result, in torch operations: the specification.

The compiled kernels of ``real.h`` give the same bits. These functions serve where there is none: on
other devices, and without a compiler. Each has the arguments of its counterpart in ``kernels.py``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.ops.portability.functions import FUNCTIONS
from lightning_d9m.ops.portability.roots import find_root

LANES, BLOCK, DEPTH, COUNTERS = 32, 4096, 256, 16
_MASK = 0xFFFFFFFF


def add_product(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """Return left * right + total: of float32 numbers rounded once, of float64 numbers twice."""
    if total.dtype == torch.float64:
        return left * right + total
    # The product is exact. A last bit of 1 of an inexact sum lets it be rounded again.
    product, wide = left.double() * right.double(), total.double()
    result = product + wide
    given = result - product
    error = (product - (result - given)) + (wide - given)
    bits = result.view(torch.int64)
    nearer = torch.where((error > 0) == (bits >= 0), bits + 1, bits - 1)
    odd = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    return torch.where(odd, nearer, bits).view(torch.float64).float()


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return products of matrices ``[..., rows, terms]`` and ``[..., terms, columns]``.

    In each block of ``DEPTH`` terms, one product after the other is added to 0; then one block
    after the other is added.
    """
    blocks = []
    for rows, columns in zip(left.split(DEPTH, -1), right.split(DEPTH, -2), strict=True):
        total = rows.new_zeros(()).expand(*rows.shape[:-1], columns.shape[-1])
        for k in range(rows.shape[-1]):
            total = add_product(rows[..., k : k + 1], columns[..., k : k + 1, :], total)
        blocks.append(total)
    return _add_in_order(blocks)


def _add_in_order(blocks: list[Tensor]) -> Tensor:
    total = blocks[0]
    for one in blocks[1:]:
        total = total + one
    return total


def add_rows(terms: Tensor) -> Tensor:
    """Return the sums of rows ``[..., terms]``.

    In each block of ``BLOCK`` terms, term i is added to lane i % ``LANES``, which begins with 0;
    then the upper half of the lanes is added to the lower half, until one is left. One block after
    the other is added.
    """
    blocks = []
    for block in terms.split(BLOCK, -1):
        padded = torch.nn.functional.pad(block, (0, -block.shape[-1] % LANES))
        lanes = terms.new_zeros((*terms.shape[:-1], LANES))
        for chunk in padded.split(LANES, -1):
            lanes = lanes + chunk
        while lanes.shape[-1] > 1:
            lower, upper = lanes.chunk(2, -1)
            lanes = lower + upper
        blocks.append(lanes[..., 0])
    return _add_in_order(blocks)


def find_terms(kind: str, x: Any, y: Any, center: Any, factor: Any) -> Tensor:
    """Return the terms of a sum."""
    terms: dict[str, Callable[[], Tensor]] = {
        "values": lambda: x,
        "squares": lambda: x * x,
        "deviations": lambda: (x - center) * (x - center),
        "products": lambda: x * y,
        "normalized": lambda: x * ((y - center) * factor),
    }
    return terms[kind]()


def apply(name: str, *inputs: Tensor) -> Tensor:
    """Compute an elementary function in float64, and round the results."""
    return FUNCTIONS[name](*(one.double() for one in inputs)).to(inputs[0].dtype)


def add_running(x: Tensor, dim: int) -> Tensor:
    """Return the sum up to each element, in float64 and in order, rounded."""
    total, sums = x.new_zeros((), dtype=torch.float64), []
    for one in x.double().unbind(dim):
        total = total + one
        sums.append(total)
    return torch.stack(sums, dim).to(x.dtype)


def softmax(x: Tensor, logarithm: bool) -> Tensor:
    """Return exp(x - greatest), rounded, over the sum of these; or the logarithm, rounded once."""
    gaps = x.double() - x.amax(1, keepdim=True).double()
    terms = FUNCTIONS["exp"](gaps).to(x.dtype)
    total = add_rows(terms).unsqueeze(1)
    return (gaps - FUNCTIONS["log"](total.double())).to(x.dtype) if logarithm else terms / total


def softmax_backward(gradient: Tensor, y: Tensor, logarithm: bool) -> Tensor:
    """Return (gradient - sum(gradient * y)) * y, or gradient - exp(y) * sum(gradient)."""
    if logarithm:
        return gradient - apply("exp", y) * add_rows(gradient).unsqueeze(1)
    return (gradient - add_rows(gradient * y).unsqueeze(1)) * y


def _mean(terms: Tensor) -> Tensor:
    return divide(add_rows(terms), terms.shape[-1]).unsqueeze(-1)


def divide(values: Tensor, number: float) -> Tensor:
    """Divide by a number: CUDA multiplies by its reciprocal unless it is a tensor."""
    return values / torch.full(
        (1,) * values.dim(), number, dtype=values.dtype, device=values.device
    )


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x - mean) * scale * weight + bias of rows, the means, and 1 / sqrt(var + eps)."""
    mean = _mean(x)
    gaps = x - mean
    scale = torch.ones_like(mean) / find_root(
        _mean(gaps * gaps) + torch.tensor(eps, dtype=torch.float64, device="cpu").to(x)
    )
    out = gaps * scale
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean[:, 0], scale[:, 0]


def layer_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient for x, and the terms of that for the weight."""
    scale = scales.unsqueeze(1)
    h = (x - means.unsqueeze(1)) * scale
    g = gradient if weight is None else gradient * weight
    return scale * ((g - _mean(g)) - h * _mean(g * h)), gradient * h


def _over_planes(values: Tensor | None, default: float, x: Tensor) -> Tensor:
    return x.new_full((1, 1, 1), default) if values is None else values.view(1, -1, 1)


def batch_norm(
    x: Tensor, means: Tensor, scales: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return (x - mean) * scale * weight + bias of planes ``[batch, channels, area]``."""
    mean, scale = (one.view(1, -1, 1) for one in (means, scales))
    return ((x - mean) * scale) * _over_planes(weight, 1.0, x) + _over_planes(bias, 0.0, x)


def batch_norm_backward(gradient: Tensor, x: Tensor, *given: Tensor) -> Tensor:
    """Return ((gradient - first) - ((x - mean) * scale) * second) * factor."""
    mean, scale, first, second, factor = (one.view(1, -1, 1) for one in given)
    return ((gradient - first) - ((x - mean) * scale) * second) * factor


def draw(key: int, count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return uniform numbers in [0, 1) of 24 or 53 bits, of Philox4x32-10.

    ``COUNTERS`` counters give a block of words: the first words of all, then the second ones. A
    number of 53 bits takes a word of the first half of a block, and one of the second half.
    """
    each = COUNTERS * (4 if dtype == torch.float32 else 2)
    size = -(-count // each)
    counter = torch.arange(size * COUNTERS, device=device).view(size, COUNTERS)
    x, y, z, w = counter & _MASK, counter >> 32, counter * 0, counter * 0
    first, second = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        left, right = x * 0xD2511F53, z * 0xCD9E8D57
        x = ((right >> 32) & _MASK) ^ y ^ first
        z = ((left >> 32) & _MASK) ^ w ^ second
        y, w = right & _MASK, left & _MASK
        first, second = (first + 0x9E3779B9) & _MASK, (second + 0xBB67AE85) & _MASK
    words = torch.stack([x, y, z, w], 1).flatten(1)
    if dtype == torch.float32:
        drawn = (words >> 8).to(dtype) * 2.0**-24
    else:
        high, low = (words[:, :each] >> 5).to(dtype), (words[:, each:] >> 6).to(dtype)
        drawn = (high * 2.0**26 + low) * 2.0**-53
    return drawn.flatten()[:count]


def take_adam_step(
    x: Tensor,
    gradient: Tensor,
    state: tuple[Tensor, Tensor, Tensor | None],
    *,
    maximize: bool,
    decoupled: bool,
    decay: float,
    factors: tuple[float, float],
    step: float,
    root: float,
    eps: float,
) -> None:
    """Take a step of Adam or AdamW.

    Args:
        x: The parameter.
        gradient: Its gradient.
        state: The averages of the gradients and of their squares, and the greatest of these.
        maximize: Whether the step goes up.
        decoupled: Whether the decay multiplies the parameter, and is not a part of the gradient.
        decay: 1 - lr * weight_decay, or the weight decay.
        factors: 1 - beta1, and beta2.
        step: lr / (1 - beta1**t).
        root: sqrt(1 - beta2**t).
        eps: A number that is added to the root.
    """
    given = [decay, *factors, 1.0 - factors[1], step, root, eps]
    rounded = torch.tensor(given, dtype=torch.float64, device="cpu").to(x)
    decay_of, first, kept, added, length, root_of, least = rounded.unbind()
    average, squares, most = state
    gradient = -gradient if maximize else gradient
    y = x * decay_of if decoupled else x
    if not decoupled and decay:
        gradient = gradient + y * decay_of
    average.copy_(average + (gradient - average) * first)
    squares.copy_(squares * kept + (gradient * gradient) * added)
    if most is not None:
        squares = most.copy_(torch.where(squares > most, squares, most))
    x.copy_(y - length * (average / (find_root(squares) / root_of + least)))


def take_sgd_step(
    x: Tensor,
    gradient: Tensor,
    momenta: Tensor | None,
    *,
    maximize: bool,
    nesterov: bool,
    starts: bool,
    decay: float,
    momentum: float,
    added: float,
    step: float,
) -> None:
    """Take a step of SGD; ``added`` is 1 - dampening. The first step ``starts`` the momenta."""
    given = torch.tensor([decay, momentum, added, step], dtype=torch.float64, device="cpu")
    decay_of, factor, share, length = given.to(x).unbind()
    gradient = -gradient if maximize else gradient
    gradient = gradient + x * decay_of if decay else gradient
    if momenta is not None:
        momenta.copy_(gradient if starts else momenta * factor + gradient * share)
        gradient = gradient + momenta * factor if nesterov else momenta
    x.copy_(x - length * gradient)
