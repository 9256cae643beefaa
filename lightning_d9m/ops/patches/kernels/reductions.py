"""Reductions: ``nll_loss2d``, medians, scans of a single row, histograms, and ``CTCLoss``."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.ops.patches.kernels.updates import sum_rows
from lightning_d9m.ops.patches.registration import accumulation_dtype, require

# torch's numbers of the reductions.
_NONE, _MEAN = 0, 1
# The length decides where partial results are joined, and so the bits: it must not change.
_SCANNED = 2**11  # elements of a row that one block scans


def nll_loss2d_forward(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Any:
    """Return the loss and the total weight, both scalars; torch's own result without a reduction.

    The loss is ``-sum(weight[t] * self[n, t, h, w])``, for the mean divided by ``sum(weight[t])``,
    over the pixels whose target t is not ``ignore_index``. torch's CUDA kernel adds the partial
    sums of blocks with atomics. Here the terms are stored and summed by torch's reduction, whose
    tree depends on the shape only.
    """
    if reduction == _NONE:
        return NotImplemented  # one thread per output: no race
    require(self.is_floating_point(), weight is None or weight.dtype == self.dtype)
    dtype, counted = accumulation_dtype(self.dtype), target != ignore_index
    factors = None if weight is None else weight.to(dtype)
    # Without a reduction, torch's kernel writes one term for each pixel.
    losses, _ = torch.ops.aten.nll_loss2d_forward(
        self.to(dtype), target, factors, _NONE, ignore_index
    )
    if factors is not None:
        chosen = factors.index_select(0, torch.where(counted, target, 0).flatten())
        counted = torch.where(counted, chosen.view_as(target), 0)
    loss, total_weight = losses.sum(), counted.sum().to(dtype)
    if reduction == _MEAN:
        loss = loss / total_weight
    return loss.to(self.dtype), total_weight.to(self.dtype)


def _median(
    self: Tensor, dim: int, keepdim: bool = False, *, ignore_nan: bool
) -> tuple[Tensor, Tensor]:
    """Return the lower median and the index of the first element that equals it.

    ``median`` returns NaN and the first NaN's index if there is a NaN; ``nanmedian`` only if there
    is nothing else. torch's CUDA kernel returns the index of one of several equal elements, which
    depends on the order of the threads.
    """
    dims = max(self.dim(), 1)
    require(-dims <= dim < dims, self.dtype != torch.bool, not self.is_complex())
    # A scalar is a row of one element, as for torch.
    rows = self if self.dim() else self.unsqueeze(0)
    size = rows.shape[dim]
    require(size > 0)
    is_nan = rows.isnan()
    nans = is_nan.sum(dim, keepdim=True)
    # The lower one of two medians, as torch documents it.
    middle = torch.div(size - nans - 1, 2, rounding_mode="floor").clamp_(min=0)
    if not ignore_nan:
        middle = torch.where(nans > 0, size - 1, middle)  # NaNs are sorted behind the numbers
    value = torch.sort(rows, dim=dim, stable=True).values.gather(dim, middle)
    matches = (rows == value) | (is_nan & value.isnan())
    index = matches.to(torch.uint8).argmax(dim, keepdim=True)  # the first of several
    chosen = rows.gather(dim, index), index
    values, indices = (part if keepdim and self.dim() else part.squeeze(dim) for part in chosen)
    return values.contiguous(), indices.contiguous()


median = partial(_median, ignore_nan=False)
nanmedian = partial(_median, ignore_nan=True)


def _scan(self: Tensor, dim: int, *, name: str, **dtype: Any) -> Any:
    """Scan the only row of a tensor in blocks of a fixed length; any other tensor as torch does.

    torch's CUDA kernel for tensors of one row is a scan of the CUB library, in which a block adds
    what the blocks before it have finished by then: the partial results depend on timing. The
    kernel for several rows scans each row within one block, in a fixed order. Integers are
    multiplied exactly, in any order.
    """
    result = dtype.get("dtype") or self.dtype
    exact = not (result.is_floating_point or result.is_complex)
    inside = -self.dim() <= dim < self.dim()
    # Several rows, integers and wrong arguments are left to torch, whose kernel for them has a
    # fixed order.
    if exact or not inside or self.numel() != self.shape[dim] or self.numel() <= 1:
        return NotImplemented
    return _scan_blocks(self.to(result).reshape(-1), name).view(self.shape)


def _scan_blocks(row: Tensor, name: str) -> Tensor:
    """Scan blocks, then the ends of all but the last, which precede the elements of the next."""
    scan, join, neutral = _SCANS[name]
    size = len(row)
    if size <= _SCANNED or (row.is_complex() and name == "logcumsumexp"):
        return scan(torch.stack([row, row]), 1)[0]  # as the first of two equal rows
    if size % _SCANNED:  # a padding of nothing would copy the row
        row = torch.nn.functional.pad(row, (0, -size % _SCANNED), value=neutral)
    parts = scan(row.view(-1, _SCANNED), 1)
    ahead = _scan_blocks(parts[:-1, -1], name)
    join(parts[1:], ahead.unsqueeze(1), out=parts[1:])
    return parts.view(-1)[:size]


# The scan, the operation that it repeats, and what that operation leaves as it is.
_SCANS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], float]] = {
    "cumprod": (torch.cumprod, torch.mul, 1.0),
    "logcumsumexp": (torch.logcumsumexp, torch.logaddexp, -math.inf),
}
cumprod = partial(_scan, name="cumprod")
logcumsumexp = partial(_scan, name="logcumsumexp")


def histc(
    self: Tensor,
    bins: int = 100,
    min: float = 0,  # noqa: A002 - torch's name
    max: float = 0,  # noqa: A002 - torch's name
) -> Any:
    """Count the elements in each of ``bins`` bins of equal width.

    Elements are counted as integers, so a bin may hold more than the dtype can count one by one.
    For the default range the host waits for the smallest and the greatest element, as in torch.
    """
    if not self.is_floating_point() or (bins > 0 and not self.numel() and min <= max):
        return NotImplemented  # integers are counted exactly in any order
    # The bounds are rounded to the dtype of the elements, as in torch.
    low, high = torch.tensor([min, max], dtype=self.dtype, device="cpu").tolist()
    if bins > 0 and low == high:
        low, high = (float(bound) for bound in torch.stack(torch.aminmax(self)).tolist())
    if low == high:
        low, high = low - 1, high + 1
    require(bins > 0, math.isfinite(low), math.isfinite(high), low <= high)
    values = self.flatten()
    # A tensor on the device: CUDA multiplies by the reciprocal of a number, which rounds twice.
    span = torch.full((), high - low, dtype=self.dtype, device=self.device)
    places = ((values - low) * bins / span).to(torch.int32).clamp_(max=bins - 1)
    # NaNs and what lies outside get the number after the last bin.
    places = torch.where((values >= low) & (values <= high), places, bins)
    # The number of places below each bound, in sorted order: integers, so no sum varies.
    bounds = torch.arange(bins + 1, dtype=torch.int32, device=self.device)
    return torch.searchsorted(places.sort(stable=True).values, bounds).diff().to(self.dtype)


def list_lengths(given: Any) -> list[int]:
    """Return lengths of a batch; without a batch, one may be a scalar."""
    lengths: list[int] = torch.as_tensor(given).view(-1).tolist()
    return lengths


def ctc_loss_backward(  # noqa: PLR0913, PLR0917 - torch's arguments
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int] | Tensor,
    target_lengths: Sequence[int] | Tensor,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Tensor:
    """Return the gradient with respect to the log probabilities.

    It has the shape ``[time, batch, labels]`` and is ``grad * (exp(log_probs) - posterior)``
    (Graves et al. 2006, formula 16), where a label's posterior is the sum over its states of
    ``alpha * beta / (probability * likelihood)``. torch's CUDA kernel adds these with atomics; here
    their sum is exact. The backward variables are the forward variables of the reversed problem, so
    torch's own forward kernel (one thread per state, no race) computes them.

    The host needs the lengths. If they are CUDA tensors it waits for them, as in torch's own
    kernel; lists and CPU tensors are copied to the device once, without a wait.
    """
    lengths, label_lengths = map(list_lengths, (input_lengths, target_lengths))
    steps, batch, _ = log_probs.shape
    require(batch > 0, steps > 0, log_probs.dtype in {torch.float32, torch.float64})
    device = log_probs.device
    on_cuda = device.type == "cuda"  # a copy from pinned memory does not make the host wait
    copied = torch.tensor([lengths, label_lengths], pin_memory=on_cuda, device="cpu")
    time, count = copied.to(device, non_blocking=on_cuda)[..., None]
    padded = _pad_targets(targets.to(device), max(label_lengths), count)
    last_step = torch.arange(steps, device=device)
    past = last_step >= time  # [batch, steps]
    mirror = torch.where(past, 0, time - 1 - last_step)
    sizes = (lengths, label_lengths, count, mirror)
    paths = log_alpha + _compute_log_beta(log_probs, padded, *sizes, blank)
    real = torch.arange(log_alpha.shape[2], device=device) <= 2 * count  # [batch, states]
    counted = real[:, None] & ~past[..., None] & (paths > -torch.inf)
    log_shares = paths + neg_log_likelihood[:, None, None]
    shares = _sum_states(log_probs, log_shares, padded, counted, blank)
    result = (log_probs.exp() - shares) * grad[:, None]
    impossible = neg_log_likelihood == torch.inf
    # torch subtracts infinities where nothing can be emitted: its gradient is NaN there.
    result = torch.where(impossible[:, None] | (log_probs == -torch.inf), torch.nan, result)
    silent = past.t() | (impossible & zero_infinity)
    return torch.where(silent[..., None], 0, result).contiguous()


def _sum_states(
    log_probs: Tensor, log_shares: Tensor, padded: Tensor, counted: Tensor, blank: int
) -> Tensor:
    """Return the posterior of each label, the sum over its states, ``[time, batch, labels]``."""
    steps, batch, labels = log_probs.shape
    states = log_shares.shape[2]
    # The states are a blank, the first label, a blank, the second label, ..., a blank.
    state_labels = torch.full((batch, states), blank, dtype=torch.int64, device=padded.device)
    state_labels[:, 1::2] = padded[:, : states // 2]
    # Both alpha and beta have the probability of the label that the state emits.
    emitted = log_probs.transpose(0, 1).gather(2, state_labels[:, None].expand(-1, steps, -1))
    posterior = torch.where(counted, (log_shares - emitted).exp(), 0)
    first = torch.arange(batch, device=padded.device)[:, None] * labels
    rows = posterior.transpose(1, 2).reshape(batch * states, steps)
    sums = sum_rows((state_labels + first).flatten(), rows, batch * labels)
    return sums.view(batch, labels, steps).permute(2, 0, 1)


def _compute_log_beta(
    log_probs: Tensor,
    padded: Tensor,
    lengths: list[int],
    label_lengths: list[int],
    count: Tensor,
    mirror: Tensor,
    blank: int,
) -> Tensor:
    """Return the log probability of finishing, of shape ``[batch, steps, states]``."""
    backwards = log_probs.gather(0, mirror.t()[..., None].expand_as(log_probs))
    ranks = torch.arange(padded.shape[1], device=padded.device)
    flipped = padded.gather(1, (count - 1 - ranks).clamp(min=0))
    forward = torch._ctc_loss  # noqa: SLF001 - it returns log_alpha, which ctc_loss hides
    _, log_alpha = forward(backwards, flipped, lengths, label_lengths, blank)
    states = torch.arange(log_alpha.shape[2], device=padded.device)
    log_beta = log_alpha.gather(1, mirror[..., None].expand_as(log_alpha))
    mirrored = (2 * count - states).clamp(min=0)
    return log_beta.gather(2, mirrored[:, None].expand_as(log_beta))


def _pad_targets(targets: Tensor, longest: int, count: Tensor) -> Tensor:
    """Return padded or concatenated targets as int64 of shape ``[batch, longest]``."""
    ranks = torch.arange(longest, device=targets.device)
    if targets.dim() == 1:
        targets = torch.cat([targets, targets.new_zeros(1)])  # there may be none
        padded = targets[(count.cumsum(0) - count + ranks).clamp(max=len(targets) - 1)]
    else:
        padded = targets[:, :longest]
    return torch.where(ranks < count, padded.to(torch.int64), 0)
