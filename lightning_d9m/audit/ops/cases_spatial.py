"""Cases on images and volumes: convolution, pooling, resampling, padding."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lightning_d9m.audit.ops.case import Call, Case, Inputs, Scalar, called, graded

Forward = Callable[[Tensor], Tensor]
# Side of an input by its number of dimensions, for --quick and otherwise.
_SIDES = {1: (256, 4096), 2: (24, 96), 3: (10, 24)}


def _differentiated(
    op: str,
    dims: int,
    forward: Forward,
    documented: str | None = None,
    **parameters: Scalar,
) -> Iterator[Case]:
    """Yield the gradients of ``forward`` for a small and a large input of 4 x 8 channels."""
    for size, side in enumerate(_SIDES[dims]):
        yield Case(
            op=op,
            parameters={"side": side, **parameters},
            make=graded(forward, [4, 8, *[side] * dims]),
            documented=(documented,) if documented else (),
            quick=size == 0,
        )


def _convolved(dims: int, *, transposed: bool) -> Iterator[Case]:
    name = f"{'ConvTranspose' if transposed else 'Conv'}{dims}d"
    convolve = getattr(nnf, f"conv{'_transpose' if transposed else ''}{dims}d")
    for size, side in enumerate(_SIDES[dims]):
        shapes = [4, 8, *[side] * dims], [8, 8, *[3] * dims]
        for suffix, wrapped in (("", called), ("_backward", graded)):
            yield Case(
                op=f"{name.lower()}{suffix}",
                entry="convolution",
                parameters={"side": side, "kernel": 3, "stride": 2},
                make=wrapped(partial(convolve, stride=2), *shapes),
                documented=(f"torch.nn.{name}",),
                quick=size == 0,
            )


def _unpooled(dims: int) -> Iterator[Case]:
    unpool = getattr(nnf, f"max_unpool{dims}d")
    for size, side in enumerate(_SIDES[dims]):
        for duplicates in (False, True):

            def make(inputs: Inputs, side: int = side, duplicates: bool = duplicates) -> Call:
                image = inputs.normal(4, 8, *[side] * dims)
                pool = getattr(nnf, f"max_pool{dims}d")
                values, places = pool(image, 2, return_indices=True)
                if duplicates:  # overlapping windows choose one input several times
                    places = places // 8 * 8
                return lambda: unpool(values, places, 2)

            yield Case(
                op=f"max_unpool{dims}d",
                parameters={"side": side, "duplicates": duplicates},
                make=make,
                documented=(f"torch.nn.MaxUnpool{dims}d",),
                quick=size == 0,
            )


def _fractional(dims: int) -> Iterator[Case]:
    pool = getattr(nnf, f"fractional_max_pool{dims}d")

    def forward(image: Tensor) -> Tensor:
        planes = image.shape[:2]
        starts = torch.linspace(0.1, 0.9, planes.numel() * dims, dtype=image.dtype)
        starts = starts.view(*planes, dims).to(image.device)
        half = [image.shape[-1] // 2] * dims
        pooled: Tensor = pool(image, 3, half, _random_samples=starts)
        return pooled

    name = f"fractional_max_pool{dims}d_backward"
    yield from _differentiated(name, dims, forward, f"torch.nn.FractionalMaxPool{dims}d")


def _pooled() -> Iterator[Case]:
    for name, dims in (("Avg", 2), ("Avg", 3), ("Max", 2), ("Max", 3)):
        pool = getattr(nnf, f"{name.lower()}_pool{dims}d")
        listed = None if (name, dims) == ("Avg", 2) else f"torch.nn.{name}Pool{dims}d"
        forward = partial(pool, kernel_size=3, stride=2, padding=1)
        yield from _differentiated(f"{name.lower()}_pool{dims}d_backward", dims, forward, listed)
    for dims in (2, 3):
        for kind, label in (("avg", "Avg"), ("max", "Max")):
            pool = getattr(nnf, f"adaptive_{kind}_pool{dims}d")
            # Overlapping windows share inputs; torch lists no adaptive 3-D max pooling.
            listed = None if (kind, dims) == ("max", 3) else f"torch.nn.Adaptive{label}Pool{dims}d"
            for output in (5, 32):
                name = f"adaptive_{kind}_pool{dims}d_backward"
                forward = partial(pool, output_size=output)
                yield from _differentiated(name, dims, forward, listed, output=output)
    for dims in (2, 3):
        yield from _fractional(dims)
    for dims in (1, 2, 3):
        yield from _unpooled(dims)


def _resampled() -> Iterator[Case]:
    modes: tuple[tuple[str, int, str, Mapping[str, bool]], ...] = (
        ("linear", 1, "upsample_linear1d_backward", {}),
        ("bilinear", 2, "upsample_bilinear2d_backward", {}),
        ("bicubic", 2, "upsample_bicubic2d_backward", {}),
        ("trilinear", 3, "upsample_trilinear3d_backward", {}),
        ("nearest", 2, "upsample_nearest_backward", {}),
        ("bilinear", 2, "upsample_bilinear2d_aa_backward", {"antialias": True}),
        ("bicubic", 2, "upsample_bicubic2d_aa_backward", {"antialias": True}),
    )
    for mode, dims, op, more in modes:
        # For Apple's devices torch does not specify the cases.
        words = "some cases" if more else f"``{mode}``"
        listed = None if mode == "nearest" else f"torch.nn.functional.interpolate {words}"
        for factor in (2.0, 0.5):
            forward = partial(nnf.interpolate, scale_factor=factor, mode=mode, **more)
            yield from _differentiated(op, dims, forward, listed, factor=factor)


def _sampled() -> Iterator[Case]:
    for dims in (2, 3):
        for size, side in enumerate(_SIDES[dims]):
            for crowd in (1.0, 0.05):  # spread of the samples: over all inputs, or a few

                def sample(image: Tensor, grid: Tensor, crowd: float = crowd) -> Tensor:
                    return nnf.grid_sample(image, grid * crowd, align_corners=False)

                yield Case(
                    op=f"grid_sampler_{dims}d_backward",
                    parameters={"side": side, "crowd": crowd},
                    make=graded(sample, [4, 8, *[side] * dims], [4, *[side] * dims, dims]),
                    documented=("torch.nn.functional.grid_sample",),
                    quick=size == 0 and crowd < 1,
                )


def _padded() -> Iterator[Case]:
    for dims in (1, 2, 3):
        for mode, kind in (("reflect", "Reflection"), ("replicate", "Replication")):
            forward = partial(nnf.pad, pad=[7] * (2 * dims), mode=mode)
            name, listed = f"{kind.lower()}_pad{dims}d_backward", f"torch.nn.{kind}Pad{dims}d"
            yield from _differentiated(name, dims, forward, listed, pad=7)


def list_spatial_cases() -> Iterator[Case]:
    """Yield the cases of this module."""
    for dims in (1, 2, 3):
        yield from _convolved(dims, transposed=False)
        yield from _convolved(dims, transposed=True)
    yield from _pooled()
    yield from _resampled()
    yield from _sampled()
    yield from _padded()
