"""Edge cases of the patched ops: torch's own answer, by torch ops and by Triton's interpreter.

    export TRITON_INTERPRET=1 PYTHONPATH=.:tests
    python benchmarks/ops/edge_cases.py --every 16 -o benchmarks/results/edge-cases.json

The cases are torch's own samples of the ops, of which one argument is changed; each change is made
to each argument of each sample. A case runs on the CPU with torch's own kernel and with the
replacement, which must give the same values, dtype, shape and strides, or the same error. Where a
Triton kernel exists, the interpreter runs it too, for each 16th case here, and it must give what
the torch ops give. The result has the number of cases for each op, kind of edge and kernel.

Documented differences: half and bfloat16 are added in float32, so they are compared with sums in
float64; an infinity that meets a weight of 0 in an interpolation may come out as a NaN.
"""

import argparse
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from patches.cases import GRADIENT_CASES, answer, deterministic_algorithms, list_infos
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_d9m.errors import D9mError
from lightning_d9m.ops.patches.registration import patches_applied
from lightning_d9m.ops.patches.triton import launch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, torch.complex64, torch.complex128, *INTEGERS, torch.bool)
SPECIAL = "infinities, NaN, -0.0"
NUMBERS = (torch.inf, -torch.inf, torch.nan, -0.0)
PLACES = (-1, -4, 4, 100, -100)
MOST = 64  # of the samples of an op
# CUDA's kernels give a contiguous gradient where the CPU's keep the format.
CONTIGUOUS = ("pad", "flection", "cation", "unpool")
# Not compared with sums in float64, which would see different numbers or bins.
IN_OWN_DTYPE = ("histc", "logcumsumexp")
# torch's CPU kernels round positions, or each product, to half and bfloat16.
COARSE = ("grid_sample", "index_reduce prod")
# torch's CPU kernels read outside of tensors for wrong values or sizes of these.
UNCHECKED = ("ctc_loss", "embedding_bag", "grid_sample")
ROUNDINGS = 64  # more than the terms of any output
WEIGHTED = ("linear", "cubic", "lanczos")
# No sum is taken, or one of whole numbers.
EXACT = ("prod", "multiply", "amax", "amin", "unpool", "histc", "median", "logcumsumexp")

Tensors = Sequence[Tensor]
Function = Callable[[Tensors], object]


class EdgeCase(NamedTuple):
    """One call.

    Attributes:
        op: What is called.
        edge: What is special about it.
        call: Returns one tensor or several, or raises; changes none of its inputs.
        reference: What to compare with in place of torch's answer, if the difference is documented.
        strides: Whether the strides are compared.
        on_cpu_only: Whether torch's CUDA kernel does not take the dtype, and ours says so.
    """

    op: str
    edge: str
    call: Callable[[], object]
    reference: Callable[[], object] | None = None
    strides: bool = True
    on_cpu_only: bool = False


class Sample(NamedTuple):
    """A function of tensors, and tensors that it takes; ``update`` changes the first one."""

    op: str
    function: Function
    tensors: Tensors
    update: Function | None = None
    write: Callable[..., object] | None = None


