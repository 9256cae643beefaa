"""Patched gradients of ``grid_sample`` and ``CTCLoss``: the answers of the original."""

import pytest
import torch
import torch.nn.functional as nnf
from patches.cases import assert_alike
from torch import Tensor

from lightning_d9m.patches.registration import patches_applied

CORNERS_AND_MASK = (False, [True, True])
NAN, INF = float("nan"), float("inf")


pytestmark = pytest.mark.usefixtures("one_thread")


GRIDS = [
    (mode, padding, corners, dims)
    for mode in ("bilinear", "nearest", "bicubic")
    for padding in ("zeros", "border", "reflection")
    for corners in (False, True)
    for dims in (2, 3)
    if (mode, dims) != ("bicubic", 3)
]


@pytest.mark.parametrize(("mode", "padding", "corners", "dims"), GRIDS)
def test_grid_sample(mode: str, padding: str, corners: bool, dims: int) -> None:
    """At most 3 * 28 * 16 terms in another order, and positions rounded differently.

    A position is a sum of coordinates up to 12; its error of 12 units of rounding enters the
    weights with a slope of at most 2.
    """
    image = torch.randn(2, 3, *(5, 6, 4)[:dims], dtype=torch.float64, requires_grad=True)
    grid = (torch.randn(2, *(4, 7, 3)[:dims], dims, dtype=torch.float64) * 1.2).requires_grad_()
    gradient = torch.randn(2, 3, *grid.shape[1:-1], dtype=torch.float64)

    def differentiate() -> tuple[Tensor, ...]:
        sampled = nnf.grid_sample(image, grid, mode, padding, corners)
        return torch.autograd.grad(sampled, (image, grid), gradient)

    assert_alike(differentiate, tolerance=256)
    if mode == "bilinear":

        def differentiate_one() -> Tensor:
            sampled = nnf.grid_sample(image.detach(), grid, mode, padding, corners)
            return torch.autograd.grad(sampled, grid, gradient)[0]

        assert_alike(differentiate_one, tolerance=256)
        with patches_applied("CPU"):
            leaf = torch.rand(1, 1, *(3, 4, 2)[:dims], dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(
                lambda x: nnf.grid_sample(x, grid[:1].detach(), mode, padding, corners), leaf
            )


def test_grid_sample_where_no_integer_reaches() -> None:
    """A coordinate that is NaN touches no input and has no slope; an infinite one is padded.

    So on CUDA; torch's CPU kernel answers NaN, or reads outside of the input and crashes.
    """
    image = torch.randn(1, 2, 5, 6, requires_grad=True)
    grid = torch.rand(1, 1, 4, 2)
    grid[0, 0, 0, 0], grid[0, 0, 1, 1], grid[0, 0, 2] = NAN, INF, -INF
    grid.requires_grad_()
    for mode in (0, 1):
        for padding in (0, 1, 2):
            with patches_applied("CPU"):
                by_image, by_grid = torch.ops.aten.grid_sampler_2d_backward(
                    torch.ones(1, 2, 1, 4), image, grid, mode, padding, *CORNERS_AND_MASK
                )
            assert by_image.isfinite().all()
            assert by_grid.isfinite().all()
            assert by_grid[0, 0, 0, 0] == 0


def test_grid_sample_refuses_in_the_originals_words() -> None:
    """Shapes that do not belong together, and a mode that does not exist in 3 dimensions."""
    image, grid = torch.ones(2, 3, 4, 4), torch.ones(2, 5, 5, 2)
    backward = torch.ops.aten.grid_sampler_2d_backward
    bad = (torch.ones(2, 3, 5, 5), image, grid[:1], 0, 0, *CORNERS_AND_MASK)
    assert_alike(lambda: backward(*bad))
    assert_alike(
        lambda: backward(torch.ones(2, 3, 5, 5), image, grid.double(), 0, 0, *CORNERS_AND_MASK)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("infinity", [False, True])
def test_ctc_loss(dtype: torch.dtype, infinity: bool) -> None:
    """Exponents are sums of 30 logarithms of up to 100: 3000 units of rounding at most.

    One target is longer than its input can emit, one is empty; the lengths come as lists and as
    tensors, the targets padded and concatenated.
    """
    steps, batch, labels = 30, 4, 6
    scores = torch.randn(steps, batch, labels, dtype=dtype).log_softmax(2)
    targets = torch.randint(1, labels, (batch, 22))
    lengths, label_lengths = [30, 25, 30, 20], [10, 5, 0, 20]
    joined = torch.cat([row[:count] for row, count in zip(targets, label_lengths, strict=True)])
    silent = scores.clone()
    silent[3, 1, 2] = -INF
    short = [5, 4, 3, 2]
    for given, arguments in [
        (scores, (targets, lengths, label_lengths)),
        (scores, (joined, torch.tensor(lengths), torch.tensor(label_lengths))),
        (silent, (targets, lengths, label_lengths)),
        (scores, (targets[:, :5] - 1, lengths, short, labels - 1)),
        (scores, (joined[:0], lengths, [0, 0, 0, 0])),
    ]:

        def differentiate(given=given, arguments=arguments) -> Tensor:
            leaf = given.detach().requires_grad_()
            loss = nnf.ctc_loss(leaf, *arguments, reduction="none", zero_infinity=infinity)
            return torch.autograd.grad(loss, leaf, torch.arange(1, batch + 1).to(dtype))[0]

        assert_alike(differentiate, tolerance=3000)


def test_ctc_loss_derivative() -> None:
    """Numerical derivatives agree."""
    scores = torch.randn(9, 2, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(1, 5, (2, 3))

    def score(given: Tensor) -> Tensor:
        return nnf.ctc_loss(given.log_softmax(2), targets, [9, 7], [3, 2])

    with patches_applied("CPU"):
        assert torch.autograd.gradcheck(score, scores)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("mask", [[True, True], [False, True]])
@pytest.mark.parametrize("empty", ["batch", "channels", "outputs"])
def test_grid_sample_of_nothing_has_zero_gradients(empty: str, mask: list[bool], dims: int) -> None:
    """As a detector without proposals; torch's CPU kernel leaves the image's gradient to chance."""
    batch, channels = (0 if empty == name else 2 for name in ("batch", "channels"))
    sizes, outputs = (5, 6, 4)[:dims], (0 if empty == "outputs" else 4, *(7, 3)[: dims - 1])
    image, grid = torch.randn(batch, channels, *sizes), torch.randn(batch, *outputs, dims)
    backward = getattr(torch.ops.aten, f"grid_sampler_{dims}d_backward")
    gradient = torch.randn(batch, channels, *outputs)
    with patches_applied("CPU"):
        by_image, by_grid = backward(gradient, image, grid, 0, 0, False, mask)
    assert torch.equal(by_grid, torch.zeros_like(grid))
    assert torch.equal(by_image, torch.zeros_like(image)) if mask[0] else by_image is None
