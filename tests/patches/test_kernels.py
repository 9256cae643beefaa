"""Patched ops where other tests do not look: layouts, threads, shared memory, half precision."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nnf
from patches.cases import GRADIENT_CASES, compute_gradient, deterministic_algorithms, make_inputs
from torch import Tensor

from lightning_d9m.control.environment import threads_pinned
from lightning_d9m.patches import exact_sums
from lightning_d9m.patches.kernels import separable
from lightning_d9m.patches.registration import patches_applied

LEGACY = "ignore:(index_reduce.* is in beta|The reduce argument of torch.scatter)"
INDEX = torch.tensor([0, 1, 1])

APART: dict[str, Callable[[Tensor], object]] = {
    "index_add_": lambda x: x[:3].index_add_(0, INDEX, x[3:]),
    "scatter_reduce_": lambda x: x[:3].scatter_reduce_(0, INDEX, x[3:], "prod"),
    "put_": lambda x: x[:3].put_(INDEX, x[3:]),
    "out-self": lambda x: torch.index_reduce(x[:3], 0, INDEX, x[3:], "prod", out=x[:3]),
}


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=lambda case: case.label)
def test_bits_and_layout_are_torchs_and_threads_do_not_matter(case, one_thread) -> None:
    """Bits where the sum is the same: test_edge_cases.py compares the values of the others."""
    image, gradient = make_inputs(case)
    alone = compute_gradient(case, image, gradient, patched=True)
    if case.exact:
        assert torch.equal(alone, compute_gradient(case, image, gradient, patched=False))
    with threads_pinned(4), deterministic_algorithms():
        assert torch.equal(alone, compute_gradient(case, image, gradient, patched=True))
    if case.has_channels_last:
        form = {4: torch.channels_last, 5: torch.channels_last_3d}[image.dim()]
        image, gradient = (part.contiguous(memory_format=form) for part in (image, gradient))
        turned = compute_gradient(case, image, gradient, patched=True)
        assert torch.equal(turned, alone)
        if case.cpu_keeps_format:  # where CUDA's kernel does not
            assert turned.is_contiguous()
        else:
            expected = compute_gradient(case, image, gradient, patched=False)
            assert turned.stride() == expected.stride()


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


@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
def test_half_is_rounded_once() -> None:
    """Losses and products of half precision, which torch rounds after each term."""
    scores, target = torch.randn(2, 5, 4, 3).half(), torch.randint(0, 5, (2, 4, 3))
    low, index = torch.full((1,), 1.1, dtype=torch.half), torch.zeros(6, dtype=torch.int64)
    with patches_applied("CPU"):
        loss = nnf.nll_loss(scores, target)
        products = [
            low.index_reduce(0, index, low.expand(6), "prod"),
            low.scatter_reduce(0, index, low.expand(6), "prod"),
        ]
    reference = nnf.nll_loss(scores.double(), target)
    assert abs(loss.double() - reference) <= torch.finfo(torch.half).eps * abs(reference)
    for product in products:
        assert torch.equal(product, low.float().pow(7).half())


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_median_of_equal_elements_has_one_index(name: str) -> None:
    """The index is that of the first element that equals the median, and the value is there."""
    matrix = torch.randint(0, 3, (50, 9)).float()
    with patches_applied("CPU"):
        values, indices = getattr(torch, name)(matrix, 1)
    assert torch.equal(matrix.gather(1, indices.unsqueeze(1)).squeeze(1), values)
    assert torch.equal(values, matrix.sort(dim=1).values[:, 4])
    assert indices.tolist() == [
        row.tolist().index(value) for row, value in zip(matrix, values, strict=True)
    ]
    every = torch.full((2, 3), float("nan"))
    with patches_applied("CPU"):
        values, indices = getattr(torch, name)(every, 1)
    assert values.isnan().all()
    assert indices.tolist() == [0, 0]


@pytest.mark.filterwarnings(LEGACY)
@pytest.mark.parametrize("name", APART)
def test_parts_of_one_storage_that_do_not_meet_are_taken(name: str) -> None:
    """Both halves of a buffer."""
    expected = APART[name](torch.arange(1.0, 7))
    with patches_applied("CPU"):
        assert torch.equal(APART[name](torch.arange(1.0, 7)), expected)


def test_torch_ops_work_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is as large as all terms, or as the gradients that all taps read: same bits."""
    gradient, grid = torch.randn(1, 40, 5, 6), torch.rand(1, 5, 6, 2) * 2 - 1
    backward = torch.ops.aten.grid_sampler_2d_backward
    columns = torch.arange(1200).view(300, 4) % 3
    calls: list[Callable[[], Tensor]] = [
        lambda: backward(gradient, torch.zeros(1, 40, 3, 4), grid, 0, 0, False, [True, False])[0],
        lambda: torch.ops.aten.upsample_bicubic2d_backward(gradient, [5, 6], [1, 40, 3, 4], False),
        # Few rows, and much in each or many of them.
        lambda: torch.ones(4, 300).index_add(0, torch.tensor([1, 1]), gradient.view(4, 300)[:2]),
        lambda: torch.ones(300, 4).scatter_add(1, columns, gradient.view(300, 4)),
    ]
    with patches_applied("CPU"):
        whole = [call() for call in calls]
        monkeypatch.setattr(exact_sums, "_SLICE", 120)
        monkeypatch.setattr(separable, "_SOME", 120)
        found = []
        run = exact_sums.cut_terms
        monkeypatch.setattr(
            exact_sums, "cut_terms", lambda *args: found.append(len(args[0])) or run(*args)
        )
        for call, expected in zip(calls, whole, strict=True):
            assert torch.equal(call(), expected)
    assert max(found) <= 120


def test_places_without_a_value_keep_their_bits() -> None:
    """Also next to an infinite factor, and a negative zero."""
    target = torch.tensor([-0.0, 2.0, -0.0])
    with patches_applied("CPU"):
        added = target.index_add(0, torch.tensor([1]), torch.ones(1), alpha=float("inf"))
        summed = target.scatter_add(0, torch.tensor([1]), torch.ones(1))
    for result, value in ((added, float("inf")), (summed, 3.0)):
        assert result.tolist() == [0.0, value, 0.0]
        assert result.signbit().tolist() == [True, False, True]
