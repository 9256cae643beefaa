"""Ops whose gradient is patched, and functions that run and compare them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor

from lightning_d9m.patches.registration import patches_applied

Forward = Callable[[Tensor], Tensor]
Attempt = Callable[[], object]

# The first change of torch's flag loads Inductor, which sets TORCHINDUCTOR_CACHE_DIR permanently.
torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())


@dataclass(frozen=True)
class GradientCase:
    """An op of one input whose gradient with respect to it is patched.

    Attributes:
        label: The name of the test.
        shape: The input's.
        forward: The op.
        exact: Whether the gradient has the bits of torch's CPU kernel on one thread.
        cpu_keeps_format: Whether torch's CPU kernel keeps channels_last where its CUDA kernel,
            which is the one that is replaced, does not.
    """

    label: str
    shape: tuple[int, ...]
    forward: Forward
    exact: bool = False
    cpu_keeps_format: bool = False

    @property
    def has_channels_last(self) -> bool:
        """Whether the input has a batch and two or three spatial dimensions."""
        dims = 3 if "3d" in self.label or "tri" in self.label else 2
        return len(self.shape) == dims + 2


def _call(name: str, *arguments: object, **more: object) -> Forward:
    return lambda x: getattr(nnf, name)(x, *arguments, **more)


def _fixed_fractional(pool: Callable[..., Tensor], samples: int) -> Forward:
    def forward(x: Tensor) -> Tensor:
        starts = torch.linspace(0.1, 0.9, x.shape[0] * x.shape[1] * samples, dtype=x.dtype)
        return pool(x, 3, [4] * samples, _random_samples=starts.view(*x.shape[:2], samples))

    return forward


_case = GradientCase
GRADIENT_CASES = [
    _case("avg_pool3d", (2, 3, 4, 6, 8), _call("avg_pool3d", 2), exact=True),
    _case("avg_pool3d-divisor", (3, 4, 6, 8), _call("avg_pool3d", 2, divisor_override=5)),
    _case("avg_pool3d-overlap", (2, 3, 7, 9, 8), _call("avg_pool3d", 3, 2, 1, ceil_mode=True)),
    _case(
        "avg_pool3d-sides",
        (2, 3, 7, 9, 8),
        _call("avg_pool3d", (2, 3, 2), (2, 1, 3), (1, 1, 0), count_include_pad=False),
    ),
    _case("adaptive_avg_pool2d", (2, 3, 8, 6), _call("adaptive_avg_pool2d", (2, 3)), exact=True),
    _case("adaptive_avg_pool2d-odd", (2, 3, 7, 9), _call("adaptive_avg_pool2d", (3, 4))),
    _case("adaptive_avg_pool2d-up", (3, 3, 4), _call("adaptive_avg_pool2d", (5, 7))),
    _case("adaptive_avg_pool3d", (2, 3, 7, 4, 5), _call("adaptive_avg_pool3d", (3, 2, 2))),
    _case("adaptive_max_pool2d", (2, 3, 7, 9), _call("adaptive_max_pool2d", (3, 4))),
    _case("adaptive_max_pool2d-up", (3, 3, 4), _call("adaptive_max_pool2d", (5, 7))),
    _case("adaptive_max_pool3d", (2, 3, 7, 4, 5), _call("adaptive_max_pool3d", (3, 2, 2))),
    _case("max_pool3d", (2, 3, 7, 9, 8), _call("max_pool3d", 3, 2, 1, ceil_mode=True)),
    _case("max_pool3d-dilated", (3, 7, 6, 8), _call("max_pool3d", 3, 1, 1, dilation=2)),
    _case("fractional_max_pool2d", (2, 3, 9, 8), _fixed_fractional(nnf.fractional_max_pool2d, 2)),
    _case(
        "fractional_max_pool3d", (2, 3, 9, 8, 7), _fixed_fractional(nnf.fractional_max_pool3d, 3)
    ),
    _case("linear", (2, 3, 7), _call("interpolate", scale_factor=2.3, mode="linear")),
    _case(
        "linear-corners", (2, 3, 7), _call("interpolate", size=5, mode="linear", align_corners=True)
    ),
    _case("bilinear", (2, 3, 7, 6), _call("interpolate", size=(13, 4), mode="bilinear")),
    _case(
        "bilinear-corners",
        (2, 3, 7, 6),
        _call("interpolate", scale_factor=2, mode="bilinear", align_corners=True),
    ),
    _case("bilinear-one", (2, 3, 1, 1), _call("interpolate", size=5, mode="bilinear")),
    _case("bicubic", (2, 3, 7, 6), _call("interpolate", size=(13, 4), mode="bicubic")),
    _case(
        "bicubic-corners",
        (2, 3, 7, 6),
        _call("interpolate", scale_factor=2, mode="bicubic", align_corners=True),
    ),
    _case("trilinear", (2, 3, 4, 5, 6), _call("interpolate", size=(7, 3, 9), mode="trilinear")),
    _case(
        "bilinear-antialiased",
        (2, 3, 17, 6),
        _call("interpolate", size=(5, 11), mode="bilinear", antialias=True),
    ),
    _case(
        "bicubic-antialiased",
        (2, 3, 17, 6),
        _call("interpolate", size=(5, 11), mode="bicubic", antialias=True),
    ),
    _case("reflection1d", (2, 3, 7), _call("pad", (3, 5), "reflect"), exact=True),
    _case("reflection1d-long", (3, 3), _call("pad", (2, 2), "reflect"), exact=True),
    _case(
        "reflection2d", (2, 3, 7, 6), _call("pad", (3, 5, 6, 1), "reflect"), cpu_keeps_format=True
    ),
    _case(
        "reflection2d-crop",
        (2, 3, 7, 6),
        _call("pad", (-1, 2, 2, -2), "reflect"),
        cpu_keeps_format=True,
    ),
    _case(
        "reflection3d",
        (2, 3, 4, 5, 6),
        _call("pad", (3, 5, 1, 0, 2, 3), "reflect"),
        cpu_keeps_format=True,
    ),
    _case(
        "reflection3d-sides",  # the last dimension has more outputs than the one before it
        (2, 1, 8, 8, 9),
        _call("pad", (0, 8, 2, 5, 6, 2), "reflect"),
        cpu_keeps_format=True,
    ),
    _case("replication1d", (2, 3, 7), _call("pad", (3, 9), "replicate"), exact=True),
    _case(
        "replication2d",
        (2, 3, 7, 6),
        _call("pad", (3, 0, 9, 1), "replicate"),
        cpu_keeps_format=True,
    ),
    _case(
        "replication3d",
        (2, 3, 4, 5, 6),
        _call("pad", (3, 5, 1, -1, 0, 7), "replicate"),
        cpu_keeps_format=True,
    ),
]


def compute_gradient(
    case: GradientCase, image: Tensor, gradient: Tensor, *, patched: bool
) -> Tensor:
    """Run forward always unpatched, and backward patched or not."""
    leaf = image.detach().requires_grad_()
    output = case.forward(leaf)
    if not patched:
        return torch.autograd.grad(output, leaf, gradient)[0]
    with patches_applied("CPU"):
        return torch.autograd.grad(output, leaf, gradient)[0]


def make_inputs(case: GradientCase, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return an input and a gradient of the output; the input's elements all differ."""
    elements = torch.Size(case.shape).numel()
    # Distinct in bfloat16 as well within a window, so that a maximum is the same in every dtype.
    image = (torch.randperm(elements) % 251).view(case.shape).to(dtype)
    output = (
        case.forward(image.to(torch.float64)) if dtype != torch.float64 else case.forward(image)
    )
    return image, torch.randn(output.shape).to(dtype)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Turn torch's flag on, and back to what it was."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def answer(attempt: Attempt) -> object:
    """Return the results, or the error's type and words."""
    try:
        result = attempt()
    except (RuntimeError, IndexError, NotImplementedError) as error:
        return type(error), str(error)
    return tuple(result) if isinstance(result, tuple) else (result,)
