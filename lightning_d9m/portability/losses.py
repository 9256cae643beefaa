"""Composed rules for operations that torch does not take apart itself."""

from collections.abc import Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.patches.catalog.catalog import OPS
from lightning_d9m.portability.layers import add_chosen
from lightning_d9m.portability.registry import RULES, UnsupportedError, composed


def _fractional_backward(
    dims: int, gradient: Tensor, values: Tensor, kernel: Any, sizes: Any, indices: Tensor
) -> Tensor:
    del kernel, sizes
    return add_chosen(dims, gradient, values, indices)


for _dims in (2, 3):
    RULES[f"fractional_max_pool{_dims}d_backward"] = partial(_fractional_backward, _dims)


@composed("_trilinear")
def trilinear(
    first: Tensor,
    second: Tensor,
    third: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The sum of products of three tensors."""
    del unroll_dim
    result = None
    for values, dims in ((first, expand1), (second, expand2), (third, expand3)):
        for dim in sorted(dims):
            values = values.unsqueeze(dim)  # noqa: PLW2901
        result = values if result is None else result * values
    assert result is not None
    return result.sum(list(sumdim)) if sumdim else result


@composed("_weight_norm_interface_backward")
def weight_norm_backward(
    gradient: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """The gradients of weight normalization."""
    others = [one for one in range(v.dim()) if one != dim]
    shape = [1] * v.dim()
    shape[dim] = v.shape[dim]
    norms = norms.view(shape)
    total = (gradient * v).sum(others, keepdim=True) / norms
    direction = v / norms
    return (gradient - direction * total) * (g / norms), total.view(g.shape)


@composed("softshrink")
def softshrink(values: Tensor, lambd: float = 0.5) -> Tensor:
    """The values, nearer to 0; torch 2.4's decomposition gives other zeros than later ones."""
    return torch.where(values.abs() > lambd, values - values.sign() * lambd, values * 0)


@composed("hardshrink_backward", "softshrink_backward")
def shrink_backward(gradient: Tensor, values: Tensor, lambd: float) -> Tensor:
    """The gradient outside of the interval that is mapped to 0."""
    return torch.where(values.abs() <= lambd, 0.0, gradient)


@composed("rrelu_with_noise")
def rrelu(
    values: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Tensor:
    """The randomized leaky ReLU; it writes its slopes into ``noise``."""
    if not training:
        return torch.where(values <= 0, values * ((lower + upper) / 2), values)
    drawn = torch.empty_like(values).uniform_(lower, upper, generator=generator)
    noise.copy_(torch.where(values <= 0, drawn, 1.0))
    return values * noise


@composed("rrelu_with_noise_")
def rrelu_in_place(values: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The randomized leaky ReLU, in place."""
    return values.copy_(rrelu(values.clone(), noise, *args, **kwargs))


@composed("_cdist_forward")
def cdist(left: Tensor, right: Tensor, p: float, mode: int | None) -> Tensor:
    """The distances of all pairs."""
    del mode
    gaps = left.unsqueeze(-2) - right.unsqueeze(-3)
    return torch.linalg.vector_norm(gaps, p, dim=-1)  # type: ignore[no-any-return]


@composed("_cdist_backward")
def cdist_backward(
    gradient: Tensor, left: Tensor, right: Tensor, p: float, distances: Tensor
) -> Tensor:
    """The gradient of the distances for the left points."""
    gaps = left.unsqueeze(-2) - right.unsqueeze(-3)
    if p == 0:
        slopes = torch.zeros_like(gaps)  # a number of coordinates that differ
    elif p == 1:
        slopes = gaps.sign()
    elif p == float("inf"):
        slopes = gaps.sign() * (gaps.abs() == distances.unsqueeze(-1))
    else:
        safe = torch.where(distances == 0, 1.0, distances).unsqueeze(-1)
        slopes = gaps.sign() * (gaps.abs() / safe) ** (p - 1)
        slopes = torch.where(distances.unsqueeze(-1) == 0, 0.0, slopes)
    return (gradient.unsqueeze(-1) * slopes).sum(-2)


def _scale(gradient: Tensor, slopes: Tensor, reduction: int, shape: torch.Size) -> Tensor:
    if reduction == 1:
        slopes = slopes / len(slopes)
    shaped = gradient if not gradient.dim() else gradient.view(-1, 1)
    result: Tensor = slopes * shaped
    return result.view(shape)


@composed("multi_margin_loss_backward")
def multi_margin_backward(
    gradient: Tensor,
    values: Tensor,
    target: Tensor,
    p: float,
    margin: float,
    weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """The gradient of the multi-class margin loss."""
    rows = values.view(-1, values.shape[-1])
    own = target.view(-1, 1)
    gaps = margin - rows.gather(1, own) + rows
    slopes = torch.where(gaps > 0, gaps * 2 if p == 2 else torch.ones_like(gaps), 0.0)
    slopes = slopes.scatter(1, own, 0.0) / rows.shape[1]
    if weight is not None:
        slopes = slopes * weight[own]
    slopes = slopes.scatter(1, own, -slopes.sum(1, keepdim=True))
    return _scale(gradient, slopes, reduction, values.shape)


@composed("multilabel_margin_loss_forward")
def multilabel_margin(values: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The multi-label margin loss, and 1 for each class that is a label.

    Torch's decomposition adds terms of class 0 for each place after the last label.
    """
    rows, labels = (one.reshape(-1, values.shape[-1]) for one in (values, target))
    valid = (labels >= 0).int().cumprod(1).bool()
    index = torch.where(valid, labels, 0)
    classes = torch.arange(rows.shape[1], device=rows.device)
    is_label = ((index.unsqueeze(2) == classes) & valid.unsqueeze(2)).any(1)
    gaps = 1 - rows.gather(1, index).unsqueeze(2) + rows.unsqueeze(1)
    counted = valid.unsqueeze(2) & ~is_label.unsqueeze(1) & (gaps > 0)
    losses = torch.where(counted, gaps, 0.0).sum((1, 2)) / rows.shape[1]
    if reduction:
        losses = losses.mean() if reduction == 1 else losses.sum()
    elif values.dim() < 2:
        losses = losses.view(())
    return losses, is_label.to(values.dtype).view(target.shape)


@composed("multilabel_margin_loss_backward")
def multilabel_margin_backward(
    gradient: Tensor, values: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Tensor:
    """The gradient of the multi-label margin loss."""
    rows, labels = (one.view(-1, values.shape[-1]) for one in (values, target))
    is_label = is_target.view(rows.shape) != 0
    valid = (labels >= 0).int().cumprod(1).bool()
    index = labels.clamp(min=0)
    gaps = 1 - rows.gather(1, index).unsqueeze(2) + rows.unsqueeze(1)
    active = (gaps > 0) & valid.unsqueeze(2) & ~is_label.unsqueeze(1)
    counts = active.sum(1)
    counts = counts.scatter_add(1, index, -active.sum(2))
    return _scale(gradient, counts.to(values.dtype) / rows.shape[1], reduction, values.shape)


@composed("_ctc_loss")
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """The losses, and the forward variables of each state and step (Graves et al. 2006)."""
    del zero_infinity
    steps, batch, _ = log_probs.shape
    times, counts = (
        one.tolist() if isinstance(one, Tensor) else list(one)
        for one in (input_lengths, target_lengths)
    )
    size = max(targets.shape[1] if targets.dim() > 1 else max(counts, default=0), 0)
    labels = torch.full((batch, 2 * size + 1), blank, device=log_probs.device)
    given = targets if targets.dim() > 1 else targets.split(counts)
    for row, count in enumerate(counts):
        labels[row, 1 : 2 * count : 2] = given[row][:count].to(labels)
    emitted = log_probs.gather(2, labels.expand(steps, -1, -1))
    jumps = torch.zeros_like(labels, dtype=torch.bool)
    jumps[:, 2:] = (labels[:, 2:] != labels[:, :-2]) & (labels[:, 2:] != blank)
    nowhere = torch.full_like(emitted[0], -torch.inf)
    state = nowhere.clone()
    state[:, :2] = emitted[0][:, :2]
    for row, count in enumerate(counts):
        state[row, 2 * count + 1 :] = -torch.inf
    path = [state]
    for step in range(1, steps):
        ways = [state, torch.cat([nowhere[:, :1], state[:, :-1]], 1)]
        jumped = torch.cat([nowhere[:, :2], state[:, :-2]], 1)[:, : state.shape[1]]
        ways.append(torch.where(jumps, jumped, -torch.inf))
        top = torch.maximum(torch.maximum(ways[0], ways[1]), ways[2])
        top = torch.where(top == -torch.inf, 0.0, top)
        grown = [(way - top).exp() for way in ways]
        state = (grown[0] + grown[1] + grown[2]).log() + top + emitted[step]
        for row, (time, count) in enumerate(zip(times, counts, strict=True)):
            state[row, 2 * count + 1 if step < time else 0 :] = -torch.inf
        path.append(state)
    alpha = torch.stack(path, 1)
    losses = []
    for row, (time, count) in enumerate(zip(times, counts, strict=True)):
        ends = alpha[row, time - 1, max(2 * count - 1, 0) : 2 * count + 1]
        losses.append(-torch.logsumexp(ends, 0))
    return torch.stack(losses), alpha


@composed("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums or means of the rows of each bag, and which bag each index is in."""
    del by_frequency
    if sparse:
        raise UnsupportedError("Its gradient is a sparse tensor: pass sparse=False")
    if mode > 1:
        raise UnsupportedError("Mode 'max' has no rule: use mode 'sum' or 'mean'")
    ends = (
        offsets[1:]
        if include_last_offset
        else torch.cat([offsets[1:], offsets.new_tensor([len(indices)])])
    )
    starts = offsets[: len(ends)]
    bags = torch.arange(len(ends), device=indices.device).repeat_interleave(ends - starts)
    kept = indices != padding_idx
    sizes = torch.zeros_like(starts).index_add(0, bags, kept.to(starts.dtype))
    rows = weight[indices]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    result = weight.new_zeros((len(ends), weight.shape[1])).index_add(0, bags[kept], rows[kept])
    if mode == 1:
        result = result / sizes.clamp(min=1).unsqueeze(1)
    return result, bags, sizes, torch.zeros_like(sizes)


@composed("_embedding_bag_backward")
def embedding_bag_backward(
    gradient: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bags: Tensor,
    sizes: Tensor,
    maxima: Tensor,
    count: int,
    by_frequency: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    """The gradient of the rows."""
    del offsets, maxima, sparse
    if mode == 1:
        gradient = gradient / sizes.clamp(min=1).unsqueeze(1)
    rows = gradient[bags]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    backward = torch.ops.aten.embedding_dense_backward
    return backward(rows, indices, count, padding_idx, by_frequency)  # type: ignore[no-any-return]


@composed("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    gradient: Tensor, indices: Tensor, bags: Tensor, sizes: Tensor, maxima: Tensor, *args: Any
) -> Tensor:
    """The gradient of the rows, as torch 2.4 calls it."""
    count, by_frequency, mode, *rest = args
    given = (gradient, indices, sizes, bags, sizes, maxima, count, by_frequency, mode, False)
    return embedding_bag_backward(*given, *rest)


@composed("linalg_qr")
def qr(matrix: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """The reduced QR decomposition of a matrix, by Gram and Schmidt, twice for each column."""
    if mode != "reduced" or matrix.dim() != 2:
        raise UnsupportedError(f"linalg_qr of shape {tuple(matrix.shape)}, mode {mode!r}")
    wide = matrix.double()
    rows, columns = wide.shape
    size = min(rows, columns)
    q, r = wide.new_zeros((rows, size)), wide.new_zeros((size, columns))
    for column in range(size):
        vector = wide[:, column]
        if column:
            for _ in range(2):
                part = q[:, :column].t().mv(vector)
                vector = vector - q[:, :column].mv(part)
                r[:column, column] += part
        length = torch.linalg.vector_norm(vector)
        r[column, column] = length
        q[:, column] = vector / length
    if columns > size:
        r[:, size:] = q.t() @ wide[:, size:]
    return q.to(matrix.dtype), r.to(matrix.dtype)


def _call_patch(name: str) -> None:
    kernels = [path for op in OPS for overload, path in op.kernels.items() if overload == name]
    kernel = resolve_name(kernels[0])

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(f"{name} of these arguments")

    @composed(name)
    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel(refuse, *args, **kwargs)


for _name in ("_ctc_loss_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward"):
    _call_patch(_name)
