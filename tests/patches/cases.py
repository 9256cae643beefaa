"""Ops whose gradient is patched, and functions that run and compare them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_d9m.ops.patches.registration import patches_applied

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

Forward = Callable[[Tensor], Tensor]
Attempt = Callable[[], object]

SAMPLED = """
    bincount histc index_add index_put index_reduce median nanmedian
    nn.functional.adaptive_avg_pool2d nn.functional.adaptive_avg_pool3d
    nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d
    nn.functional.adaptive_max_pool3d nn.functional.avg_pool3d nn.functional.ctc_loss
    nn.functional.embedding nn.functional.embedding_bag nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d nn.functional.grid_sample nn.functional.interpolate
    nn.functional.max_pool3d nn.functional.max_unpool1d nn.functional.max_unpool2d
    nn.functional.max_unpool3d nn.functional.nll_loss nn.functional.pad
    nn.functional.upsample_bilinear put scatter scatter_add scatter_reduce
""".split()  # noqa: SIM905 - a table is easier to read
# The first change of torch's flag loads Inductor, which sets TORCHINDUCTOR_CACHE_DIR permanently.
torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())


class GradientCase(NamedTuple):
    """An op of one input whose gradient with respect to it is patched.

    Attributes:
        label: The name of the test.
        shape: The input's.
        forward: The op.
    """

    label: str
    shape: tuple[int, ...]
    forward: Forward

    @property
    def cpu_keeps_format(self) -> bool:
        """Whether torch's CPU kernel keeps channels_last where its CUDA kernel does not."""
        return "flection" in self.label or "cation" in self.label

    @property
    def has_channels_last(self) -> bool:
        """Whether the input has a batch and two or three spatial dimensions."""
        dims = 3 if "3d" in self.label or "tri" in self.label else 2
        return len(self.shape) == dims + 2


def _pool_fractionally(name: str, sides: int, x: Tensor) -> Tensor:
    starts = torch.linspace(0.1, 0.9, x.shape[0] * x.shape[1] * sides, dtype=x.dtype)
    samples = starts.view(*x.shape[:2], sides)
    return getattr(nnf, name)(x, 3, [4] * sides, _random_samples=samples)


def _call(label: str, shape: tuple[int, ...], *given: object, **more: object) -> GradientCase:
    name = label.partition("-")[0]
    return GradientCase(label, shape, lambda x: getattr(nnf, name)(x, *given, **more))


def _resize(label: str, shape: tuple[int, ...], **given: object) -> GradientCase:
    words = {"mode": label.partition("-")[0], **given}
    words |= {"align_corners": True} if label.endswith("-corners") else {}
    words |= {"antialias": True} if label.endswith("-antialiased") else {}
    return GradientCase(label, shape, partial(nnf.interpolate, **words))


def _pad(label: str, shape: tuple[int, ...], *sides: int) -> GradientCase:
    mode = "reflect" if label.startswith("reflection") else "replicate"
    return GradientCase(label, shape, partial(nnf.pad, pad=sides, mode=mode))


def _fraction(label: str, shape: tuple[int, ...], sides: int) -> GradientCase:
    return GradientCase(label, shape, partial(_pool_fractionally, label, sides))


