"""Patches are applied all or none, catch every caller, and leave nothing behind."""

import dataclasses
import subprocess

import pytest
import torch
import torch.nn.functional as nnf
from patches.cases import deterministic_algorithms
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_d9m.compatibility import can_patch
from lightning_d9m.errors import D9mError, SettingError
from lightning_d9m.patches import registration
from lightning_d9m.patches.catalog.catalog import OPS, select_ops
from lightning_d9m.patches.registration import Kernel, patches_applied, require

KERNELS = [f"aten::{overload}" for op in select_ops(torch.__version__) for overload in op.kernels]


def dump_kernels() -> list[str]:
    """Return the dispatcher's table of every op in the catalog."""
    return [torch._C._dispatch_dump(name) for name in KERNELS]


def put_twice() -> Tensor:
    """Call an op that torch refuses on a CPU too."""
    return torch.zeros(3).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))


def refused_by_torch():
    """Expect torch's alert."""
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
        with patches_applied("CPU", exclude=["put_"]) as applied, refused_by_torch():
            put_twice()
        assert applied.excluded == ("put_",)
        assert "histc" in applied.names
        assert "put_" not in applied.names
        with patches_applied(), refused_by_torch():
            put_twice()


@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_every_kernel_is_restored_after_an_error_too(key: str) -> None:
    """The dispatcher's tables are, text for text, what they were."""
    before = dump_kernels()
    for error in (KeyError, ValueError):
        with pytest.raises(error), patches_applied(key):
            assert all(now != then for now, then in zip(dump_kernels(), before, strict=True))
            raise error
        assert dump_kernels() == before


@pytest.mark.parametrize("name", ["absent", "typing error"])
def test_all_or_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement that cannot be loaded takes the others back; a wrong name changes nothing."""
    before = dump_kernels()
    broken = {"put_": "lightning_d9m.patches.kernels.updates:absent"}
    if name == "absent":
        ops = (*OPS, dataclasses.replace(OPS[0], kernels=broken))
        monkeypatch.setattr(registration, "select_ops", lambda *_: ops)
        refused, exclude = pytest.raises(AttributeError, match="absent"), []
    else:
        refused, exclude = pytest.raises(SettingError, match="no op 'putt_'"), ["putt_"]
    with refused, patches_applied("CPU", exclude):
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
        "from lightning_d9m.patches.registration import patches_applied\n"
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
