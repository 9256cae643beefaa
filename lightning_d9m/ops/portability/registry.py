"""The table of rules: which function computes an operation of torch portably; composed rules.

Rules have the arguments of the functional overloads of ``aten``, and call torch outside the mode:
they may use only what gives the same bits everywhere. A rule may return ``NotImplemented``: then
torch's decomposition serves. A *composed* rule runs under the mode, so each operation in it is
looked up itself: norms, losses, and steps of optimizers that torch does not take apart itself are
here. Operations whose arguments and results are whole numbers are torch's own.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._decomp.decompositions import _grid_sampler_2d, pw_cast_for_opmath

from lightning_d9m.ops.patches.kernels.reductions import list_lengths
from lightning_d9m.ops.patches.registration import RefusedError
from lightning_d9m.ops.portability.kernels import widen

Rule = Callable[..., Any]
_Rule = TypeVar("_Rule", bound=Rule)

RULES: dict[str, Rule] = {}
COMPOSED: dict[str, Rule] = {}


def rule(*names: str, table: dict[str, Rule] = RULES) -> Callable[[_Rule], _Rule]:
    """Register a function for operations, by their names without the namespace."""

    def register(function: _Rule) -> _Rule:
        table.update(dict.fromkeys(names, function))
        return function

    return register


composed = partial(rule, table=COMPOSED)
"""Register a function that runs under the mode."""


def along_dim(function: _Rule) -> _Rule:
    """Let a rule along a dimension see a scalar as a vector of one element."""

    @wraps(function)
    def call(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        if values.dim():
            return function(values, *args, **kwargs)
        found = function(values.view(1), *args, **kwargs)
        return tuple(one.view(()) for one in found) if isinstance(found, tuple) else found.view(())

    return cast("_Rule", call)


def differentiate(
    function: Callable[..., Tensor], gradient: Tensor, values: Tensor, *given: Any
) -> Tensor:
    """Return the gradient of a function for its first argument, by portable operations."""
    key = torch._C.DispatchKey.AutogradFunctionality  # noqa: SLF001 - no public form
    # Let autograd record the operations, although the mode runs below it.
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():  # noqa: SLF001
        leaf = values.detach().requires_grad_()
        result = function(leaf, *given)
        return torch.autograd.grad(result, leaf, gradient, materialize_grads=True)[0]


# Without the expansion of the grid to all channels, which torch's compiler joins with what follows.
composed("grid_sampler_2d")(pw_cast_for_opmath(partial(_grid_sampler_2d, _expand_grid=False)))
composed("_weight_norm_interface_backward")(torch.ops.aten._weight_norm_differentiable_backward)  # noqa: SLF001


# Torch 2.4's decomposition gives other zeros than later ones.
composed("softshrink")(
    lambda values, lambd=0.5: torch.where(
        values.abs() > lambd, values - values.sign() * lambd, values * 0
    )
)
composed("hardshrink_backward", "softshrink_backward")(
    lambda gradient, values, lambd: torch.where(values.abs() <= lambd, 0.0, gradient)
)


@composed("rrelu_with_noise")
def rrelu(
    values: Tensor, noise: Tensor, low: float = 0.125, high: float = 1 / 3, *given: Any, **more: Any
) -> Tensor:
    """The randomized leaky ReLU; it writes its slopes into ``noise``."""
    if True not in given[:1]:  # it does not train
        return torch.where(values <= 0, values * ((low + high) / 2), values)
    drawn = torch.empty_like(values).uniform_(low, high, generator=more.get("generator"))
    noise.copy_(torch.where(values <= 0, drawn, 1.0))
    return values * noise


@composed("_cdist_forward")
def cdist(left: Tensor, right: Tensor, p: float, mode: int | None) -> Tensor:
    """The distances of all pairs."""
    del mode  # by products of matrices, which cancel where two points are near
    gaps = left.unsqueeze(-2) - right.unsqueeze(-3)
    return torch.linalg.vector_norm(gaps, p, dim=-1)  # type: ignore[no-any-return]


@composed("multilabel_margin_loss_forward")
def multilabel_margin(values: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The multi-label margin loss, and 1 for each class that is a label.

    Torch's decomposition adds terms of class 0 for each place after the last label.
    """
    rows, labels = (torch.atleast_2d(one) for one in (values, target))
    valid = (labels >= 0).int().cumprod(1)
    counts = torch.zeros(rows.shape, dtype=valid.dtype, device=rows.device)
    counts = counts.scatter_add(1, labels.clamp(min=0), valid).unsqueeze(2)  # of each class
    gaps = (1 - rows.unsqueeze(2) + rows.unsqueeze(1)).relu()
    losses = torch.where(counts.mT == 0, gaps * counts, 0.0).sum((1, 2)) / rows.shape[1]
    if reduction:
        losses = losses.mean() if reduction == 1 else losses.sum()
    elif values.dim() < 2:
        losses = losses.view(())
    return losses, (counts > 0).to(values.dtype).view(target.shape)


