"""The catalog covers every op that torch refuses, and selects the ops to patch."""

import ast
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from documentation import read_documentation
from scripts import load_script

from lightning_d9m.errors import SettingError
from lightning_d9m.ops.patches.catalog import catalog
from lightning_d9m.ops.patches.catalog.catalog import (
    OPS,
    FlagEffect,
    Op,
    find_op,
    search_op,
    select_ops,
)

DOCSTRING = torch.use_deterministic_algorithms.__doc__ or ""
HERE = Path(__file__).parent
ALERTS = {path.stem: path.read_text().splitlines() for path in HERE.glob("alerts/*.txt")}
RELEASES = {path.stem: path.read_text() for path in HERE.glob("docstrings/*.txt")}


def find_unaccounted(docstring: str) -> list[str]:
    """Return the documented raising ops that the catalog neither patches nor exempts.

    An op with a list of modes has one name for each, such as ``torch.nn.functional.interpolate
    bilinear``; an op that raises on Apple's devices only ends with `` (MPS)``.
    """
    known = {name for op in OPS for name in op.documented}
    raising = {
        f"{line.name}{mode and f' {mode}'}{' (MPS)' if line.devices == ('mps',) else ''}"
        for line in read_documentation(docstring)
        if line.kind == "raises"
        for mode in re.findall(r"- ``(\w+)``", line.text) or ("",)
    }
    assert len(raising) > 20
    return sorted(raising - known)


@pytest.mark.parametrize("release", ["installed", *sorted(RELEASES)])
def test_every_op_that_torch_refuses_is_accounted_for(release: str) -> None:
    """Of the torch that is installed, and of others: 2.12 and 2.14 list nothing else."""
    assert find_unaccounted(RELEASES.get(release, DOCSTRING)) == []


def test_an_op_that_torch_adds_to_its_list_is_found() -> None:
    """The test above can fail: an invented op and an invented mode are reported."""
    listed = "* :class:`torch.nn.AvgPool3d` when"
    assert listed in DOCSTRING
    longer = DOCSTRING.replace(listed, f"* :func:`torch.invented` when called\n        {listed}")
    assert find_unaccounted(longer) == ["torch.invented"]
    longer = DOCSTRING.replace("- ``bicubic``", "- ``bicubic``\n          - ``septic``")
    assert find_unaccounted(longer) == ["torch.nn.functional.interpolate septic"]


@pytest.mark.parametrize("release", ALERTS)
def test_every_alert_of_torchs_cuda_build_is_accounted_for(release: str) -> None:
    """What torch refuses without its documentation saying so, as `index_reduce`, is there too.

    The lists are of the strings that the libraries of the builds for CUDA give to
    `alertNotDeterministic`, read from their machine code.
    """
    known = {alert for op in OPS for alert in op.alerts}
    assert {alert.split()[0] for alert in ALERTS[release]} <= known
    assert len(ALERTS[release]) > 35


def test_an_op_is_found_by_its_name_in_a_message() -> None:
    """Every name that torch's messages have, the message itself, and a part that one op has."""
    for op in OPS:
        assert all(search_op(name) is op for name in (op.name, *op.alerts))
    assert search_op("_histc_cuda with floating point input").name == "histc"
    assert search_op("compute_grad_input").name == "torchvision_deform_conv2d_backward"
    assert search_op("max_unpooling2d").name == "max_unpool2d"
    with pytest.raises(SettingError, match=r"no op 'avg_pool'.*Similar: adaptive_avg_pool2d"):
        search_op("avg_pool")


def test_entries_are_complete() -> None:
    """A patched op has kernels that exist and says what they do; an exempt one has a reason."""
    for op in OPS:
        assert op.torch_does, op.name
        assert op.cause, op.name
        assert op.reason if op.status == "exempt" else op.instead and op.bits, op.name
        assert all(map(callable, map(resolve_name, op.kernels.values()))), op.name


