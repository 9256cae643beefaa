"""Kernels of exact sums, under Triton's interpreter: the bits of the torch ops."""

from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import torch
from patches.kernels.exact_cases import DTYPES, bits, make_special, make_terms
from patches.triton.interpreted import interpreted, kernels_on_cpu, refuse
from torch import Tensor

from lightning_d9m.patches.kernels import (
    ctc_loss,
    embedding_bag,
    exact_sum,
    histc_bincount,
    index_add,
    index_reduce,
    scatter,
)
from lightning_d9m.patches.triton import exact_sum as kernels
from lightning_d9m.patches.triton import launch


@contextmanager
def launched():
    """Run the kernels, in blocks that the interpreter handles at once."""
    sizes = mock.patch.multiple(launch, _BLOCK=4096, _SMALL_BLOCK=4096)
    with sizes, kernels_on_cpu(), launch.kernels_noted() as used:
        yield
    assert set(used) == {"exact_sum:accumulate"}


def assert_same(compute: Callable[[], Tensor]) -> Tensor:
    """Compare the bits by torch ops with those by the kernels."""
    expected = compute()
    with launched():
        actual = compute()
    assert torch.equal(bits(actual), bits(expected))
    return actual


@interpreted
def test_every_dtype_has_the_bits_of_the_torch_ops() -> None:
    """Within the guard bits and beyond; skipped keys; what is not finite; with and without self."""
    for dtype in DTYPES:
        special_index, special = make_special(dtype)
        for spread in (3, 39, 120):
            values = torch.cat(
                [make_terms(dtype, 2 * 300, spread).view(2, 300), special.expand(2, -1)], 1
            )
            index = torch.cat([torch.randint(-1, 41, (300,)), special_index + 20])
            values, index = (
                values.unsqueeze(2),
                index.to(torch.int32 if spread == 3 else torch.int64),
            )
            start = make_terms(dtype, 80, spread).view(2, 40, 1)
            start[0, 20:26, 0] = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, torch.nan, -0.0])

            def add(values=values, index=index, start=start) -> Tensor:
                out = start.clone()
                exact_sum.accumulate(out, index, values, include=True)
                return out

            assert_same(add)
            assert_same(lambda i=index, v=values, d=dtype: exact_sum.sum_by_index(i, v, 40, d))


@interpreted
def test_a_thousand_orders_give_one_output() -> None:
    """Each order is one of the outer rows, with its own index for each element."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values, index = make_terms(dtype, 24, 120), torch.randint(0, 3, (24,))
        values[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)
        index[:3] = torch.tensor([0, 0, 1])
        orders = torch.stack([torch.randperm(24) for _ in range(1000)])
        sums = assert_same(
            lambda i=index[orders], v=values[orders], d=dtype: exact_sum.sum_by_index(
                i.unsqueeze(2), v.unsqueeze(2), 3, d
            )
        )
        assert (bits(sums) == bits(sums[:1])).all()


@interpreted
def test_offsets_of_64_bits() -> None:
    """The code for tensors of more than 2**31 elements, on small ones."""
    values, index = torch.randn(2, 50, 3), torch.randint(0, 5, (50,))
    with mock.patch.object(kernels, "needs_int64", return_value=True):
        assert_same(lambda: exact_sum.sum_by_index(index, values, 5, torch.float32))


@interpreted
def test_more_terms_than_two_to_the_31() -> None:
    """Limbs of another width, and fewer guard bits."""
    values, index = make_terms(torch.float32, 50, 60).view(1, 50, 1), torch.zeros(50).long()
    for dtype in (torch.float32, torch.float64):
        for terms in (2**20, 2**31 - 1, 2**31, 2**35):
            limbs = exact_sum.plan_limbs(dtype, terms)
            with mock.patch.object(exact_sum, "plan_limbs", lambda *_, limbs=limbs: limbs):
                assert_same(lambda d=dtype: exact_sum.sum_by_index(index, values.to(d), 1, d))


@interpreted
def test_ops_that_add_by_index() -> None:
    """Along every dimension; contiguous, strided and half; few values; complex; negative keys."""

    def run(call: Callable[[Tensor], object], target: Tensor) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            out = target.clone()
            call(out).write(out)
            return torch.view_as_real(out) if out.is_complex() else out

        return compute

    big, source = torch.randn(4, 9, 3), torch.randn(4, 20, 3)
    where = torch.randint(0, 9, (20,))
    each = torch.randint(0, 9, (4, 20, 3))
    for target, values in [
        (big, source),
        (big.half(), source.half()),
        (big.transpose(0, 2), source.transpose(0, 2)),
        (big.cfloat(), source.cfloat() * (1 - 2j)),
        (torch.randn(4, 900, 3), source),
    ]:
        turned = target.stride(0) == 1
        slots = each.transpose(0, 2) if turned else each
        for alpha in (1, 0.3):
            assert_same(
                run(
                    lambda out, v=values, a=alpha: index_add.index_add(
                        refuse, out, 1, where, v, alpha=a
                    ),
                    target,
                )
            )
        for index in (slots, slots[:2, :, :2]):
            assert_same(
                run(
                    lambda out, i=index, v=values: scatter.scatter_add(refuse, out, 1, i, v),
                    target,
                )
            )
        first = target.shape[0]
        rows = torch.randint(-first, first, (7,))
        assert_same(
            run(
                lambda out, r=rows, v=values: index_add.index_put(
                    refuse, out, (r, where[:7]), v[0, :7], accumulate=True
                ),
                target,
            )
        ) if not turned else None
    grad = torch.randn(30, 5, dtype=torch.bfloat16)
    assert_same(
        lambda: index_add.embedding_dense_backward(
            refuse,
            grad,
            torch.randint(0, 4, (30,), generator=torch.Generator().manual_seed(0)),
            6,
            2,
            False,
        )
    )


@interpreted
def test_ops_that_use_sums() -> None:
    """The greatest of a bag, bins, means; the alignment loss, whose other steps are torch ops."""
    grad, won = torch.randn(6, 4), torch.randint(-1, 5, (6, 4))
    sizes = torch.tensor([2, 0, 1, 3, 1, 1])
    none = torch.zeros(0, dtype=torch.int64)
    assert_same(
        lambda: embedding_bag.embedding_bag_dense_backward(
            refuse, grad, none, none, sizes, won, 5, False, 2, None
        )
    )
    bins, weights = torch.randint(0, 9, (200,), dtype=torch.uint8), torch.randn(200)
    assert_same(lambda: histc_bincount.bincount(refuse, bins, weights, 12))
    assert_same(lambda: histc_bincount.bincount(refuse, bins, weights.half()))
    source, where = torch.randn(4, 20, 3), torch.randint(0, 9, (20,))
    for dtype in (torch.float32, torch.float16):
        for count in (12, 500):
            for include in (True, False):

                def average(dtype=dtype, count=count, include=include) -> Tensor:
                    out = torch.arange(4.0 * count * 3).view(4, count, 3).to(dtype)
                    index_reduce.index_reduce(
                        refuse, out, 1, where, source.to(dtype), "mean", include_self=include
                    ).write(out)
                    return out

                assert_same(average)
    scores = torch.randn(9, 2, 5).log_softmax(2)
    targets, lengths = torch.tensor([[1, 2, 2], [3, 4, 0]]), ([9, 7], [3, 2])
    loss, alpha = torch._ctc_loss(scores, targets, *lengths)
    assert_same(
        lambda: ctc_loss.ctc_loss_backward(
            refuse, torch.ones(2), scores, targets, *lengths, loss, alpha, 0
        )
    )
