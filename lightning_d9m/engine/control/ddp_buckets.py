"""The buckets of DistributedDataParallel, the same from the first step of every run."""

from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

# DDP adds gradients in buckets, and the order in which three or more processes add a gradient
# depends on its place in a bucket. After the first step torch lays the buckets out again, in the
# order in which gradients arrived. The first step of a resumed run, which has new buckets, would
# then add in another order than that step of an uninterrupted run.

_COMMUTING = 2  # processes, for which the order of a sum does not matter


def settle_buckets(model: nn.Module) -> None:
    """Let DDP lay out its buckets before the first step, in reverse order of the parameters.

    Every rank must call this. DDP keeps the first buckets with ``find_unused_parameters=True``.
    With ``static_graph=True`` it would take this pass for the graph, so its first step differs in a
    resumed run.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and _rebuilds(module):
            _settle(module)


def _rebuilds(ddp: Any) -> bool:
    if distributed.get_world_size(ddp.process_group) <= _COMMUTING:
        return False
    if ddp.find_unused_parameters or ddp.static_graph or ddp.mixed_precision is not None:
        return False
    # Frozen since, so that no step would end, or on the reducer in Python, which has no buckets.
    parameters, _ = ddp._build_params_for_reducer()  # noqa: SLF001 - torch has no public list
    known = ddp._get_ddp_logging_data().get("num_parameter_tensors")  # noqa: SLF001 - as above
    return bool(len(parameters) == known and not ddp._use_python_reducer)  # noqa: SLF001 - as above


def _settle(ddp: Any) -> None:
    parameters, sparse = ddp._build_params_for_reducer()  # noqa: SLF001 - torch has no public list
    # DDP lays buckets out after a backward pass. This one gives zeros to the parameters, one after
    # the other, and calls no hook of the program.
    gradients = [parameter.grad for parameter in parameters]
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    for parameter, is_sparse in [*zip(parameters, sparse, strict=True)][::-1]:
        # The program's hooks, such as an optimizer that steps in the backward pass, must not see
        # these zeros. DDP's own hooks are on the nodes that accumulate gradients, and do run.
        hooks = [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]  # noqa: SLF001 - as above
        present = [(kept, {**kept}) for kept in hooks if kept]
        for kept, _ in present:
            kept.clear()
        zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        parameter.grad = None
        try:
            parameter.backward(zeros.to_sparse(1) if is_sparse else zeros)
        finally:
            for kept, content in present:
                kept.update(content)
    ddp.reducer._rebuild_buckets()  # noqa: SLF001 - DDP calls it before the next forward pass
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
