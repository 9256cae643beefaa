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
from typing import Any

import torch
import torch._decomp.decompositions as torch_decompositions
from torch import Tensor

from lightning_d9m.attribute_patches import AttributePatches

_native = torch._C._nn  # noqa: SLF001 - what torch.nn.functional calls with the flag off


@contextmanager
def decompositions_bypassed(names: Collection[str], device: str) -> Iterator[None]:
    """Run the body with the ops of patched gradients in place of their decompositions."""
    makers = {
        "_upsample_linear_vec": _make_interpolation,
        "_replication_pad": _make_padding,
        "max_pool3d_with_indices": _make_pooling,
    }
    patches = AttributePatches()
    try:
        for name, make in makers.items():
            original = getattr(torch_decompositions, name, None)
            if original is not None:  # max_pool3d has one from torch 2.13 on
                patches.replace(torch_decompositions, name, make(original, names, device))
        yield
    finally:
        patches.undo()


def _make_interpolation(
    decompose: Callable[..., Any], names: Collection[str], device: str
) -> Callable[..., Any]:
    ops = {
        dims: op
        for dims, op, name in (
            (4, _native.upsample_bilinear2d, "upsample_bilinear2d_backward"),
            (5, _native.upsample_trilinear3d, "upsample_trilinear3d_backward"),
        )
        if name in names
    }

    def interpolate(
        input: Tensor,  # noqa: A002 - torch's name
        output_size: Sequence[int] | None,
        align_corners: bool,
        scale_factors: Sequence[float] | None,
    ) -> Any:
        run = ops.get(input.dim()) if input.device.type == device else None
        return (run or decompose)(input, output_size, align_corners, scale_factors)

    return interpolate


def _make_padding(
    decompose: Callable[..., Any], names: Collection[str], device: str
) -> Callable[..., Any]:
    patched = {dims for dims in (1, 2, 3) if f"replication_pad{dims}d_backward" in names}

    def pad(a: Tensor, padding: Sequence[int]) -> Any:
        if a.device.type == device and len(padding) // 2 in patched:
            return _native.pad(a, padding, "replicate")
        return decompose(a, padding)

    return pad


def _make_pooling(
    decompose: Callable[..., Any], names: Collection[str], device: str
) -> Callable[..., Any]:
    patched = "max_pool3d_backward" in names

    def max_pool3d_with_indices(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        native = patched and self.device.type == device
        run = _native.max_pool3d_with_indices if native else decompose
        return run(self, *args, **kwargs)

    return max_pool3d_with_indices
