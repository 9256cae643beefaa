"""A forward pass with deterministic algorithms on reaches the ops whose gradient is patched."""

from collections.abc import Callable

import pytest
import torch
import torch._decomp.decompositions as torch_decompositions
import torch.nn.functional as nnf
from patches.cases import deterministic_algorithms
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

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


def pad(x: Tensor) -> Tensor:
    return nnf.pad(x, (1, 2, 3, 0, 1, 1)[: 2 * x.dim() - 4], mode="replicate")


OPS: dict[str, tuple[tuple[int, ...], Forward]] = {
    "bilinear": ((5, 6), interpolate("bilinear")),
    "trilinear": ((3, 4, 5), interpolate("trilinear")),
    "Upsample": ((5, 6), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)),
    **{f"pad{dims}d": ((3, 4, 5)[:dims], pad) for dims in (1, 2, 3)},
}
if hasattr(torch_decompositions, "max_pool3d_with_indices"):  # from torch 2.13 on
    pool = nn.MaxPool3d(3, 2, 1, return_indices=True)
    OPS["MaxPool3d"] = (6, 6, 6), lambda x: pool(x)[0]


@pytest.mark.parametrize("name", OPS)
def test_the_op_runs_and_not_its_decomposition(name: str) -> None:
    """By the autograd graph: the op's own node with the patches, index_put's without."""
    sides, forward = OPS[name]
    image = make_input(*sides)
    plain = forward(image)
    with deterministic_algorithms():
        assert forward(image).grad_fn.name() != plain.grad_fn.name()
        with patches_applied("CPU"):
            output = forward(image)
            assert output.grad_fn.name() == plain.grad_fn.name()
            assert torch.equal(output, plain)
            [gradient] = torch.autograd.grad(output.sum(), image)
        assert forward(image).grad_fn.name() != plain.grad_fn.name()
    [expected] = torch.autograd.grad(plain.sum(), image)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.cuda_build
@pytest.mark.parametrize("name", OPS)
def test_a_cuda_build_runs_the_op_and_not_its_decomposition(name: str) -> None:
    """By fake CUDA tensors, which need no device: their graphs are those of real ones."""
    sides, forward = OPS[name]

    def name_node() -> str:
        with FakeTensorMode():
            return forward(
                torch.randn(2, 3, *sides, device="cuda", requires_grad=True)
            ).grad_fn.name()

    plain = name_node()
    with deterministic_algorithms():
        assert name_node() != plain
        with patches_applied("CUDA"):
            assert name_node() == plain


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
