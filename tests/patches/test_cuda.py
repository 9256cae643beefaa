"""On a CUDA device: one input gives one output, whatever else the device does."""

from collections.abc import Iterator

import pytest
import torch
from patches.cases import deterministic_algorithms
from scripts import load_script
from torch import Tensor

from lightning_d9m.hashing.digest import digest_many
from lightning_d9m.patches.catalog.catalog import select_ops
from lightning_d9m.patches.registration import patches_applied

workloads = load_script("benchmarks/patch_workloads.py")

CALLS = 1000
WORKLOADS = [
    pytest.param(workload, id=f"{workload.op}-{workload.shape}") for workload in workloads.WORKLOADS
]
needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_cuda(test: object) -> object:
    """Mark a test as one that needs a CUDA device."""
    for mark in needs_cuda:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def varied() -> Iterator[dict[str, int]]:
    """Collect how many outputs the originals gave."""
    return {}


def list_tensors(outputs: object) -> list[Tensor]:
    """Return the outputs of a call, detached."""
    return [part.detach() for part in (outputs if isinstance(outputs, tuple) else (outputs,))]


def count_outputs(call: object, calls: int) -> int:
    """Return how many distinct outputs a call gives while another stream competes."""
    side, noise = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    seen = set()
    for turn in range(calls):
        with torch.cuda.stream(side):
            for _ in range(turn % 4):
                noise @ noise
        seen.add(tuple(digest_many(list_tensors(call()))))
    return len(seen)


def test_every_patched_op_has_a_workload() -> None:
    """No op escapes the tests on a CUDA device.

    Three are torch's own: a transposed convolution and a lookup, to see whether their determinism
    costs anything, and topk, which should not vary.
    """
    measured = {workload.op for workload in workloads.WORKLOADS}
    patched = {op.name for op in select_ops(torch.__version__)}
    assert patched <= measured
    assert measured - patched == {"convolution", "embedding_dense_backward", "topk"}


@on_cuda
@pytest.mark.parametrize("workload", WORKLOADS)
def test_one_input_gives_one_output(workload, varied, record_property) -> None:
    """1,000 calls beside a competing stream; the original's count is put on record beside it."""
    call = workload.make("cuda")
    varied[workload.op] = count_outputs(call, CALLS)
    record_property("distinct_outputs_of_the_original", varied[workload.op])
    with patches_applied(), deterministic_algorithms():
        assert count_outputs(call, CALLS) == 1


@on_cuda
def test_the_originals_vary(varied) -> None:
    """The negative control: the same harness sees torch's kernels give several outputs."""
    if not varied:
        pytest.skip("runs after test_one_input_gives_one_output, on its counts")
    assert sum(count > 1 for count in varied.values()) >= len(varied) // 3, varied


@on_cuda
@pytest.mark.parametrize("workload", WORKLOADS)
def test_values_and_layout_are_the_originals(workload) -> None:
    """float32 sums of up to 2^20 terms in another order: 1e-3 of the greatest magnitude."""
    call = workload.make("cuda")
    expected = list_tensors(call())
    with patches_applied(), deterministic_algorithms():
        actual = list_tensors(call())
    for left, right in zip(actual, expected, strict=True):
        assert (left.shape, left.dtype, left.stride()) == (right.shape, right.dtype, right.stride())
    if workload.op in {"put_", "max_unpool2d", "max_unpool3d"}:
        return  # which of several values wins is what varies
    for left, right in zip(actual, expected, strict=True):
        if left.is_floating_point():
            bound = 1e-3 * right.abs().max().item()
            torch.testing.assert_close(left, right, rtol=0, atol=bound)


@on_cuda
def test_backward_on_after_forward_off() -> None:
    """The flag is turned on between the passes, and no alert fires."""
    image = torch.randn(2, 3, 8, 8, device="cuda", requires_grad=True)
    wide = torch.nn.functional.interpolate(image, scale_factor=2, mode="bilinear")
    padded = torch.nn.functional.pad(wide, (2, 2, 2, 2), mode="replicate")
    with deterministic_algorithms():
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.autograd.grad(padded.sum(), image, retain_graph=True)
        with patches_applied():
            torch.autograd.grad(padded.sum(), image)
