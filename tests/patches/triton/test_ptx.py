"""Compiled kernels, executed by an interpreter of PTX: the bits of the torch ops, and no fault.

Some are assembled for real devices, too: registers alone.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from patches.cases import GRADIENT_CASES, make_inputs
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


@pytest.fixture(scope="module")
def benchmark():
    """Load benchmarks/triton_kernels.py."""
    sys.path.insert(0, str(FOLDER))
    try:
        return load_script(FOLDER / "triton_kernels.py")
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture
def executed(benchmark, monkeypatch):
    """Return a context: Triton kernels run on CPU tensors as on a device; it lists launches."""
    from triton.runtime.jit import JITFunction

    @contextmanager
    def execute(capability: int) -> Iterator[list[object]]:
        launches: list[object] = []

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
            draws = np.random.default_rng(len(launches))
            launches.append(one)
            program = parse(compiled.asm["ptx"])
            Run(program, compiled.metadata.shared, grid[0], memory, arguments, draws).run()

        with monkeypatch.context() as patch:
            patch.setattr(JITFunction, "run", run)
            patch.setattr(launch, "_check", lambda *_: None)
            patch.setattr(launch, "_device_types", {"cpu"})
            patch.setattr(launch, "_withdrawn", set())
            yield launches

    return execute


def differentiate(label: str, dtype: torch.dtype, *, last: bool = False) -> Callable[[], Tensor]:
    """Return the gradient of a separable op: also of special values, and with channels last."""
    case = next(case for case in GRADIENT_CASES if case.label == label)
    image, gradient = (part.to(dtype) for part in make_inputs(case))
    for place, value in ((1, torch.inf), (5, torch.nan), (9, -0.0)):
        gradient.view(-1)[place::40] = value
    if last:
        form = torch.channels_last if image.dim() == 4 else torch.channels_last_3d
        image, gradient = (part.contiguous(memory_format=form) for part in (image, gradient))
    leaf = image.requires_grad_()
    return lambda: torch.autograd.grad(case.forward(leaf), leaf, gradient)[0]


def update(number: int) -> Callable[[], Tensor]:
    """Return a sum: of a dtype, layout, weights, number of pieces, with targets or without."""
    draws = torch.Generator().manual_seed(number)
    dtype, include = DTYPES[number % 4], number % 3 > 0
    batch, group, inner, count = 2, 1 + number % 2, 1 + number % 3, 1 + number
    sides = (batch if number % 2 else 1, 0 if number == 6 else 9, inner if number % 4 > 1 else 1)
    taps = 1 + number % 2
    index = torch.randint(-count - 1, count + 1, (taps, *sides), generator=draws)
    index = index.to((torch.int64, torch.int32)[number % 2])
    values = torch.randn(batch, group, sides[1], inner, generator=draws)
    values *= (torch.rand(values.shape, generator=draws) * 24 - 12).exp2()
    for place, special in enumerate((torch.inf, torch.nan, -0.0)):
        values.view(-1)[place::30] = special
    values = values.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.randn(index.shape, generator=draws, dtype=wide) if number % 3 == 0 else None
    out = torch.randn(batch, group, count, inner, generator=draws).to(dtype)
    sizes = zip(index.shape, index.stride(), strict=True)
    steps = tuple(step if size > 1 else 0 for size, step in sizes)
    layout = Layout(taps, *values.shape, count, steps)
    pieces = plan_pieces(dtype, (2**12, 2**24)[number % 2])

    def call() -> Tensor:
        target = out.clone()
        accumulate(target, index, values, weights, layout, pieces, include=include)
        return target

    return call


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What is called, for which device, with how many launches, and whether it is assembled.
CALLS = {
    **{
        f"sum {number}": (
            update(number),
            (80, 90, 100)[number % 3],
            1 if number in {2, 5, 6} else 3,
            number < 4,
        )
        for number in range(7)
    },
    "taps": (differentiate("bicubic", torch.float32), 90, 1, True),
    "half taps": (differentiate("linear", torch.float16), 80, 1, True),
    "long taps": (differentiate("bicubic-antialiased", torch.float64), 90, 1, False),
    "taps, channels last": (
        differentiate("avg_pool3d-overlap", torch.float32, last=True),
        90,
        1,
        False,
    ),
    "taps of a padding": (differentiate("replication3d", torch.float32), 100, 1, True),
}


@pytest.mark.parametrize(("call", "capability", "count", "assembled"), CALLS.values(), ids=CALLS)
def test_executed_code_has_the_bits_of_the_torch_ops(
    call, capability, count, assembled, benchmark, executed, monkeypatch
) -> None:
    """Every access is within the tensors, every read of written bytes, and no addition rounds.

    Nothing is spilled. Sizes are no part of a kernel: other ones compile nothing anew.
    """
    from lightning_d9m.patches.triton import kernels

    with patches_applied("CPU"):
        expected = call()
        monkeypatch.setattr(kernels, "_ALONE", kernels._ALONE if count == 1 else 0)
        monkeypatch.setattr(kernels, "_prepare", kernels._prepare.__wrapped__)
        with executed(capability) as launches:
            actual = call()
    assert len(launches) == count
    assert actual.stride() == expected.stride()
    left, right = (torch.where(part.isnan(), 0, part).contiguous() for part in (actual, expected))
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    seen = set()
    for one in launches:
        sizes = {name for name, kind in one.signature.items() if kind in {"i32", "i64"}}
        assert sizes <= set(one.kernel.do_not_specialize)
        if assembled:
            compiled = benchmark.compile_kernel(one, capability)
            assert (compiled["stack"], compiled["spilled"]) == (0, 0)
            seen.update(compiled["atomics"])
    if assembled and launches[0].kernel.__name__ == "accumulate_terms":
        name = "RED" if capability == 80 else "REDG"
        assert seen == {f"{name}.E.MAX.S32.STRONG.GPU", f"{name}.E.ADD.F64.RN.STRONG.GPU"}
    else:
        assert seen == set()


@pytest.mark.parametrize("fault", ["rounds", "outside of the tensors"])
def test_a_wrong_sum_is_found(fault: str, executed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces for fewer terms than there are, and a place beyond the sums."""
    count, terms = (12, 2) if fault == "rounds" else (2000, 70)
    values = torch.linspace(1, 2, 70, dtype=torch.float64).sqrt()
    layout = Layout(1, 1, 1, 70, 1, count, (0, 0, 1, 0))
    given = (torch.full((70,), count - 1), values, None, layout)
    monkeypatch.setattr(exact_sums, "run_kernel", lambda _, __, ___, *args: run(*args))
    from lightning_d9m.patches.triton.kernels import accumulate as run

    with executed(90), pytest.raises(PtxError, match=fault):
        accumulate(torch.zeros(12).double(), *given, plan_pieces(torch.float64, terms))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str) -> None:
    out = torch.zeros(128, dtype=torch.int32)
    memory = Memory([out], [out] if "wrote" in fault else ())
    text = STORE.replace("ADDRESS", FAULTS[fault].replace(";", ";\n"))
    with pytest.raises(PtxError, match=fault):
        Run(parse(text), 0, 1, memory, [memory.find(out)], np.random.default_rng(0)).run()
