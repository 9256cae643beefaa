"""Edge cases of the patched ops: torch's own answer, by torch ops and by Triton's interpreter.

    export TRITON_INTERPRET=1 PYTHONPATH=.:tests
    python tests/patches/check_edge_cases.py -o benchmarks/results/edge-cases.json

Each case runs on the CPU with torch's own kernel and with the replacement, which must give the same
values, dtype, shape and strides, or the same error. Where a Triton kernel exists, the interpreter
runs it too, and it must give what the torch ops give; a case of grid_sample takes it seconds. The
result has the number of cases for each op, kind of edge and kernel.

Documented differences: half and bfloat16 are added in float32, so they are compared with sums in
float64; an infinity that meets a weight of 0 in an interpolation may come out as a NaN.
"""

import argparse
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from patches.cases import answer, deterministic_algorithms
from patches.edge_cases import EdgeCase, list_cases
from torch import Tensor

from lightning_d9m.errors import D9mError
from lightning_d9m.ops.patches.registration import patches_applied
from lightning_d9m.ops.patches.triton import launch

ROUNDINGS = 64  # more than the terms of any output
WEIGHTED = ("linear", "cubic", "lanczos")
# No sum is taken, or one of whole numbers.
EXACT = ("prod", "multiply", "amax", "amin", "unpool", "histc", "median", "logcumsumexp")


def run(case: EdgeCase) -> object:
    """Return the results, or the class and words of the error."""
    try:
        return answer(case.call)
    except (D9mError, UserWarning) as error:  # a kernel that fails on the CPU at once is withdrawn
        launch._withdrawn.clear()  # so that the next case runs it
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
        if not is_close(*forgive(case, left, right), count_roundings(case, left)):
            return f"{left.flatten()[:6]} in place of {right.flatten()[:6]}"
    return None


def count_roundings(case: EdgeCase, result: Tensor) -> float:
    """Return how many roundings may separate a result from what is expected."""
    if case.reference is not None:
        return 1
    if case.op == "ctc_loss":
        return 3000  # exponents are sums of up to 30 logarithms of up to 100
    exact = case.op == "put_" or any(word in case.op for word in EXACT)
    return (
        0
        if exact and not case.edge.startswith("gradient") and not result.is_complex()
        else ROUNDINGS
    )


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
    load = launch._load  # to see what runs

    def note(path: str) -> object:
        used.append(path)
        return load(path)

    launch._load = note
    launch._device_types.add("cpu")  # kernels run on CUDA only
    try:
        yield used
    finally:
        launch._device_types.discard("cpu")
        launch._load = load


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
    parser.add_argument("--no-kernels", action="store_true", help="only the torch ops")
    words = parser.parse_args()
    if not words.no_kernels and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("set TRITON_INTERPRET=1, or pass --no-kernels")
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message="The Triton kernel")  # none may be withdrawn
    np.seterr(all="ignore")  # the interpreter computes masked elements, too
    torch.set_num_threads(1)
    launch._BLOCK = 2048  # the interpreter's time grows with programs
    by_op, by_edge, refused, kernels = Counter(), Counter(), 0, Counter()
    differences = []
    cases = [case for case in list_cases() if words.only in case.op]
    for case, of_ops in zip(cases, find_differences(cases), strict=True):
        by_op[case.op] += 1
        by_edge[case.edge] += 1
        refused += isinstance(answer(case.call)[0], type)
        used, of_kernels = ((), None) if words.no_kernels else find_kernel_difference(case)
        kernels.update(set(used))
        for difference in filter(None, (of_ops, of_kernels)):
            differences.append({"op": case.op, "edge": case.edge, "difference": difference})
            print(json.dumps(differences[-1]), flush=True)
    record = {
        "torch": torch.__version__,
        "cases": len(cases),
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
