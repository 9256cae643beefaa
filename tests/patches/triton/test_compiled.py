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


# A workload of each kernel and variant (one or several pieces, weights, formats, all phases in one
# program), for one of three devices.
SUMS = ["accumulate_terms"] * 3
CASES = [
    ("grid_sampler_2d_backward", 80, {"*fp32": "*fp64"}, SUMS),
    ("max_pool3d_backward", 100, {}, SUMS),
    ("index_add", 90, {"*fp32": "*bf16"}, SUMS[:1]),
    ("upsample_bicubic2d_aa_backward", 90, {"*fp32": "*bf16"}, ["apply_taps"]),
    ("replication_pad2d_backward", 80, {"*fp32": "*fp64"}, ["apply_taps"]),
]


@pytest.mark.parametrize(("op", "capability", "formats", "kernels"), CASES)
def test_atomics_are_exact_and_nothing_is_spilled(
    benchmark, op, capability, formats, kernels, tmp_path, monkeypatch
) -> None:
    """Maxima of 32-bit integers, and additions of float64 whose sums no order rounds.

    An atomic addition of float32 would round. Sizes are no part of a kernel: other ones compile
    nothing anew.
    """
    from lightning_d9m.patches.triton import kernels as module

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if kernels == SUMS[:1]:  # a single program runs all phases
        monkeypatch.setattr(module, "_ALONE", 2**30)
        monkeypatch.setattr(module, "_prepare", module._prepare.__wrapped__)
    workload = next(one for one in benchmark.WORKLOADS if one.op == op)
    recorded, _ = benchmark.run_workload(workload)
    assert [one.kernel.__name__ for one in recorded] == kernels
    seen = set()
    for one in recorded:
        sizes = {name for name, kind in one.signature.items() if kind in {"i32", "i64"}}
        assert sizes <= set(one.kernel.do_not_specialize)
        signature = {
            name: kind if name in {"sums", "weights"} else formats.get(kind, kind)
            for name, kind in one.signature.items()
        }
        compiled = benchmark.compile_kernel(replace(one, signature=signature), capability)
        assert (compiled["stack"], compiled["spilled"]) == (0, 0)
        seen.update(compiled["atomics"])
    name = "RED" if capability == 80 else "REDG"
    sums = {f"{name}.E.MAX.S32.STRONG.GPU", f"{name}.E.ADD.F64.RN.STRONG.GPU"}
    assert seen == (set() if kernels == ["apply_taps"] else sums)


def test_few_terms_are_added_by_three_launches(benchmark) -> None:
    """One checks the index, one fills, and one of Triton adds all phases."""
    target, rows, index = torch.zeros(40, 8), torch.ones(64, 8), torch.arange(64) % 40
    call = benchmark.Workload("index_add", "", lambda _: lambda: target.index_add_(0, index, rows))
    recorded, torch_ops = [benchmark.run_workload(call) for _ in range(2)][-1]
    assert len(recorded) == 1
    others = torch_ops.keys() - {"aten::index_add_", "aten::_debug_has_internal_overlap"}
    assert {name: torch_ops[name] for name in others} == {"aten::gather": 1, "aten::fill_": 1}