FLAT, IMAGE, VOLUME, TALL = (2, 3, 7), (2, 3, 7, 6), (2, 3, 4, 5, 6), (2, 3, 17, 6)
SIDES = {"kernel_size": (2, 3, 2), "stride": (2, 1, 3), "padding": (1, 1, 0)}
GRADIENT_CASES = [
    _call("avg_pool3d", (2, 3, 4, 6, 8), 2),
    _call("avg_pool3d-divisor", (3, 4, 6, 8), 2, divisor_override=5),
    _call("avg_pool3d-overlap", (2, 3, 7, 9, 8), 3, 2, 1, ceil_mode=True),
    _call("avg_pool3d-sides", (2, 3, 7, 9, 8), count_include_pad=False, **SIDES),
    _call("adaptive_avg_pool2d", (2, 3, 8, 6), (2, 3)),
    _call("adaptive_avg_pool2d-odd", (2, 3, 7, 9), (3, 4)),
    _call("adaptive_avg_pool2d-up", (3, 3, 4), (5, 7)),
    _call("adaptive_avg_pool3d", (2, 3, 7, 4, 5), (3, 2, 2)),
    _call("adaptive_max_pool2d", (2, 3, 7, 9), (3, 4)),
    _call("adaptive_max_pool2d-up", (3, 3, 4), (5, 7)),
    _call("adaptive_max_pool3d", (2, 3, 7, 4, 5), (3, 2, 2)),
    _call("max_pool3d", (2, 3, 7, 9, 8), 3, 2, 1, ceil_mode=True),
    _call("max_pool3d-dilated", (3, 7, 6, 8), 3, 1, 1, dilation=2),
    _fraction("fractional_max_pool2d", (2, 3, 9, 8), 2),
    _fraction("fractional_max_pool3d", (2, 3, 9, 8, 7), 3),
    _resize("linear", FLAT, scale_factor=2.3),
    _resize("linear-corners", FLAT, size=5),
    _resize("bilinear", IMAGE, size=(13, 4)),
    _resize("bilinear-corners", IMAGE, scale_factor=2),
    _resize("bilinear-one", (2, 3, 1, 1), size=5),
    _resize("bicubic", IMAGE, size=(13, 4)),
    _resize("bicubic-corners", IMAGE, scale_factor=2),
    _resize("trilinear", VOLUME, size=(7, 3, 9)),
    _resize("bilinear-antialiased", TALL, size=(5, 11)),
    _resize("bicubic-antialiased", TALL, size=(5, 11)),
    _pad("reflection1d", FLAT, 3, 5),
    _pad("reflection1d-long", (3, 3), 2, 2),
    _pad("reflection2d", IMAGE, 3, 5, 6, 1),
    _pad("reflection2d-crop", IMAGE, -1, 2, 2, -2),
    _pad("reflection3d", VOLUME, 3, 5, 1, 0, 2, 3),
    # The last dimension has more outputs than the one before it.
    _pad("reflection3d-sides", (2, 1, 8, 8, 9), 0, 8, 2, 5, 6, 2),
    _pad("replication1d", FLAT, 3, 9),
    _pad("replication2d", IMAGE, 3, 0, 9, 1),
    _pad("replication3d", VOLUME, 3, 5, 1, -1, 0, 7),
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
    output = case.forward(image.double())
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
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return type(error), str(error)
    return tuple(result) if isinstance(result, tuple) else (result,)


@cache
def load_infos() -> "list[OpInfo]":
    """Return torch's list of ops, which takes two seconds to import."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # For each sample torch looks for a unittest in the stack, which is deep and slow below pytest.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    # The import freezes torch's flags for the whole process; other tests set them.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return op_db


def compute(info: "OpInfo", sample: "SampleInput") -> tuple[Tensor, ...]:
    """Return the outputs."""
    # torch.manual_seed keeps a stack for each kind of device that is not there.
    torch.default_generator.manual_seed(0)
    outputs = tree_leaves(info(sample.input, *sample.args, **sample.kwargs))
    return tuple(part for part in outputs if isinstance(part, Tensor))


def evaluate(info: "OpInfo", sample: "SampleInput") -> tuple[Tensor, ...]:
    """Return the outputs, and the gradients of the sum of their squares."""
    given = tree_leaves((sample.input, sample.args, sample.kwargs))
    leaves = [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad]
    outputs = compute(info, sample)
    real = [torch.view_as_real(part) if part.is_complex() else part for part in outputs]
    smooth = [part.square().sum() for part in real if part.requires_grad]
    if not (smooth and leaves):
        return outputs
    gradients = torch.autograd.grad(sum(smooth), leaves, allow_unused=True)
    return *outputs, *(part for part in gradients if part is not None)