for _name, _function in (
    ("_cdist_backward", cdist),
    ("multi_margin_loss_backward", decomposition_table[torch.ops.aten.multi_margin_loss.default]),
    ("multilabel_margin_loss_backward", lambda *given: multilabel_margin(*given[:3])[0]),
):
    composed(_name)(partial(differentiate, _function))


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
    times, counts = map(list_lengths, (input_lengths, target_lengths))
    # A blank before, between and after the labels.
    width = 2 * max(counts, default=0) + 1
    labels = torch.full((batch, width), blank, device=log_probs.device)
    given = targets if targets.dim() > 1 else targets.split(counts)
    for row, count in enumerate(counts):
        labels[row, 1 : 2 * count : 2] = given[row][:count].to(labels)
    emitted = log_probs.gather(2, labels.expand(steps, -1, -1))
    jumps = torch.zeros_like(labels, dtype=torch.bool)
    # Between two equal labels a blank must stay: without it the path stands for one label.
    jumps[:, 2:] = (labels[:, 2:] != labels[:, :-2]) & (labels[:, 2:] != blank)
    states, nowhere = (
        torch.arange(width, device="cpu").to(labels),
        torch.full_like(emitted[0], -torch.inf),
    )
    last_time, last_state = (
        torch.tensor(one, device="cpu").to(labels)[:, None] for one in (times, counts)
    )
    real = states <= 2 * last_state
    path = [torch.where(real & (states < 2) & (last_time > 0), emitted[0], -torch.inf)]
    for step in range(1, steps):
        stay, move, jump = (torch.cat([nowhere[:, :n], path[-1]], 1)[:, :width] for n in range(3))
        # A state is entered from itself, from the one before, or past a blank.
        ways = torch.stack([stay, move, torch.where(jumps, jump, -torch.inf)])
        state = ways.logsumexp(0) + emitted[step]
        path.append(torch.where(real & (step < last_time), state, -torch.inf))
    alpha = torch.stack(path, 1)
    final = alpha.gather(1, (last_time - 1).clamp(min=0).unsqueeze(2).expand(-1, -1, width))[:, 0]
    ends = torch.where(real & (states >= 2 * last_state - 1), final, -torch.inf)
    # A path ends in the last label or in the blank after it. Without a step it has no label.
    nothing = torch.where(last_state > 0, torch.inf, torch.zeros_like(final[:, :1]))
    return torch.where(last_time > 0, -ends.logsumexp(1, keepdim=True), nothing)[:, 0], alpha


composed("embedding_renorm")(
    lambda weight, indices, limit, p: weight.index_copy(
        0, indices.view(-1), weight[indices.view(-1)].renorm(p, 0, limit)
    )
)


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
        raise RefusedError("Its gradient is a sparse tensor: pass sparse=False")
    if mode > 1:
        raise RefusedError("Mode 'max' has no rule: use mode 'sum' or 'mean'")
    count = len(offsets) - include_last_offset
    order = torch.arange(len(indices), dtype=offsets.dtype, device=offsets.device)
    # The last bag that begins at or before an index; those before it that begin at the same place
    # are empty.
    bags = torch.searchsorted(offsets, order, right=True) - 1
    kept = indices != padding_idx
    # Without padding, of which a mean does not count the rows.
    sizes = offsets.new_zeros(count).index_add(0, bags, kept.to(offsets.dtype))
    rows = weight[indices]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    result = weight.new_zeros((count, weight.shape[1])).index_add(0, bags[kept], rows[kept])
    if mode == 1:
        result = result / sizes.clamp(min=1).unsqueeze(1)
    # The last one has the places of the maxima, which only the mode "max" fills.
    return result, bags, sizes, torch.zeros_like(sizes)


@composed("_embedding_bag_dense_backward")
def embedding_bag_backward(
    gradient: Tensor, indices: Tensor, bags: Tensor, sizes: Tensor, _: Any, *given: Any
) -> Tensor:
    """The gradient of the rows."""
    # A dispatch mode does not get arguments at the end that have their defaults, as
    # `padding_idx=-1`.
    count, by_frequency, mode, per_sample_weights, padding_idx = (*given, -1)[:5]
    if mode == 1:
        gradient = gradient / sizes.clamp(min=1).unsqueeze(1)
    rows = gradient[bags]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    backward = torch.ops.aten.embedding_dense_backward
    return backward(rows, indices, count, padding_idx, by_frequency)  # type: ignore[no-any-return]


@composed("linalg_qr")
def qr(matrix: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """The reduced QR decomposition of a matrix, by Gram and Schmidt, twice for each column."""
    if mode != "reduced" or matrix.dim() != 2:
        raise RefusedError(f"linalg_qr of shape {tuple(matrix.shape)}, mode {mode!r}")
    wide = matrix.double()
    count, sizes = min(wide.shape), torch.linalg.vector_norm(wide, dim=0)
    q = wide.new_zeros((len(wide), count))
    for column in range(count):
        vector = wide[:, column]
        for _ in range(2):  # once leaves an error that grows with the condition of the matrix
            vector = vector - q[:, :column].mv(q[:, :column].t().mv(vector))
        # What depends on the columns before is left with the errors of its rounding.
        size = torch.linalg.vector_norm(vector)
        if size <= sizes[column] * 2.0**-40:
            raise RefusedError(f"linalg_qr: column {column} depends on those before it")
        q[:, column] = vector / size
    return q.to(matrix.dtype), (q.t() @ wide).triu().to(matrix.dtype)


# By layer normalization, which has a kernel. The decompositions changed between torch 2.6 and 2.13.
@composed("native_group_norm")
def group_norm(
    values: Tensor, weight: Any, bias: Any, n: int, c: int, area: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Group normalization."""
    # Rounded once, at the end: the weight may have more bits than the values.
    rows = widen(values).reshape(n * groups, c // groups * area)
    result, mean, scale = torch.native_layer_norm(rows, rows.shape[1:], None, None, eps)
    result = result.view(n, c, area)
    result = result if weight is None else result * weight.view(c, 1)
    result = result if bias is None else result + bias.view(c, 1)
    shape = (n, groups)
    return result.view(values.shape).to(values.dtype), mean.view(shape), scale.view(shape)
