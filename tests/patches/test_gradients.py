"""Patched gradients: the original's bits, layout, errors and compiled graphs."""

import pytest
import torch
import torch.nn.functional as nnf
from patches.cases import (
    GRADIENT_CASES,
    GradientCase,
    compute_gradient,
    deterministic_algorithms,
    make_inputs,
)
from torch import Tensor

from lightning_d9m.control.torch_flags import threads_pinned
from lightning_d9m.patches.registration import patches_applied

every_case = pytest.mark.parametrize("case", GRADIENT_CASES, ids=lambda case: case.label)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "case", [case for case in GRADIENT_CASES if case.exact], ids=lambda case: case.label
)
def test_gradient_has_the_bits_of_torch(case: GradientCase) -> None:
    """Where the sum is the same; the values of the others are those of test_edge_cases.py."""
    image, gradient = make_inputs(case)
    expected = compute_gradient(case, image, gradient, patched=False)
    assert torch.equal(compute_gradient(case, image, gradient, patched=True), expected)


@pytest.mark.parametrize(
    "case", [case for case in GRADIENT_CASES if case.has_channels_last], ids=lambda case: case.label
)
def test_layout_follows_the_cuda_kernel(case: GradientCase) -> None:
    """channels_last comes out where torch's kernel keeps it; the values do not depend on it."""
    image, gradient = make_inputs(case)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    strided = image.contiguous(memory_format=formats[image.dim()])
    turned = gradient.contiguous(memory_format=formats[image.dim()])
    expected = compute_gradient(case, strided, turned, patched=False)
    actual = compute_gradient(case, strided, turned, patched=True)
    if case.cpu_keeps_format:
        assert actual.is_contiguous()
    else:
        assert actual.stride() == expected.stride()
    assert torch.equal(actual, compute_gradient(case, image, gradient, patched=True))


@every_case
def test_thread_count_does_not_matter(case: GradientCase) -> None:
    """The same bits on one thread and on four, forward off and backward under torch's flag."""
    image, gradient = make_inputs(case)
    alone = compute_gradient(case, image, gradient, patched=True)
    with threads_pinned(4), deterministic_algorithms():
        together = compute_gradient(case, image, gradient, patched=True)
    assert torch.equal(alone, together)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("avg_pool3d_backward", ([2], [2], [0], False, True, None)),
        ("_adaptive_avg_pool3d_backward", ()),
        ("upsample_trilinear3d_backward", None),
        ("reflection_pad3d_backward", ([1, 1, 1, 1, 1, 1],)),
    ],
)
def test_kernels_refuse_shapes_in_the_originals_words(name: str, arguments: object) -> None:
    """A gradient of a shape that the forward pass cannot have given."""
    op = getattr(torch.ops.aten, name)
    image, gradient = torch.ones(2, 3, 4, 4, 4), torch.ones(2, 3, 1, 2, 9)
    words = (
        (gradient, [8, 8, 8], [2, 3, 4, 4, 4], False)
        if arguments is None
        else (gradient, image, *arguments)
    )
    if name == "_adaptive_avg_pool3d_backward":
        words = (gradient[0], image)
    with pytest.raises(RuntimeError) as expected:
        op(*words)
    with patches_applied("CPU"), pytest.raises(RuntimeError) as actual:
        op(*words)
    assert str(actual.value) == str(expected.value)


def test_out_variants_resize_and_fill() -> None:
    """An empty output takes the shape; one of another dtype is refused as in torch."""
    image, gradient = torch.ones(2, 3, 4, 4, 4), torch.ones(2, 3, 2, 2, 2)
    arguments = (gradient, image, [2], [2], [0], False, True, None)
    op = torch.ops.aten.avg_pool3d_backward
    expected = op(*arguments)
    with patches_applied("CPU"):
        target = torch.empty(0)
        assert op.grad_input(*arguments, grad_input=target) is target
        assert torch.equal(target, expected)
        with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
            op.grad_input(*arguments, grad_input=torch.empty(0, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:Dynamo detected:UserWarning")
def test_compiled_graphs_reach_the_patches() -> None:
    """torch.compile traces through fake tensors, and what it made runs the patched kernels."""

    def score(image: Tensor) -> Tensor:
        wide = nnf.interpolate(image, scale_factor=2, mode="bicubic")
        padded = nnf.pad(wide, (2, 1, 1, 2), mode="reflect")
        pooled = nnf.adaptive_avg_pool2d(padded, (5, 3)) + nnf.adaptive_max_pool2d(padded, (5, 3))
        small = nnf.interpolate(pooled, size=(4, 4), mode="bilinear", antialias=True)
        return nnf.nll_loss(small.log_softmax(1), torch.ones(2, 4, 4, dtype=torch.int64))

    image = torch.randn(2, 3, 7, 6, requires_grad=True)
    with patches_applied("CPU"):
        eager = torch.autograd.grad(score(image), image)[0]
        compiled = torch.compile(score, backend="aot_eager", fullgraph=True)
        traced = torch.autograd.grad(compiled(image), image)[0]
    torch.compiler.reset()
    torch.testing.assert_close(traced, eager)
