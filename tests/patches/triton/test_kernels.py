"""Compiled kernels, executed by an interpreter of PTX: the bits of the torch ops, and no fault.

Some are assembled for real devices, too: registers alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from executed import executed, recorded, run_block
from patches.cases import GRADIENT_CASES, make_inputs
from ptx import Memory, PtxError, Run, parse
from torch import Tensor

from lightning_d9m.ops.patches import exact_sums
from lightning_d9m.ops.patches.exact_sums import Layout, accumulate, plan_pieces
from lightning_d9m.ops.patches.kernels import sampling
from lightning_d9m.ops.patches.registration import patches_applied

pytest.importorskip("triton", reason="Triton has packages for Linux only")

from triton_kernels import compile_kernel

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


def sample(dims: int, mode: int, padding: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return both gradients of ``grid_sample``, as one tensor; also of special coordinates."""
    draws = torch.Generator().manual_seed(mode + padding)
    sizes, outputs = (1 if padding else 4, 6, 5)[-dims:], (3, 7, 4)[-dims:]
    image = torch.randn(2, 3, *sizes, generator=draws).to(dtype)
    grid = torch.randn(2, *outputs, dims, generator=draws) * 1.5
    special = (torch.nan, torch.inf, -torch.inf, 1e7, 3e9, 1e30, 1, -1, 0)
    grid.view(-1)[3 : 3 + len(special)] = torch.tensor(special)
    gradient = torch.randn(2, 3, *outputs, generator=draws).to(dtype)
    gradient.view(-1)[-1] = torch.inf
    given = (gradient, image, grid.to(dtype), mode, padding, dtype == torch.float64, (True, True))

    def call() -> Tensor:
        found = sampling._sample_backward(*given, dims=dims)
        return torch.cat([part.flatten() for part in found])

    return call


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


class Execution(NamedTuple):
    """What is called, for which device, with how many launches, and whether it is assembled."""

    call: Callable[[], Tensor]
    capability: int = 90
    launches: int = 1
    assembled: bool = True


EXECUTIONS = {
    **{
        f"sum {number}": Execution(
            update(number),
            capability=(80, 90, 100)[number % 3],
            launches=1 if number == 6 else 3,
            assembled=number < 4,
        )
        for number in range(7)
    },
    "taps": Execution(differentiate("bicubic", torch.float32), launches=2),
    "half taps": Execution(differentiate("linear", torch.float16), capability=80),
    "long taps": Execution(
        differentiate("bicubic-antialiased", torch.float64), launches=2, assembled=False
    ),
    "taps, channels last": Execution(
        differentiate("avg_pool3d-overlap", torch.float32, last=True), launches=3, assembled=False
    ),
    "samples": Execution(sample(2, 0, 0, torch.float16), launches=4),
    "samples with reflections": Execution(
        sample(2, 2, 2, torch.float32), launches=4, capability=80, assembled=False
    ),
    "samples of a volume": Execution(
        sample(3, 0, 1, torch.float64), launches=4, capability=100, assembled=False
    ),
    "nearest samples": Execution(sample(3, 1, 2, torch.bfloat16), launches=4, assembled=False),
    "taps of a padding": Execution(
        differentiate("replication3d", torch.float32), launches=3, capability=100
    ),
}


@pytest.mark.parametrize("name", EXECUTIONS)
def test_executed_code_has_the_bits_of_the_torch_ops(name, monkeypatch) -> None:
    """Every access is within the tensors, every read of written bytes, and no addition rounds.

    Nothing is spilled. Sizes are no part of a kernel: other ones compile nothing anew.
    """
    from lightning_d9m.ops.patches.triton import kernels

    call, capability, count, assembled = EXECUTIONS[name]
    with patches_applied("CPU"):
        expected = call()
        monkeypatch.setattr(kernels, "_prepare", kernels._prepare.__wrapped__)
        with executed(capability, exact=False) as launches:
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
            compiled = compile_kernel(one, capability)
            assert (compiled["stack"], compiled["spilled"]) == (0, 0)
            seen.update(compiled["atomics"])
    if assembled and launches[-1].kernel.__name__ == "accumulate_terms":
        name = "RED" if capability == 80 else "REDG"
        assert seen == {f"{name}.E.MAX.S32.STRONG.GPU", f"{name}.E.ADD.F64.RN.STRONG.GPU"}
    else:
        assert seen == set()


