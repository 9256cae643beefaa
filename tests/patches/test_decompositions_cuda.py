"""On a CUDA build of torch: the graph of a forward pass has the ops whose gradient is patched.

Fake CUDA tensors need no device: torch computes shapes and graphs as it does for real ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from patches.cases import deterministic_algorithms
from patches.test_decompositions import OPS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_d9m.patches.catalog.catalog import select_ops
from lightning_d9m.patches.registration import patches_applied

pytestmark = pytest.mark.cuda_build


class CalledOps(TorchDispatchMode):
    """The names of the ops that run in the body."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def session(*, patched: bool) -> Iterator[None]:
    """Run the body with fake tensors under the flag, as a training does."""
    patches = patches_applied("CUDA") if patched else nullcontext()
    with deterministic_algorithms(), FakeTensorMode(), patches:
        yield


def find_backward_ops(name: str, *, patched: bool) -> set[str]:
    """Return the ops that compute the gradient of a forward pass."""
    sides, forward, _ = OPS[name]
    with session(patched=patched):
        image = torch.randn(2, 3, *sides, device="cuda", requires_grad=True)
        output = forward(image)
        output = output[0] if isinstance(output, tuple) else output
        assert output.device.type == "cuda"
        nodes = list(walk(output.grad_fn))
        with CalledOps() as called:
            # Not torch.autograd.grad, whose engine needs the device. What follows the first node in
            # the graph is called with the gradient that this one returns.
            gradients = {nodes[0]: torch.ones_like(output)}
            for node in nodes:
                run_node(node, gradients)
    return set(called.names)


def walk(node: Node) -> Iterator[Node]:
    """Yield the nodes of a chain from the output to the input."""
    while node is not None and "AccumulateGrad" not in node.name():
        yield node
        node = node.next_functions[0][0]


def run_node(node: Node, gradients: dict[Node, Tensor]) -> None:
    returned = node(gradients[node])
    first = returned[0] if isinstance(returned, tuple) else returned
    following = node.next_functions[0][0]
    if following is not None:
        gradients[following] = first


@pytest.mark.parametrize("name", OPS)
def test_the_gradient_of_a_forward_pass_under_the_flag_is_the_patched_op(name: str) -> None:
    called = find_backward_ops(name, patched=True)
    assert OPS[name][2] in called
    assert not any("index_put" in op for op in called)


@pytest.mark.parametrize("name", OPS)
def test_without_patches_it_is_a_decomposition(name: str) -> None:
    """The negative control: this torch would not reach the op."""
    called = find_backward_ops(name, patched=False)
    assert OPS[name][2] not in called
    assert any("index_put" in op for op in called)


def find_cuda_kernel(overload: str) -> str:
    """Return where the active kernel of an overload was registered for CUDA."""
    dump = torch._C._dispatch_dump(f"aten::{overload}").splitlines()
    return next(line for line in dump if line.startswith("CUDA: "))


@pytest.mark.parametrize("op", select_ops(torch.__version__), ids=lambda op: op.name)
def test_every_overload_of_the_catalog_calls_our_kernel(op) -> None:
    """And torch's again afterward."""
    overloads = [name for name in op.kernels if hasattr(torch.ops.aten, name.partition(".")[0])]
    before = {overload: find_cuda_kernel(overload) for overload in overloads}
    assert all("registration.py" not in kernel for kernel in before.values())
    with patches_applied("CUDA"):
        for overload in overloads:
            assert "lightning_d9m/patches/registration.py" in find_cuda_kernel(overload)
    assert {overload: find_cuda_kernel(overload) for overload in overloads} == before
