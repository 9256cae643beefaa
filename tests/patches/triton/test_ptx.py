"""Compiled kernels, executed by an interpreter of PTX: the bits of the torch ops, and no fault."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from ptx import Memory, PtxError, Run, parse
from scripts import load_script
from torch import Tensor

from lightning_d9m.patches import exact_sums
from lightning_d9m.patches.exact_sums import Layout, accumulate, plan_pieces
from lightning_d9m.patches.registration import patches_applied
from lightning_d9m.patches.triton import launch

pytest.importorskip("triton", reason="Triton has packages for Linux only")

FOLDER = Path(__file__).parents[3] / "benchmarks"
STORE = """
.visible .entry store(
  .param .u64 .ptr .global .align 1 store_param_0
) .reqntid 128
{
  ld.param.b64 %rd1, [store_param_0];
  mov.u32 %r1, %tid.x;
  ADDRESS
  ret;
}
"""
BY_THREAD = "mad.wide.s32 %rd2, %r1, 4, %rd1;"
FAULTS = {
    "race: two threads store": "st.global.b32 [%rd1], %r1;",
    "race: another thread stored": f"{BY_THREAD} st.global.b32 [%rd2], %r1; xor.b32 %r2, %r1, 1;"
    "mad.wide.s32 %rd3, %r2, 4, %rd1; ld.global.b32 %r3, [%rd3];",
    "outside of the tensors": f"{BY_THREAD} st.global.b32 [%rd2 + 4], %r1;",
    "not aligned": f"{BY_THREAD} st.global.b32 [%rd2 + 2], %r1;",
    "reads what nobody wrote": f"{BY_THREAD} ld.global.b32 %r2, [%rd2];",
    "changes what nobody wrote": "red.global.gpu.relaxed.max.s32 [%rd1], %r1;",
    "rounds": "red.global.gpu.relaxed.add.f32 [%rd1], %r1;",
    "not from the L2 cache": f"{BY_THREAD} red.global.gpu.relaxed.max.s32 [%rd2], %r1;"
    "ld.global.b32 %r2, [%rd2];",
}


@contextmanager
def executed(capability: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run Triton kernels on CPU tensors as a device of a capability would; list their names."""
    from triton.runtime.jit import JITFunction

    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark, names = load_script(FOLDER / "triton_kernels.py"), []

    def run(
        self: object, *args: object, grid: tuple[int, ...], warmup: bool, **options: object
    ) -> None:
        given = {**dict(zip(self.arg_names, args, strict=False)), **options}
        one = benchmark.describe_launch(self, dict(given))
        compiled = benchmark.compile_ptx(one, capability)
        fresh = "taps" in one.kernel.__name__ or not one.constants["INCLUDE"]
        memory = Memory(one.tensors, one.find("out") if fresh else ())
        arguments = [
            memory.find(given[name]) if isinstance(given[name], Tensor) else given[name]
            for name, kind in one.signature.items()
            if kind != "constexpr"
        ]
        draws = np.random.default_rng(len(names))
        names.append(one.kernel.__name__)
        program = parse(compiled.asm["ptx"])
        Run(program, compiled.metadata.shared, grid[0], memory, arguments, draws).run()

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(launch, "_check", lambda *_: None)
        patch.setattr(launch, "_device_types", {"cpu"})
        patch.setattr(launch, "_withdrawn", set())
        yield names


def add(dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return additions of terms over many magnitudes, some of them special ones."""
    draws = torch.Generator().manual_seed(0)
    values = torch.randn(70, 3, generator=draws)
    values *= (torch.rand(70, 3, generator=draws) * 60 - 30).exp2()
    for place, special in enumerate((torch.inf, torch.nan, -0.0)):
        values[place, place] = special
    index = torch.randint(12, (70,), generator=draws)
    target = torch.full((12, 3), -0.0, dtype=dtype)
    return lambda: target.index_add(0, index, values.to(dtype))


def sample() -> Tensor:
    """Return a gradient whose terms have weights, and of which some are outside."""
    draws = torch.Generator().manual_seed(0)
    gradient, grid = (
        torch.randn(2, 3, 6, 7, generator=draws),
        torch.rand(2, 6, 7, 2, generator=draws),
    )
    image = torch.zeros(2, 3, 4, 5)
    more = (grid * 3 - 1.5, 0, 0, False, [True, False])
    return torch.ops.aten.grid_sampler_2d_backward(gradient, image, *more)[0]


def resize() -> Tensor:
    """Return the gradient of a resized image."""
    gradient = torch.randn(2, 3, 13, 9, generator=torch.Generator().manual_seed(0))
    backward = torch.ops.aten.upsample_bicubic2d_backward
    return backward(gradient, (13, 9), (2, 3, 7, 11), align_corners=False)


CALLS = {
    "sum": (add(torch.float32), 90, True, 1),
    "sum in three launches": (add(torch.float64), 80, False, 3),
    "sum of bfloat16": (add(torch.bfloat16), 100, True, 1),
    "weighted sum": (sample, 90, False, 3),
    "taps": (resize, 90, True, 1),
}


@pytest.mark.parametrize(("call", "capability", "alone", "launches"), CALLS.values(), ids=CALLS)
def test_executed_code_has_the_bits_of_the_torch_ops(
    call, capability, alone, launches, monkeypatch
) -> None:
    """Every access is within the tensors, every read of written bytes, and no addition rounds."""
    from lightning_d9m.patches.triton import kernels

    with patches_applied("CPU"):
        expected = call()
        monkeypatch.setattr(kernels, "_ALONE", kernels._ALONE if alone else 0)
        monkeypatch.setattr(kernels, "_prepare", kernels._prepare.__wrapped__)
        with executed(capability, monkeypatch) as names:
            actual = call()
    assert len(names) == launches
    assert torch.equal(actual.isnan(), expected.isnan())
    left, right = (torch.where(part.isnan(), 0, part) for part in (actual, expected))
    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("fault", ["rounds", "outside of the tensors"])
def test_a_wrong_sum_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces for fewer terms than there are, and a place beyond the sums."""
    count, terms = (12, 2) if fault == "rounds" else (2000, 70)
    values = torch.linspace(1, 2, 70, dtype=torch.float64).sqrt()
    layout = Layout(1, 1, 1, 70, 1, count, (0, 0, 1, 0))
    given = (torch.full((70,), count - 1), values, None, layout)
    monkeypatch.setattr(exact_sums, "run_kernel", lambda _, __, ___, *args: run(*args))
    from lightning_d9m.patches.triton.kernels import accumulate as run

    with executed(90, monkeypatch), pytest.raises(PtxError, match=fault):
        accumulate(torch.zeros(12).double(), *given, plan_pieces(torch.float64, terms))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str) -> None:
    out = torch.zeros(128, dtype=torch.int32)
    memory = Memory([out], [out] if "wrote" in fault else ())
    text = STORE.replace("ADDRESS", FAULTS[fault].replace(";", ";\n"))
    with pytest.raises(PtxError, match=fault):
        Run(parse(text), 0, 1, memory, [memory.find(out)], np.random.default_rng(0)).run()