LIMIT = 2**31 - 1 - 4096
FEATURES = 128
ROWS = LIMIT // FEATURES
# Terms and places, in rows of 128, of float32.
LARGE = {
    "half": (ROWS // 4 * 128, ROWS // 4 * 128),
    "narrow": ((ROWS - ROWS // 4) * 128, ROWS // 4 * 128),
    "wide by one row": ((ROWS - ROWS // 4) * 128, (ROWS // 4 + 1) * 128),
    "both below the limit, not their sum": (1_945_600_000, 307_200_000),
    "above": (2**31 + 2**20, 2**20),
    "far above": (2**34, 2**33),
}


def plan_large(kernel: str, terms: int, places: int) -> tuple[list, int, int, tuple, list]:
    """Return launches, their elements, the greatest offset, and bytes and dtypes of the tensors."""
    from lightning_d9m.ops.patches.triton import kernels

    rows, count = terms // FEATURES, places // FEATURES
    kinds = [torch.float32] * 6
    if kernel == "accumulate_terms":
        layout = Layout(1, 1, 1, rows, FEATURES, count, (0, 0, 1, 0))
        given = (layout, plan_pieces(torch.float32, rows + 1), (24, -126), True, False)
        elements = rows * FEATURES + count * FEATURES
        sizes = (4 * places, 4 * terms, 4 * terms, 8 * rows, 40 * places)
        kinds[3:] = [torch.int64, torch.float64]
        return kernels._prepare.__wrapped__(*given)[1][:2], elements, elements, sizes, kinds
    if kernel == "sample_image":  # bilinear: four neighbors in one plane
        elements = terms // 2
        shapes = (1, elements, 1, 2), (4, 1, elements), (1, 1, count, FEATURES), (1, 1, elements)
        sizes = (4 * terms, 4 * places, 4 * elements, 4 * terms, 32 * elements, 16 * elements)
        rule = sampling.Rule(sampling._NEIGHBORS[0], False, False, 0, False)
        kinds[4] = torch.int64
        launches = [kernels._prepare_sample.__wrapped__(*shapes, rule)]
        return launches, elements, max(2 * terms, places), sizes, kinds
    elements = rows * FEATURES  # a line for each feature
    sizes = (4 * places, 4 * terms, 4 * rows + 20, 4 * count + 8, 4 * count + 8)
    kinds[2:] = [torch.int32, torch.int32, torch.float32]
    launches = [kernels._prepare_taps.__wrapped__(rows, count, FEATURES, 1)]
    return launches, elements, max(elements, places), sizes, kinds


@pytest.mark.parametrize(("terms", "places"), LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("kernel", ["accumulate_terms", "apply_taps", "sample_image"])
def test_each_block_touches_its_elements_at_any_size(kernel, terms, places) -> None:
    """The compiled code, in the first and the last blocks and those around 2**31 elements."""
    launches, elements, most, sizes, kinds = plan_large(kernel, terms, places)
    with recorded() as seen:
        for launch_one in launches:
            launch_one(*[torch.zeros(4, dtype=kind) for kind in kinds])
    for one, named, blocks in seen:
        assert one.constants["WIDE"] == (most > LIMIT)
        chosen = {0, blocks // 2, blocks - 1, 2**24, 2**24 - 1, 2**25, terms // 128}
        for block in sorted(number for number in chosen if number < blocks):
            run = run_block(one, named, block, blocks, sizes)
            first, last = block * 128, min(block * 128 + 128, elements)
            if kernel == "apply_taps":
                assert run.touched[2] == (4 * first, 4 * last - 1)
            elif kernel == "sample_image":
                assert run.touched[4] == (8 * first, 8 * last - 1)
                assert run.touched[5] == (8 * first, 8 * (3 * elements + last) - 1)
            elif first < terms:
                assert run.touched[2] == (4 * first, 4 * min(last, terms) - 1)
            if kernel == "accumulate_terms" and last > terms:
                assert run.touched[1] == (4 * max(first - terms, 0), 4 * (last - terms) - 1)


@pytest.mark.parametrize("fault", ["rounds", "outside of the tensors"])
def test_a_wrong_sum_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces for fewer terms than there are, and a place beyond the sums."""
    count, terms = (12, 2) if fault == "rounds" else (2000, 70)
    values = torch.linspace(1, 2, 70, dtype=torch.float64).sqrt()
    layout = Layout(1, 1, 1, 70, 1, count, (0, 0, 1, 0))
    given = (torch.full((70,), count - 1), values, None, layout)
    monkeypatch.setattr(exact_sums, "run_kernel", lambda _, __, *args, **_more: run(*args))
    from lightning_d9m.ops.patches.triton.kernels import accumulate as run

    with executed(exact=False), pytest.raises(PtxError, match=fault):
        accumulate(torch.zeros(12).double(), *given, plan_pieces(torch.float64, terms))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str) -> None:
    out = torch.zeros(128, dtype=torch.int32)
    memory = Memory([out], [out] if "wrote" in fault else ())
    text = STORE.replace("ADDRESS", FAULTS[fault].replace(";", ";\n"))
    with pytest.raises(PtxError, match=fault):
        Run(parse(text), 0, 1, memory, [memory.find(out)], np.random.default_rng(0)).run()
