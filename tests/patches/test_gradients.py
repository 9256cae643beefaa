"""Patched gradients: the original's bits and layout, the same for any number of threads."""

import pytest
import torch
from patches.cases import (
    GRADIENT_CASES,
    compute_gradient,
    deterministic_algorithms,
    make_inputs,
)

from lightning_d9m.control.torch_flags import threads_pinned
from lightning_d9m.patches.registration import patches_applied


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
