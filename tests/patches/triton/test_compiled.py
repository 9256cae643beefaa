"""Kernels compiled for real devices: registers alone, in every variant."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scripts import load_script

pytest.importorskip("triton", reason="Triton has packages for Linux only")

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    """Load benchmarks/triton_kernels.py."""
    sys.path.insert(0, str(FOLDER))
    try:
        return load_script(FOLDER / "triton_kernels.py")
    finally:
        sys.path.remove(str(FOLDER))


# In each of the kernels' variants: formats, one and several pieces, weights, and own terms.
WORKLOADS = {
    "upsample_bicubic2d_aa_backward": ["apply_taps"],
    "replication_pad2d_backward": ["apply_taps"],
    "max_pool3d_backward": ["accumulate_terms"] * 3,
    "index_add": ["accumulate_terms"] * 3,
    "grid_sampler_2d_backward": ["accumulate_terms"] * 3,
}
FORMATS = {80: {"*fp32": "*fp64"}, 90: {"*fp32": "*bf16"}, 100: {}}
# Each variant for one device at least, and each device with sums and with taps.
CASES = [
    (op, capability) for op in ("index_add", "grid_sampler_2d_backward") for capability in FORMATS
]
CASES += [("max_pool3d_backward", 80), ("upsample_bicubic2d_aa_backward", 90)]
CASES += [("replication_pad2d_backward", 80), ("replication_pad2d_backward", 100)]


@pytest.mark.parametrize(("op", "capability"), CASES)
def test_atomics_are_exact_and_nothing_is_spilled(
    benchmark, op, capability, tmp_path, monkeypatch
) -> None:
    """Maxima of 32-bit integers, and additions of float64 whose sums no order rounds.

    An atomic addition of float32 would round. Sizes are no part of a kernel: other ones compile
    nothing anew.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if op == "index_add" and capability == 90:  # a single program runs all phases
        from lightning_d9m.patches.triton import kernels

        monkeypatch.setattr(kernels, "_ALONE", 2**30)
        monkeypatch.setattr(kernels, "_prepare", kernels._prepare.__wrapped__)
        monkeypatch.setitem(WORKLOADS, op, ["accumulate_terms"])
    workload = next(one for one in benchmark.WORKLOADS if one.op == op)
    recorded, _ = benchmark.run_workload(workload)
    assert [one.kernel.__name__ for one in recorded] == WORKLOADS[op]
    wider = FORMATS[capability]
    seen = set()
    for one in recorded:
        sizes = {name for name, kind in one.signature.items() if kind in {"i32", "i64"}}
        assert sizes <= set(one.kernel.do_not_specialize)
        signature = {
            name: kind if name in {"sums", "weights"} else wider.get(kind, kind)
            for name, kind in one.signature.items()
        }
        compiled = benchmark.compile_kernel(replace(one, signature=signature), capability)
        assert (compiled["stack"], compiled["spilled"]) == (0, 0)
        seen.update(compiled["atomics"])
    name = "RED" if capability == 80 else "REDG"
    sums = {f"{name}.E.MAX.S32.STRONG.GPU", f"{name}.E.ADD.F64.RN.STRONG.GPU"}
    assert seen == (set() if recorded[0].kernel.__name__ == "apply_taps" else sums)


def test_few_terms_are_added_by_three_launches(benchmark) -> None:
    """One checks the index, one fills, and one of Triton adds all phases."""
    target, rows, index = torch.zeros(40, 8), torch.ones(64, 8), torch.arange(64) % 40
    call = benchmark.Workload("index_add", "", lambda _: lambda: target.index_add_(0, index, rows))
    recorded, torch_ops = [benchmark.run_workload(call) for _ in range(2)][-1]
    assert len(recorded) == 1
    assert torch_ops.keys() - {"aten::index_add_", "aten::_debug_has_internal_overlap"} == {
        "aten::gather",
        "aten::fill_",
    }
    assert torch_ops["aten::gather"] == torch_ops["aten::fill_"] == 1


def test_operators_of_torch_are_found(benchmark):
    """The torch ops of a workload without a kernel, and the launches of one that has several."""
    (workload,) = (one for one in benchmark.WORKLOADS if one.op == "nll_loss2d")
    recorded, torch_ops = benchmark.run_workload(workload)
    assert recorded == []
    assert torch_ops