def test_every_patched_op_has_a_workload() -> None:
    """No op escapes `benchmarks/gpu/gpu_suite.py` on a CUDA device.

    Two are torch's own: a lookup, to see whether its determinism costs anything, and topk, which
    should not vary.
    """
    measured = {
        workload.op for workload in load_script("benchmarks/gpu/patch_workloads.py").WORKLOADS
    }
    patched = {op.name for op in select_ops(torch.__version__)}
    assert {name for name in patched if not any(one.startswith(name) for one in measured)} == set()
    others = {one for one in measured if not any(one.startswith(name) for name in patched)}
    torchs = {"embedding_dense_backward", "topk"}
    assert {one for one in others if not one.startswith("scatter_reduce_")} == torchs


def test_flex_attention_adds_with_atomics_at_one_place() -> None:
    """The gradient of a tensor that `score_mod` indexes; the compiler makes it for no other one."""
    folder = Path(torch.__file__).parent / "_inductor" / "kernel" / "flex"
    found = [
        line.strip()
        for ending in ("py", "jinja")
        for path in folder.rglob(f"*.{ending}")
        for line in path.read_text().splitlines()
        if re.search(r"atomic_(add|max|min)", line) and not line.strip().startswith("#")
    ]
    assert found == ['scatter_mode="atomic_add",']  # of zeros_and_scatter_lowering
    tree = ast.parse((folder / "common.py").read_text())
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    [function] = [one.name for one in functions if "atomic_add" in ast.unparse(one)]
    assert function == "zeros_and_scatter_lowering"


@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_every_overload_with_a_kernel_of_its_own_is_replaced(key: str) -> None:
    """No overload of a patched op keeps torch's kernel: not the in-place, not the out variant.

    A build of torch without CUDA has no kernels of its own under that key.
    """
    deterministic = {
        *("median", "nanmedian"),  # of a whole tensor: no index that could vary
        *(f"scatter{mark}.{kind}" for mark in ("", "_") for kind in ("src", "value")),
        *(f"scatter.{kind}_out" for kind in ("src", "value")),
        # One number, however often: the order cannot show.
        *("scatter.value_reduce", "scatter_.value_reduce", "scatter.value_reduce_out"),
    }
    for op in select_ops(torch.__version__):
        for packet in {overload.partition(".")[0] for overload in op.kernels}:
            for name in getattr(torch.ops.aten, packet).overloads():
                overload = packet if name == "default" else f"{packet}.{name}"
                own = name != "hacked_twin" and (  # which TorchScript has, and no dispatcher
                    torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{overload}", key)
                )
                assert not own or overload in {*op.kernels, *deterministic}, overload


def test_ops_that_cannot_be_excluded_are_refused() -> None:
    """A typing error, with similar names, and an op that nothing replaces."""
    with pytest.raises(SettingError, match=r"no op 'adaptive_avg'.*adaptive_avg_pool2d_backward"):
        select_ops("2.13.0", exclude=["adaptive_avg"])
    with pytest.raises(SettingError, match=r"no op 'zzz'\. `d9m ops`"):
        find_op("zzz")
    with pytest.raises(SettingError, match="'cumsum' cannot be excluded"):
        select_ops("2.13.0", exclude=["cumsum"])


def test_versions_decide_which_ops_are_patched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An entry holds from its first release up to the one that needs no patch; builds count not."""
    texts = {"torch_does": "-", "cause": "-", "kernels": {"put_": "placement:put_"}}
    texts["flag_effect"] = FlagEffect.RAISES
    entries = (
        Op(name="always", **texts),
        Op(name="fixed", until="2.14", **texts),
        Op(name="new", since="2.14", **texts),
    )
    monkeypatch.setattr(catalog, "OPS", entries)

    def names(version: str, **choice: list[str]) -> list[str]:
        return [op.name for op in select_ops(version, **choice)]

    assert names("2.13.0+cu130") == ["always", "fixed"]
    assert names("2.14.0.dev20260901") == ["always", "new"]
    shared = Path(catalog.__file__).with_name("ops.txt").read_text().partition("\n\nop:")[0]
    ops = tmp_path / "ops.txt"
    ops.write_text(f"{shared}\n\nop: retired | * | | retired_cuda\nkernel: updates\nuntil: 2.14\n")
    assert [op.is_needed("2.14.0") for op in catalog.read_ops(ops)] == [False]
    assert names("2.13.1", exclude=["fixed"]) == ["always"]
