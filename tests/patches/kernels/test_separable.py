"""Pooling, interpolation and padding: layouts, threads, slices."""

from collections.abc import Callable

import pytest
import torch
from patches.cases import GRADIENT_CASES, compute_gradient, deterministic_algorithms, make_inputs
from torch import Tensor

from lightning_d9m.engine.control.environment import threads_pinned
from lightning_d9m.ops.patches.registration import patches_applied
from lightning_d9m.ops.patches.triton import language, launch

# Gradients that have the bits of torch's CPU kernel on one thread.
EXACT = {"avg_pool3d", "adaptive_avg_pool2d", "replication1d", "reflection1d", "reflection1d-long"}


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=lambda case: case.label)
def test_bits_and_layout_are_torchs_and_threads_do_not_matter(case, one_thread) -> None:
    """Bits where the sum is the same: test_construction.py compares the values of the others."""
    image, gradient = make_inputs(case)
    alone = compute_gradient(case, image, gradient, patched=True)
    if case.label in EXACT:
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
        monkeypatch.setattr(launch, "_SLICE", 120)
        found = []
        run = language.load
        monkeypatch.setattr(
            language, "load", lambda *args, **more: found.append(run(*args, **more)) or found[-1]
        )
        for call, expected in zip(calls, whole, strict=True):
            assert torch.equal(call(), expected)
    assert max(map(len, found)) == 120
