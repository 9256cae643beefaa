"""Kernels compiled for real devices: registers alone, in every variant."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scripts import load_script

pytest.importorskip("triton", reason="Triton has packages for Linux only")

FOLDER = Path(__file__).parents[3] / "benchmarks"
# Those with the most outputs for one input.
GATHERS = [
    "adaptive_avg_pool3d_backward",
    "adaptive_max_pool3d_backward",
    "avg_pool3d_backward",
    "fractional_max_pool2d_backward",
    "max_pool3d_backward",
    "reflection_pad3d_backward",
    "replication_pad2d_backward",
    "upsample_bicubic2d_aa_backward",
    "upsample_linear1d_backward",
    "upsample_trilinear3d_backward",
]


@pytest.fixture(scope="module")
def benchmark():
    """Load benchmarks/triton_kernels.py."""
    sys.path.insert(0, str(FOLDER))
    try:
        return load_script(FOLDER / "triton_kernels.py")
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("op", GATHERS)
def test_gathers_are_one_launch_without_atomics_and_spills(benchmark, op, tmp_path, monkeypatch):
    """For one of two architectures, and for float64 and offsets of 64 bits on the third one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (workload,) = (one for one in benchmark.WORKLOADS if one.op == op)
    (*_, recorded), torch_ops = benchmark.run_workload(workload)
    assert torch_ops == {}
    double = {
        name: "*fp64" if kind == "*fp32" else kind for name, kind in recorded.signature.items()
    }
    widest = replace(recorded, constants={**recorded.constants, "WIDE": True}, signature=double)
    for variant, capability in [(recorded, (80, 100)[GATHERS.index(op) % 2]), (widest, 90)]:
        compiled = benchmark.compile_kernel(variant, capability)
        assert (compiled["stack"], compiled["spilled"], compiled["atomics"]) == (0, 0, [])


SUMS = ["index_add", "scatter_add"]


@pytest.mark.parametrize("op", SUMS)
def test_sums_use_native_atomics(benchmark, op, tmp_path, monkeypatch):
    """An addition of 64 bits and a maximum of 32 bits, neither of which returns what was there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    workload = next(one for one in benchmark.WORKLOADS if one.op == op)
    recorded, _ = benchmark.run_workload(workload)
    begin, raise_keys, add_terms, finish = recorded
    for one, capability in [(raise_keys, 80), (add_terms, 80), (add_terms, 90), (add_terms, 100)]:
        compiled = benchmark.compile_kernel(one, capability)
        assert (compiled["stack"], compiled["spilled"]) == (0, 0)
        name = "RED" if capability == 80 else "REDG"
        kind = "MAX.S32" if one is raise_keys else "ADD.64"
        assert compiled["atomics"] == [f"{name}.E.{kind}.STRONG.GPU"]
    for one in (begin, finish):
        compiled = benchmark.compile_kernel(one, 90)
        assert (compiled["stack"], compiled["spilled"], compiled["atomics"]) == (0, 0, [])


@pytest.mark.parametrize(
    ("op", "shape", "kind"),
    [
        ("put_", "64 places", "S32"),
        ("index_reduce", "amax", "S32"),
        ("index_reduce", "amax", "S64"),
    ],
)
def test_greatest_integers_use_native_atomics(benchmark, op, shape, kind, tmp_path, monkeypatch):
    """Positions of values, and numbers as integers in their order, of 32 and 64 bits."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (workload,) = (one for one in benchmark.WORKLOADS if one.op == op and one.shape.endswith(shape))
    (_, marked, _), _ = benchmark.run_workload(workload)
    wider = {"*fp32": "*fp64", "*i32": "*i64"} if kind == "S64" else {}
    signature = {name: wider.get(form, form) for name, form in marked.signature.items()}
    compiled = benchmark.compile_kernel(replace(marked, signature=signature), 90)
    assert (compiled["stack"], compiled["spilled"]) == (0, 0)
    assert compiled["atomics"] == [f"REDG.E.MAX.{kind}.STRONG.GPU"]


@pytest.mark.parametrize("place", [0, -1])
def test_grid_samples_spill_nothing(benchmark, place, tmp_path, monkeypatch):
    """In 2 and 3 dimensions; the atomics are those of sums."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    workload = [one for one in benchmark.WORKLOADS if one.op.startswith("grid_sampler")][place]
    recorded, torch_ops = benchmark.run_workload(workload)
    assert torch_ops == {}
    by_grid, _, raise_keys, add_terms, _ = recorded
    for one, atomics in [(by_grid, []), (raise_keys, ["MAX.S32"]), (add_terms, ["ADD.64"])]:
        compiled = benchmark.compile_kernel(one, 90)
        assert (compiled["stack"], compiled["spilled"]) == (0, 0)
        assert compiled["atomics"] == [f"REDG.E.{kind}.STRONG.GPU" for kind in atomics]


def test_operators_of_torch_are_found(benchmark):
    """The torch ops of a workload without a kernel, and the launches of one that has several."""
    (workload,) = (one for one in benchmark.WORKLOADS if one.op == "nll_loss2d")
    recorded, torch_ops = benchmark.run_workload(workload)
    assert recorded == []
    assert torch_ops
