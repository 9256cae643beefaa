"""A forward pass with deterministic algorithms on reaches the ops whose gradient is patched.

On a CUDA build of torch by fake CUDA tensors, which need no device: torch computes shapes and
graphs as it does for real ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch._decomp.decompositions as torch_decompositions
import torch.nn.functional as nnf
from patches.cases import deterministic_algorithms
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_d9m.patches.catalog.catalog import select_ops
from lightning_d9m.patches.registration import decompositions_bypassed, patches_applied

Forward = Callable[[Tensor], Tensor]
NAMES = ("_upsample_linear_vec", "_replication_pad", "max_pool3d_with_indices")


class LikeCuda(Tensor):
    """A CPU tensor that torch.nn.functional takes for a CUDA tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cpu = property(lambda _: False)
    is_cuda = property(lambda _: True)


def make_input(*shape: int) -> Tensor:
    return torch.randn(2, 3, *shape).as_subclass(LikeCuda).requires_grad_()


def interpolate(mode: str) -> Forward:
    return lambda x: nnf.interpolate(x, scale_factor=2, mode=mode)


POOL = "max_pool3d_with_indices_backward"
# The input's sides, the op, and what its gradient has to call.
OPS: dict[str, tuple[tuple[int, ...], Forward, str]] = {
    "bilinear": ((5, 6), interpolate("bilinear"), "upsample_bilinear2d_backward"),
    "trilinear": ((3, 4, 5), interpolate("trilinear"), "upsample_trilinear3d_backward"),
    "Upsample": (
        (5, 6),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        "upsample_bilinear2d_backward",
    ),
    **{
        f"pad{dims}d": (
            (3, 4, 5)[:dims],
            lambda x, dims=dims: nnf.pad(x, (1, 2, 3, 0, 1, 1)[: 2 * dims], mode="replicate"),
            f"replication_pad{dims}d_backward",
        )
        for dims in (1, 2, 3)
    },
    **(
        {"MaxPool3d": ((6, 6, 6), nn.MaxPool3d(3, 2, 1, return_indices=True), POOL)}
        if hasattr(torch_decompositions, "max_pool3d_with_indices")  # from torch 2.13 on
        else {}
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_the_op_runs_and_not_its_decomposition(name: str) -> None:
    """By the autograd graph: the op's own node with the patches, index_put's without."""
    sides, forward, _ = OPS[name]
    image = make_input(*sides)

    def run() -> Tensor:
        output = forward(image)
        return output[0] if isinstance(output, tuple) else output

    plain = run()
    with deterministic_algorithms():
        assert run().grad_fn.name() != plain.grad_fn.name()
        with patches_applied("CPU"):
            output = run()
            assert output.grad_fn.name() == plain.grad_fn.name()
            assert torch.equal(output, plain)
            [gradient] = torch.autograd.grad(output.sum(), image)
        assert run().grad_fn.name() != plain.grad_fn.name()
    [expected] = torch.autograd.grad(plain.sum(), image)
    torch.testing.assert_close(gradient, expected)


def test_max_pool3d_without_indices_is_not_decomposed() -> None:
    """So that there is nothing to bypass."""
    image = make_input(6, 6, 6)
    with deterministic_algorithms():
        assert nnf.max_pool3d(image, 2).grad_fn.name() == "MaxPool3DWithIndicesBackward0"


def test_excluded_ops_and_other_devices_keep_their_decomposition() -> None:
    """Trilinear is excluded: bilinear alone is restored. A patch of CUDA leaves a CPU's tensor."""
    flat, deep = make_input(5, 6), make_input(3, 4, 5)
    with deterministic_algorithms():
        with patches_applied("CPU", exclude=["upsample_trilinear3d_backward"]):
            linear = nnf.interpolate(flat, scale_factor=2, mode="bilinear")
            assert linear.grad_fn.name().startswith("UpsampleBilinear2D")
            assert "Upsample" not in OPS["trilinear"][1](deep).grad_fn.name()
        with patches_applied("CUDA"):
            assert "Upsample" not in OPS["bilinear"][1](flat).grad_fn.name()
            assert "Replication" not in OPS["pad2d"][1](flat).grad_fn.name()


def test_torchs_functions_are_restored_after_an_error() -> None:
    """All of them, by identity."""
    before = [getattr(torch_decompositions, name, None) for name in NAMES]
    with pytest.raises(KeyError), decompositions_bypassed(["max_pool3d_backward"], "cuda"):
        assert torch_decompositions._replication_pad is not before[1]
        raise KeyError
    assert [getattr(torch_decompositions, name, None) for name in NAMES] == before


class CalledOps(TorchDispatchMode):
    """The names of the ops that run in the body."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def under_the_flag(*, patched: bool) -> Iterator[None]:
    """Run the body with fake tensors under the flag, as a training does."""
    patches = patches_applied("CUDA") if patched else nullcontext()
    with deterministic_algorithms(), FakeTensorMode(), patches:
        yield


def find_backward_ops(name: str, *, patched: bool) -> set[str]:
    """Return the ops that compute the gradient of a forward pass."""
    sides, forward, _ = OPS[name]
    with under_the_flag(patched=patched):
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


@pytest.mark.cuda_build
@pytest.mark.parametrize("name", OPS)
def test_the_gradient_of_a_forward_pass_under_the_flag_is_the_patched_op(name: str) -> None:
    called = find_backward_ops(name, patched=True)
    assert OPS[name][2] in called
    assert not any("index_put" in op for op in called)


@pytest.mark.cuda_build
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


@pytest.mark.cuda_build
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
