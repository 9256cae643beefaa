"""Patches are applied all or none, catch every caller, and leave nothing behind.

A forward pass with deterministic algorithms on reaches the ops whose gradient is patched.
"""

import dataclasses
import subprocess
from collections.abc import Callable

import pytest
import torch
import torch._decomp.decompositions as torch_decompositions
import torch._prims_common
import torch.nn.functional as nnf
from patches.cases import deterministic_algorithms
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_d9m.compatibility import can_patch
from lightning_d9m.errors import D9mError, SettingError
from lightning_d9m.ops.patches import registration
from lightning_d9m.ops.patches.catalog import catalog
from lightning_d9m.ops.patches.catalog.catalog import OPS, find_op, select_ops
from lightning_d9m.ops.patches.registration import (
    Kernel,
    patches_applied,
    require,
    variation_allowed,
)

KERNELS = [f"aten::{overload}" for op in select_ops(torch.__version__) for overload in op.kernels]


def dump_kernels() -> list[str]:
    """Return the dispatcher's table of every op in the catalog."""
    return [torch._C._dispatch_dump(name) for name in KERNELS]


def put_twice() -> Tensor:
    """Call an op that torch refuses on a CPU too."""
    return torch.zeros(3).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))


def refused_by_torch():
    return pytest.raises(RuntimeError, match="put_ does not have a deterministic")


def test_the_alert_never_fires_and_the_last_value_wins() -> None:
    """What torch refuses runs while the patches are applied, but for an op that is excluded.

    Production registers for CUDA: then tensors on a CPU keep torch's kernels.
    """
    with deterministic_algorithms():
        with patches_applied("CPU"):
            assert put_twice().tolist() == [0.0, 2.0, 0.0]
            with pytest.raises(SettingError, match="already applied"), patches_applied("CPU"):
                pytest.fail("the body ran")
            assert put_twice()[1] == 2.0
        with refused_by_torch():
            put_twice()
        with patches_applied("CPU", exclude=["put_"]) as patched, refused_by_torch():
            put_twice()
        assert "histc" in patched
        assert "put_" not in patched
        with patches_applied(), refused_by_torch():
            put_twice()


@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_every_kernel_is_restored_after_an_error_too(key: str) -> None:
    """The dispatcher's tables are what they were, text for text, and so are torch's functions."""
    before, functions = dump_kernels(), {**vars(torch_decompositions)}
    for error in (KeyError, ValueError):
        with pytest.raises(error), patches_applied(key):
            assert all(now != then for now, then in zip(dump_kernels(), before, strict=True))
            assert vars(torch_decompositions) != functions
            raise error
        assert dump_kernels() == before
        assert vars(torch_decompositions) == functions


