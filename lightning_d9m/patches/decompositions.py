"""Bypass of the Python decompositions that torch uses while deterministic algorithms are on.

With the flag on in the forward pass, bilinear and trilinear ``F.interpolate``, replicating
``F.pad`` and ``F.max_pool3d`` with ``return_indices`` do not call their op on CUDA but a
decomposition, whose gradient is an ``index_put`` with many kernels and many times the memory
traffic. The patched gradient would never run. These functions look the decomposition up in
``torch._decomp.decompositions`` at each call, so a replaced attribute there makes them call the op
again; the registered decompositions do not change.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._decomp.decompositions as torch_decompositions
from torch import Tensor

from lightning_d9m.attribute_patches import AttributePatches

_native = torch._C._nn  # noqa: SLF001 - what torch.nn.functional calls with the flag off


Native = Callable[..., Any]


def _interpolate(image: Tensor, *_: Any) -> tuple[str, Native]:
    kind = "trilinear3d" if image.dim() == 5 else "bilinear2d"  # noqa: PLR2004 - dimensions
    return f"upsample_{kind}_backward", getattr(_native, f"upsample_{kind}")


def _pad(_image: Tensor, padding: Sequence[int]) -> tuple[str, Native]:
    pad = partial(_native.pad, mode="replicate")
    return f"replication_pad{len(padding) // 2}d_backward", pad


def _pool(*_: Any, **__: Any) -> tuple[str, Native]:
    return "max_pool3d_backward", _native.max_pool3d_with_indices


_DECOMPOSITIONS: dict[str, Callable[..., tuple[str, Native]]] = {
    "_upsample_linear_vec": _interpolate,
    "_replication_pad": _pad,
    "max_pool3d_with_indices": _pool,  # from torch 2.13 on
}
"""By the decomposition: the gradient in the catalog, and the op, for some arguments."""


@contextmanager
def decompositions_bypassed(names: Collection[str], device: str) -> Iterator[None]:
    """Run the body with the ops of patched gradients in place of their decompositions."""
    patches = AttributePatches()

    def replace(name: str, find: Callable[..., tuple[str, Native]]) -> None:
        decompose = getattr(torch_decompositions, name, None)
        if decompose is None:
            return

        def run(image: Tensor, *args: Any, **kwargs: Any) -> Any:
            gradient, native = find(image, *args, **kwargs)
            patched = gradient in names and image.device.type == device
            return (native if patched else decompose)(image, *args, **kwargs)

        patches.replace(torch_decompositions, name, run)

    try:
        for name, find in _DECOMPOSITIONS.items():
            replace(name, find)
        yield
    finally:
        patches.undo()
