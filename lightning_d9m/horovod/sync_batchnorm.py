"""Batch normalization over the batches of all ranks, on CPU and CUDA, in a fixed order.

The SyncBatchNorm of torch and that of Horovod need a GPU. Here a layer keeps its class, parameters
and hooks; only its ``forward`` is replaced, and restored after training.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.errors import SettingError

GatherTensor = Callable[[Tensor], Tensor]


def synchronize(patches: AttributePatches, model: Module, gather: GatherTensor) -> None:
    """Make every batch norm layer of a model compute its statistics over all ranks.

    ``gather`` stacks every rank's tensor to (world, ...), and propagates gradients.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            patches.replace(module, "forward", partial(_forward, module, gather))


def _forward(module: _BatchNorm, gather: GatherTensor, x: Tensor) -> Tensor:
    uses_batch_statistics = module.running_mean is None
    if not (module.training or uses_batch_statistics):
        return type(module).forward(module, x)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    channels = values.shape[1]
    local_var, local_mean = torch.var_mean(values, dims, correction=0)
    count = values.new_full((1,), values.numel() / channels)
    gathered = gather(torch.cat([local_mean, local_var, count]))
    means, variances, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
    total = counts.sum()
    if total <= 1:
        raise SettingError(
            "Batch normalization needs more than one value per channel over all ranks when "
            f"training, but got an input of shape {tuple(x.shape)}."
        )
    # Chan, Golub, LeVeque (1979): the pooled variance, without the cancellation of E[x²] - E[x]².
    mean = (counts * means).sum(0) / total
    var = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    if module.training and not uses_batch_statistics:
        _update_running(module, mean.detach(), (var * total / (total - 1)).detach())
    shape = [1, channels] + [1] * (x.dim() - 2)
    normal = (values - mean.view(shape)) * torch.rsqrt(var + module.eps).view(shape)
    if module.affine:
        normal = normal * module.weight.view(shape) + module.bias.view(shape)
    return normal.to(x.dtype)


@torch.no_grad()
def _update_running(module: _BatchNorm, mean: Tensor, var: Tensor) -> None:
    if module.num_batches_tracked is None or module.running_mean is None:
        return
    module.num_batches_tracked.add_(1)
    momentum = module.momentum
    if momentum is None:  # the cumulative average over all batches
        momentum = 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
    if module.running_var is not None:
        module.running_var.lerp_(var.to(module.running_var.dtype), momentum)
