"""Bypass of the Python decompositions that torch uses while deterministic algorithms are on.

With the flag on in the forward pass, bilinear and trilinear ``F.interpolate``, replicating
``F.pad`` and ``F.max_pool3d`` with ``return_indices`` do not call their op on CUDA but a
decomposition, whose gradient is an ``index_put`` with many kernels and many times the memory
traffic. The patched gradient would never run. These functions look the decomposition up in
``torch._decomp.decompositions`` at each call, so a replaced attribute there makes them call the op
again; the registered decompositions do not change.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._decomp.decompositions as torch_decompositions
from torch import Tensor

from lightning_d9m.attribute_patches import AttributePatches

_native = torch._C._nn  # noqa: SLF001 - what torch.nn.functional calls with the flag off


def _find(name: str, image: Tensor, *args: Any) -> tuple[str, Callable[..., Any]]:
    """Return the gradient in the catalog and the op, by the name of a decomposition."""
    if name == "_upsample_linear_vec":
        kind = "trilinear3d" if image.dim() == 5 else "bilinear2d"  # noqa: PLR2004 - dimensions
        return f"upsample_{kind}_backward", getattr(_native, f"upsample_{kind}")
    if name == "_replication_pad":
        pad = partial(_native.pad, mode="replicate")
        return f"replication_pad{len(args[0]) // 2}d_backward", pad
    return "max_pool3d_backward", _native.max_pool3d_with_indices  # from torch 2.13 on


@contextmanager
def decompositions_bypassed(names: Collection[str], device: str) -> Iterator[None]:
    """Run the body with the ops of patched gradients in place of their decompositions."""
    patches = AttributePatches()

    def run(name: str, decompose: Callable[..., Any], image: Tensor, *args: Any, **kw: Any) -> Any:
        gradient, native = _find(name, image, *args)
        patched = gradient in names and image.device.type == device
        return (native if patched else decompose)(image, *args, **kw)

    try:
        for name in ("_upsample_linear_vec", "_replication_pad", "max_pool3d_with_indices"):
            if decompose := getattr(torch_decompositions, name, None):
                patches.replace(torch_decompositions, name, partial(run, name, decompose))
        yield
    finally:
        patches.undo()
