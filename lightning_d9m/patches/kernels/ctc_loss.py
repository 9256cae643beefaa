"""The gradient of ``CTCLoss``.

torch's CUDA kernel adds the posteriors of the states that share a label with atomics. Here
their sum is exact; see ``exact_sums``.
The backward variables are the forward variables of the reversed problem, so torch's own forward
kernel (one thread per state, no race) computes them.

The host needs the lengths. If they are CUDA tensors it waits for them, as in torch's own kernel;
lists and CPU tensors are copied to the device once, without a wait.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_d9m.patches.arguments import require
from lightning_d9m.patches.kernels.updates import sum_rows


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
    ``alpha * beta / (probability * likelihood)``.
    """
    lengths, label_lengths = map(_list_lengths, (input_lengths, target_lengths))
    steps, batch, labels = log_probs.shape
    require(batch > 0, steps > 0, log_probs.dtype in {torch.float32, torch.float64})
    device = log_probs.device
    time, count = _copy_lengths([lengths, label_lengths], device)[..., None]
    padded = _pad_targets(targets.to(device), max(label_lengths), count)
    last_step = torch.arange(steps, device=device)
    past = last_step >= time  # [batch, steps]
    mirror = torch.where(past, 0, time - 1 - last_step)
    log_beta = _compute_log_beta(log_probs, padded, lengths, label_lengths, count, mirror, blank)
    states = log_alpha.shape[2]
    state_labels = torch.full((batch, states), blank, dtype=torch.int64, device=device)
    state_labels[:, 1::2] = padded[:, : states // 2]
    ranks = torch.arange(states, device=device)
    real = ranks <= 2 * count  # [batch, states]
    emitted = log_probs.transpose(0, 1).gather(2, state_labels[:, None].expand(-1, steps, -1))
    paths = log_alpha + log_beta
    posterior = (paths + neg_log_likelihood[:, None, None] - emitted).exp()
    counted = real[:, None] & ~past[..., None] & (paths > -torch.inf)
    posterior = torch.where(counted, posterior, 0)
    first = torch.arange(batch, device=device)[:, None] * labels
    rows = posterior.transpose(1, 2).reshape(batch * states, steps)
    sums = sum_rows((state_labels + first).flatten(), rows, batch * labels)
    shares = sums.view(batch, labels, steps).permute(2, 0, 1)
    result = (log_probs.exp() - shares) * grad[:, None]
    impossible = neg_log_likelihood == torch.inf
    # torch subtracts infinities where nothing can be emitted: its gradient is NaN there.
    result = torch.where(impossible[:, None] | (log_probs == -torch.inf), torch.nan, result)
    silent = past.t()
    if zero_infinity:
        silent = silent | impossible
    return torch.where(silent[..., None], 0, result).contiguous()


def _list_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def _copy_lengths(lengths: list[list[int]], device: torch.device) -> Tensor:
    on_cuda = device.type == "cuda"  # a copy from pinned memory does not make the host wait
    return torch.tensor(lengths, pin_memory=on_cuda).to(device, non_blocking=on_cuda)


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
    labels = log_probs.shape[2]
    backwards = log_probs.gather(0, mirror.t()[..., None].expand(-1, -1, labels))
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
        places = (count.cumsum(0) - count + ranks).clamp(max=max(targets.numel() - 1, 0))
        if not targets.numel():
            return torch.zeros((len(count), longest), dtype=torch.int64, device=targets.device)
        padded = targets[places]
    else:
        padded = targets[:, :longest]
    return torch.where(ranks < count, padded.to(torch.int64), 0)