def list_samples() -> Iterator[Sample]:
    """Yield samples of torch's list of ops, and of the gradients that tests compare."""
    for info in list_infos():
        dtype = torch.float32 if info.supports_dtype(torch.float32, "cpu") else torch.int64
        seen = set()
        for sample in islice(info.sample_inputs("cpu", dtype), MOST):
            leaves, form = tree_flatten((sample.input, sample.args, sample.kwargs))
            kind = (
                sample.input.dim(),
                bool(sample.kwargs),
                *(leaf for leaf in leaves if isinstance(leaf, str)),
            )
            if kind in seen or (info.name == "index_put" and leaves[-1] is False):
                continue  # the latter have several values for one place
            seen.add(kind)
            at = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

            def run(
                tensors: Tensors, op: Any, leaves: Any = leaves, form: Any = form, at: Any = at,
                **more: Any,
            ) -> object:  # fmt: skip
                given = dict(zip(at, tensors, strict=True))
                own = [given.get(place, leaf) for place, leaf in enumerate(leaves)]
                first, args, kwargs = tree_unflatten(own, form)
                return op(first, *args, **kwargs, **more)

            update = partial(run, op=info.inplace_variant) if info.inplace_variant else None
            write = partial(run, op=info.op) if info.supports_out else None
            name = f"{info.name} {info.variant_test_name}".strip()
            tensors = [leaves[place] for place in at]
            yield Sample(name, partial(run, op=info.op), tensors, update, write)
    row, one = torch.randn(300), torch.tensor([3])
    yield Sample(
        "index_put of one", lambda given: given[0].index_put((given[1],), given[2]),
        [row, one, row[:1]],
    )  # fmt: skip
    for scan in (torch.cumprod, torch.logcumsumexp):
        for rows in (row, row.view(1, 300, 1)):
            dim = rows.shape.index(300)
            yield Sample(scan.__name__, lambda given, s=scan, d=dim: s(given[0], d), [rows])
    for case in GRADIENT_CASES:
        image = (torch.randperm(torch.Size(case.shape).numel()) % 251.0).view(case.shape)
        yield Sample(case.label, lambda given, own=case: own.forward(given[0]), [image])


