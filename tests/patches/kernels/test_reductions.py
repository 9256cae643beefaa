"""Medians, histograms and scans: one index, one division, blocks in a fixed order."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_d9m.engine.control.environment import threads_pinned
from lightning_d9m.ops.patches.kernels import reductions
from lightning_d9m.ops.patches.kernels.reductions import histc
from lightning_d9m.ops.patches.registration import patches_applied

NAN = float("nan")
Scan = Callable[[Tensor, int], Tensor]
Join = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_median_of_equal_elements_has_one_index(name: str) -> None:
    """The index is that of the first element that equals the median, and the value is there."""
    matrix = torch.randint(0, 3, (50, 9)).float()
    with patches_applied("CPU"):
        values, indices = getattr(torch, name)(matrix, 1)
        of_nan = getattr(torch, name)(torch.full((2, 3), NAN), 1)
    assert torch.equal(values, matrix.sort(dim=1).values[:, 4])
    assert indices.tolist() == [
        row.tolist().index(value) for row, value in zip(matrix, values, strict=True)
    ]
    assert of_nan.values.isnan().all()
    assert of_nan.indices.tolist() == [0, 0]


class Calls(TorchDispatchMode):
    """Each operation of torch that is called, but for views, with its arguments."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.seen = [*getattr(self, "seen", ()), (func.overloadpacket, args)]
        return func(*args, **(kwargs or {}))


def test_histc_divides_by_a_tensor_on_the_device() -> None:
    """As a CPU: CUDA multiplies by the reciprocal of a number and of a 0-d tensor on the CPU."""
    with Calls() as calls:
        histc(torch.empty(9, device="meta"), 7, 0, 7)
    divisors = [args[1] for op, args in calls.seen if op is torch.ops.aten.div]
    assert [by.device.type for by in divisors] == ["meta"]


@pytest.mark.parametrize("scan", [reductions.cumprod, reductions.logcumsumexp])
@pytest.mark.parametrize(("size", "count"), [(2**11, 2), (2**22, 4), (2**22 - 1, 6), (2**24, 8)])
def test_a_scan_of_a_row_starts_few_kernels(scan, size: int, count: int) -> None:
    """One for each operation, but that a padding fills a new tensor, and copies into it."""
    row = torch.empty(size, device="meta")
    with Calls() as calls:
        scan(row, 0)
    paddings = sum(op is torch.ops.aten.constant_pad_nd for op, _ in calls.seen)
    assert len(calls.seen) + paddings == count, [str(op) for op, _ in calls.seen]


def scan_plainly(row: Tensor, scan: Scan, join: Join, size: int) -> Tensor:
    """Return the scan in blocks: a block after the other, each joined to the scan of their ends."""
    parts = [scan(block, 0) for block in row.split(size)]
    if len(parts) > 1:
        ahead = scan_plainly(torch.stack([part[-1] for part in parts[:-1]]), scan, join, size)
        parts[1:] = [join(part, end) for part, end in zip(parts[1:], ahead, strict=True)]
    return torch.cat(parts)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", reductions._SCANS)
def test_the_tree_of_a_scan_is_that_of_plain_blocks(name: str, threads: int) -> None:
    """Bit for bit, on any number of threads; of two levels of blocks and a rest."""
    row = 1 + torch.randn(2**22 + 100, generator=torch.Generator().manual_seed(0)) * 1e-3
    scan, join, _ = reductions._SCANS[name]
    expected = scan_plainly(row, scan, join, reductions._SCANNED)
    with threads_pinned(threads), patches_applied("CPU"):
        assert torch.equal(scan(row, 0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_long_row_is_scanned_in_blocks_whose_order_is_fixed(dtype, monkeypatch) -> None:
    """Three levels of blocks of 4, of which one is full: its end is joined to the next block."""
    monkeypatch.setattr(reductions, "_SCANNED", 4)
    row = torch.randn(34, dtype=dtype)
    with patches_applied("CPU"):
        products, sums = row.cumprod(0), row[None].logcumsumexp(1)[0]
        special = torch.tensor([2.0, NAN, 1, 1, 1, 0.5]).cumprod(0)
    close = {"rtol": 0.05 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-6}
    assert torch.allclose(products.double(), row.double().cumprod(0), **close)
    assert torch.allclose(sums.double(), row.double().logcumsumexp(0), **close)
    assert special.isnan().tolist() == [False, *[True] * 5]
    powers = torch.randint(-3, 4, (34,)).double().exp2()
    with patches_applied("CPU"):
        found = powers.cumprod(0)
    assert torch.equal(found, powers.cumprod(0))  # no product rounds