def test_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement that cannot be loaded takes the others back."""
    before = dump_kernels()
    broken = {"put_": "lightning_d9m.ops.patches.kernels.updates:absent"}
    ops = (*OPS, dataclasses.replace(OPS[0], kernels=broken))
    monkeypatch.setattr(registration, "select_ops", lambda *_: ops)
    with pytest.raises(AttributeError, match="absent"), patches_applied("CPU"):
        pytest.fail("the body ran")
    assert dump_kernels() == before


def test_fake_tensors_and_meta_tensors_are_answered_by_torch() -> None:
    """Shapes are traced without running a patch."""
    with patches_applied("CPU"), FakeTensorMode():
        image = torch.empty(2, 3, 8, 8, requires_grad=True)
        wide = nnf.interpolate(image, scale_factor=2, mode="bicubic")
        (gradient,) = torch.autograd.grad(wide.sum(), image)
        assert gradient.shape == image.shape
    with patches_applied("CPU"):
        meta = torch.empty(2, 3, 16, 16, device="meta")
        backward = torch.ops.aten.upsample_bicubic2d_backward
        assert backward(meta, [16, 16], [2, 3, 8, 8], align_corners=False).device.type == "meta"


def test_arguments_that_only_the_original_takes_are_refused() -> None:
    """A replacement never lets a nondeterministic result through in silence."""
    schema = torch.ops.aten.take.default._schema
    kernel = Kernel(lambda *_: require(False), lambda *_: "taken", schema, switches=False)
    with pytest.raises(D9mError, match=r"torch.float32 of shape \(2,\)', '3'"):
        kernel(None, torch.zeros(2), 3)
    kernel = Kernel(lambda *_: require(False), lambda *_: "taken", schema, switches=True)
    assert kernel(None, torch.zeros(2), 3) == "taken"


def test_no_warning_leaks(forking_python: str) -> None:
    """The dispatcher warns of the first kernel that is overridden in a process; not of these."""
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "from lightning_d9m.ops.patches.registration import patches_applied\n"
        "with patches_applied('CPU'), patches_applied('CUDA'): print('fine')\n"
    )
    done = subprocess.run(
        [forking_python, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    said = "patches no operation of torch 2"
    with pytest.raises(SettingError, match=said):
        patches_applied("CPU").__enter__()
    assert not can_patch()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.warns(UserWarning, match=said):
        assert not can_patch()


Forward = Callable[[Tensor], Tensor]


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


DECOMPOSED: dict[str, tuple[tuple[int, ...], Forward]] = {
    "bilinear": ((5, 6), interpolate("bilinear")),
    "trilinear": ((3, 4, 5), interpolate("trilinear")),
    "Upsample": ((5, 6), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)),
    **{f"pad{dims}d": ((3, 4, 5)[:dims], pad) for dims in (1, 2, 3)},
}
if hasattr(torch_decompositions, "max_pool3d_with_indices"):  # from torch 2.13 on
    pool = nn.MaxPool3d(3, 2, 1, return_indices=True)
    DECOMPOSED["MaxPool3d"] = (6, 6, 6), lambda x: pool(x)[0]


@pytest.mark.parametrize("name", DECOMPOSED)
def test_the_op_runs_and_not_its_decomposition(name: str) -> None:
    """By the autograd graph: the op's own node with the patches, index_put's without."""
    sides, forward = DECOMPOSED[name]
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
@pytest.mark.parametrize("name", DECOMPOSED)
def test_a_cuda_build_runs_the_op_and_not_its_decomposition(name: str) -> None:
    """By fake CUDA tensors, which need no device: their graphs are those of real ones."""
    sides, forward = DECOMPOSED[name]

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


def test_excluded_ops_and_other_devices_keep_their_decomposition() -> None:
    """Trilinear is excluded: bilinear alone is restored. A patch of CUDA leaves a CPU's tensor."""
    flat, deep = make_input(5, 6), make_input(3, 4, 5)
    with deterministic_algorithms():
        with patches_applied("CPU", exclude=["upsample_trilinear3d_backward"]):
            linear = nnf.interpolate(flat, scale_factor=2, mode="bilinear")
            assert linear.grad_fn.name().startswith("UpsampleBilinear2D")
            assert "Upsample" not in DECOMPOSED["trilinear"][1](deep).grad_fn.name()
        with patches_applied("CUDA"):
            assert "Upsample" not in DECOMPOSED["bilinear"][1](flat).grad_fn.name()
            assert "Replication" not in DECOMPOSED["pad2d"][1](flat).grad_fn.name()


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered")
def test_an_op_that_may_vary_runs_if_it_is_named(monkeypatch) -> None:
    """Under its own name or the catalog's; others raise, and the flag is on again after it."""

    def refuse(values: Tensor) -> Tensor:
        torch._prims_common.alert_not_deterministic("pool_kernel")
        return values + 1

    library = torch.library.Library("d9m_test", "FRAGMENT")
    for name in ("pool", "other"):
        library.define(f"{name}(Tensor values) -> Tensor")
        library.impl(name, refuse, "CPU")
    entry = dataclasses.replace(find_op("sparse_mm"), name="pool", operators=("d9m_test::pool",))
    monkeypatch.setattr(catalog, "OPS", (entry,))
    values, ops = torch.ones(2), torch.ops.d9m_test
    with deterministic_algorithms():
        for name in ("pool", "d9m_test::pool"):
            with variation_allowed([name], "CPU"):
                with variation_allowed([name], "CPU"):  # as a callback in an enabled program
                    ops.pool(values)
                assert torch.equal(ops.pool(values), values + 1)
                assert torch.are_deterministic_algorithms_enabled()
                with pytest.raises(RuntimeError, match="does not have a deterministic"):
                    ops.other(values)
            with pytest.raises(RuntimeError, match="does not have a deterministic"):
                ops.pool(values)
        with (
            pytest.raises(SettingError, match="no operator of that name has a kernel for CPU"),
            variation_allowed(["d9m_test::missing"], "CPU"),
        ):
            pass
    library._destroy()