def list_changed(tensor: Tensor, *, checked: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield changed tensors, and what is changed: the layout, the values or the shape."""
    wide = torch.stack([tensor, tensor], -1)
    yield "strided", wide[..., 0]
    if tensor.dim():
        yield "strided", tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if checked:
            yield "expanded", tensor[:1].expand_as(tensor)
    if tensor.dim() > 3:
        form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        yield "channels last", tensor.contiguous(memory_format=form)
    if not checked:
        return
    if tensor.is_floating_point():
        for number in NUMBERS if tensor.numel() else ():
            filled = tensor.clone(memory_format=torch.contiguous_format)
            filled.view(-1)[tensor.numel() // 2] = number
            yield SPECIAL, filled
            yield SPECIAL, torch.full_like(tensor, number)
    else:
        for place in PLACES:
            yield "negative and out of range", torch.full_like(tensor, place)
        yield "longer", torch.cat([tensor, tensor]) if tensor.dim() else tensor.expand(2)
    yield "other dtype", tensor.double()
    yield "other shape", tensor[None]
    yield "0-d", tensor.flatten()[:1].sum().to(tensor.dtype)
    if tensor.dim():
        yield "empty", tensor[:0]
        yield "empty", tensor[..., :0]
        yield "other shape", tensor[..., :-1]
        yield "other shape", tensor[:1].squeeze(0)


def list_changes(sample: Sample) -> Iterator[tuple[str, Tensors]]:
    """Yield the tensors of a sample, of which one is changed, or all in the same way."""
    tensors, checked = sample.tensors, not any(word in sample.op for word in UNCHECKED)
    yield "as it is", tensors
    for place, tensor in enumerate(tensors):
        for edge, changed in list_changed(tensor, checked=checked):
            yield edge, [*tensors[:place], changed, *tensors[place + 1 :]]
    for dtype in DTYPES:
        yield f"dtype {dtype}", [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    yield "int32 index", [t if t.is_floating_point() else t.int() for t in tensors]
    if checked and tensors[0].dim():
        yield "empty", [tensor[:0] if tensor.dim() else tensor for tensor in tensors]


def differentiate(
    function: Function, tensors: Tensors, change: Callable[[Tensor], Tensor] = torch.clone
) -> tuple[Tensor, ...]:
    """Return the outputs, and the gradients for gradients made of the outputs."""
    torch.default_generator.manual_seed(0)  # fractional pooling draws
    leaves = [one.detach().requires_grad_(one.dtype.is_floating_point) for one in tensors]
    outputs = [one for one in tree_leaves(function(leaves)) if isinstance(one, Tensor)]
    smooth = [one for one in outputs if one.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    given = [change(one.detach()) for one in smooth]
    found = torch.autograd.grad(smooth, wanted, given, allow_unused=True) if smooth else ()
    return (*(one.detach() for one in outputs), *(one for one in found if one is not None))


def fill_one(number: float, output: Tensor) -> Tensor:
    """Return a gradient with one special number."""
    filled = output.clone(memory_format=torch.contiguous_format)
    filled.view(-1)[output.numel() // 2 :][:1] = number
    return filled


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided gradient": lambda output: torch.stack([output, output], -1)[..., 0],
    "expanded gradient": lambda output: torch.ones((), dtype=output.dtype).expand(output.shape),
    "gradient of another shape": lambda output: output[..., :-1] if output.dim() else output[None],
}


def update_copy(update: Function, tensors: Tensors) -> object:
    """Update a copy of the first tensor, of the same strides."""
    target, *rest = tensors
    copy = target.new_empty(0)
    memory = target.untyped_storage().clone()
    return update(
        [copy.set_(memory, target.storage_offset(), target.shape, target.stride()), *rest]
    )


def update_shared(update: Function, tensors: Tensors, place: int) -> object:
    """Update a tensor that shares its memory with another argument."""
    target, other = tensors[0].clone(), tensors[place]
    memory = torch.zeros(target.numel() + other.numel(), dtype=target.dtype)
    own, shared = memory[: target.numel()].view_as(target), memory[1 : 1 + other.numel()]
    own.copy_(target)
    update([own, *tensors[1:place], shared.view_as(other), *tensors[place + 1 :]])
    return memory


OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "out= empty": lambda result: result.new_empty(0),
    "out= of another shape": lambda result: result.new_empty(2, 2),
    "out= of another dtype": lambda result: result.new_empty(0, dtype=torch.int32),
    "out= strided": lambda result: torch.stack([result, result], -1)[..., 0],
}


def write_output(sample: Sample, change: Callable[[Tensor], Tensor]) -> object:
    """Write into a tensor made of the result."""
    out = change(sample.function(sample.tensors))
    return sample.write(sample.tensors, out=out)


def write_shared(sample: Sample) -> object:
    """Write into one of the arguments."""
    tensors = [tensor.clone() for tensor in sample.tensors]
    return sample.write(tensors, out=tensors[-1])


def list_variants(sample: Sample) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield updates of the first argument, and calls with ``out=``."""
    first, *rest = sample.tensors
    if sample.update is not None:
        targets = {"in place": first, "strided target": torch.stack([first, first], -1)[..., 0]}
        if first.dim():
            targets["overlapping target"] = first[:1].expand_as(first)
        for edge, target in targets.items():
            yield edge, partial(update_copy, sample.update, [target, *rest])
        for place, other in enumerate(rest, 1):
            if other.dtype == first.dtype:
                yield "shared memory", partial(update_shared, sample.update, sample.tensors, place)
    if sample.write is not None:
        for edge, change in OUTPUTS.items():
            yield edge, partial(write_output, sample, change)
        if rest:
            yield "out= shared memory", partial(write_shared, sample)


def has_strides(op: str, tensors: Tensors) -> bool:
    """Return whether the strides of results are those of CUDA's kernels."""
    changed = any(one.dim() > 3 and not one.is_contiguous() for one in tensors)
    return not (changed and any(word in op for word in CONTIGUOUS))


def read_values(function: Function, tensors: Tensors) -> Tensor:
    """Return the first result only."""
    return tree_leaves(function(tensors))[0]


def list_sample_cases(sample: Sample) -> Iterator[EdgeCase]:
    """Yield the cases of a sample."""
    for edge, tensors in list_changes(sample):
        if "median" in sample.op and edge == "expanded":
            continue  # torch's CPU kernel returns a number that is not in the row
        if tensors[0].dtype in FLOATS[:2] and any(word in sample.op for word in COARSE):
            continue
        call, reference = partial(differentiate, sample.function, tensors), None
        if "median" in sample.op and edge == SPECIAL:
            call = partial(read_values, sample.function, tensors)  # the index is any of equal ones
        dtype = tensors[0].dtype
        if dtype in FLOATS[:2] and not any(word in sample.op for word in IN_OWN_DTYPE):
            wide = [one.double() if one.is_floating_point() else one for one in tensors]
            reference = partial(differentiate, sample.function, wide)
        on_cpu_only = sample.op.startswith("index_reduce") and (
            dtype.is_complex or dtype == torch.bool
        )
        strides = has_strides(sample.op, tensors)
        yield EdgeCase(sample.op, edge, call, reference, strides, on_cpu_only)
    changes = [*GRADIENTS.items()]
    if not any(word in sample.op for word in UNCHECKED):
        changes += ((SPECIAL, partial(fill_one, number)) for number in NUMBERS)
    strides = has_strides(sample.op, sample.tensors)
    for edge, change in changes:
        call = partial(differentiate, sample.function, sample.tensors, change)
        yield EdgeCase(sample.op, edge, call, strides=strides)
    for edge, call in list_variants(sample):
        yield EdgeCase(sample.op, edge, call)


@cache
def list_cases() -> list[EdgeCase]:
    """Return all cases; the same ones in every process."""
    torch.manual_seed(0)
    return [case for sample in list_samples() for case in list_sample_cases(sample)]


def run(case: EdgeCase) -> object:
    """Return the results, or the class and words of the error."""
    try:
        return answer(case.call)
    except (D9mError, UserWarning) as error:  # a kernel that fails on the CPU at once is withdrawn
        launch._withdrawn.clear()  # noqa: SLF001 - so that the next case runs it
        return type(error), str(error)


def find_differences(cases: Sequence[EdgeCase]) -> list[str | None]:
    """Return how the replacement's answer differs from what is expected, for each case."""
    own, found = [answer(case.call) for case in cases], []
    with patches_applied("CPU"):
        for case, expected in zip(cases, own, strict=True):
            # With the flag on, torch's alert would come before the error for an argument.
            is_refused = isinstance(expected[0], type)
            with nullcontext() if is_refused else deterministic_algorithms():
                found.append(run(case))
    return list(map(describe_difference, cases, own, found))


def describe_difference(case: EdgeCase, own: object, actual: object) -> str | None:
    """Return how an answer differs from what is expected."""
    if case.on_cpu_only and actual[0] is D9mError:
        return None
    if isinstance(own[0], type) or isinstance(actual[0], type):
        return None if actual == own else f"{actual} in place of {own}"
    expected = own if case.reference is None else answer(case.reference)
    for left, right, same in zip(actual, expected, own, strict=True):
        if (left.shape, left.dtype) != (same.shape, same.dtype):
            return f"{left.dtype} {tuple(left.shape)} in place of {same.dtype} {tuple(same.shape)}"
        if case.strides and left.stride() != same.stride():
            return f"strides {left.stride()} in place of {same.stride()}"
        wanted = right.to(same.dtype)  # a reference is in float64
        if not is_close(*forgive(case, left, wanted), count_roundings(case, left)):
            return f"{left.flatten()[:6]} in place of {right.flatten()[:6]}"
    return None


def count_roundings(case: EdgeCase, result: Tensor) -> float:
    """Return how many roundings may separate a result from what is expected."""
    if case.reference is not None:
        return 8  # of sums, of products with weights, and of what multiplies them
    if "ctc_loss" in case.op:
        return 3000  # exponents are sums of up to 30 logarithms of up to 100
    exact = case.op == "put_" or any(word in case.op for word in EXACT)
    return 0 if exact and case.edge != "gradient" and not result.is_complex() else ROUNDINGS


def forgive(case: EdgeCase, *parts: Tensor) -> tuple[Tensor, ...]:
    """Return values in which an infinity is a NaN if it may have met a weight of 0."""
    if not any(word in case.op for word in WEIGHTED):
        return parts
    return tuple(torch.where(part.isfinite(), part, torch.nan) for part in parts)


def is_close(left: Tensor, right: Tensor, roundings: float) -> bool:
    """Return whether values are equal but for roundings of the greatest finite magnitude."""
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    if left.dtype.itemsize == 2:
        eps, left, right = torch.finfo(left.dtype).eps, left.float(), right.float()
    else:
        eps = torch.finfo(left.dtype).eps
    magnitudes = right.nan_to_num(0, 0, 0).abs()
    bound = roundings * eps * float(magnitudes.max()) if magnitudes.numel() else 0.0
    rtol = eps if roundings else 0.0
    return torch.allclose(left, right, rtol=rtol, atol=bound, equal_nan=True)


@contextmanager
def kernels_counted() -> Iterator[list[str]]:
    """Let the interpreter run Triton kernels on the CPU, and list those that run."""
    used: list[str] = []
    load = launch._load  # noqa: SLF001 - to see what runs

    def note(path: str) -> object:
        used.append(path)
        return load(path)

    launch._load = note  # noqa: SLF001 - as above
    launch._device_types.add("cpu")  # noqa: SLF001 - kernels run on CUDA only
    try:
        yield used
    finally:
        launch._device_types.discard("cpu")  # noqa: SLF001 - as above
        launch._load = load  # noqa: SLF001 - as above


def find_kernel_difference(case: EdgeCase) -> tuple[list[str], str | None]:
    """Return the kernels of a case, and how their answer differs from that of the torch ops."""
    with patches_applied("CPU"):
        expected = run(case)
        with kernels_counted() as used:
            actual = run(case)
    if not used:
        return used, None
    if isinstance(expected[0], type) or isinstance(actual[0], type):
        same = expected[0] is actual[0] or (
            isinstance(expected[0], type) and isinstance(actual[0], type)
        )
        return used, None if same else f"kernel: {actual} in place of {expected}"
    for left, right in zip(actual, expected, strict=True):
        if (left.shape, left.dtype, left.stride()) != (right.shape, right.dtype, right.stride()):
            return used, "kernel: another shape, dtype or layout"
        if not is_close(*forgive(case, left, right), 4):
            return used, f"kernel: {left.flatten()[:6]} in place of {right.flatten()[:6]}"
    return used, None


def main() -> None:
    """Write the number of cases for each op and edge, and every difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default="", help="a part of the op's name")
    parser.add_argument("--every", type=int, default=1, help="the interpreter runs each N-th case")
    words = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("set TRITON_INTERPRET=1")
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message="The Triton kernel")  # none may be withdrawn
    np.seterr(all="ignore")  # the interpreter computes masked elements, too
    torch.set_num_threads(1)
    launch._BLOCK = launch._SMALL_BLOCK = 2048  # noqa: SLF001 - the interpreter's time grows with programs
    by_op, by_edge, refused, kernels = Counter(), Counter(), 0, Counter()
    differences = []
    cases = [case for case in list_cases() if words.only in case.op]
    for number, (case, of_ops) in enumerate(zip(cases, find_differences(cases), strict=True)):
        by_op[case.op] += 1
        by_edge[case.edge] += 1
        refused += isinstance(answer(case.call)[0], type)
        used, of_kernels = ((), None) if number % words.every else find_kernel_difference(case)
        kernels.update(set(used))
        for difference in filter(None, (of_ops, of_kernels)):
            differences.append({"op": case.op, "edge": case.edge, "difference": difference})
            print(json.dumps(differences[-1]), flush=True)
    record = {
        "torch": torch.__version__,
        "cases": len(cases),
        "interpreted": len(cases[:: words.every]),
        "refused_alike": refused,
        "cases_by_edge": dict(sorted(by_edge.items())),
        "cases_by_op": dict(sorted(by_op.items())),
        "cases_by_kernel": dict(sorted(kernels.items())),
        "differences": differences,
    }
    print(json.dumps({key: record[key] for key in ("cases", "refused_alike")}), len(differences))
    if words.output:
        words.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
