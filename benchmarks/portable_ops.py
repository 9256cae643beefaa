"""Compute the samples of torch's own table of operations with portable bits.

    python benchmarks/portable_ops.py [--ops NAME ...] [-o FILE]

Each operation of ``torch.testing``'s ``op_db`` runs on its samples (float32, float64 and bfloat16,
with gradients where it has them) under several settings of this machine. It must give the same
bytes under each, or raise a ``NotPortableError``. What else happens is listed, and so are results
that are farther from those of plain torch in float64 than rounding explains: more than a bound, and
more than four times as far as torch's own result.
"""

import argparse
import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from measurement import PORTABLE_SETTINGS, run_settings
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_d9m import portable
from lightning_d9m.errors import NotPortableError

# The greatest distance to float64's results, relative to the greatest value of a result.
BOUNDS = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 6e-2}
SAMPLES = {torch.float32: 10, torch.float64: 4, torch.bfloat16: 3}
# The results are not numbers that an operation computes.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"}
UNDEFINED |= {"new_empty_strided"}


def digest(values: Iterable[Any]) -> str:
    """Return a digest of the numbers in results, with one NaN."""
    total = sha256()
    for one in tree_leaves(list(values)):
        if isinstance(one, Tensor):
            dense = one.detach().to_dense() if one.layout != torch.strided else one.detach()
            dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
            if dense.is_floating_point():
                dense = torch.where(dense.isnan(), math.nan, dense.double())
            total.update(str(tuple(dense.shape)).encode())
            total.update(dense.contiguous().numpy().tobytes())
        elif isinstance(one, bool | int | float | complex | str):
            total.update(repr(one).encode())
    return total.hexdigest()[:16]


def run_sample(op: Any, sample: Any) -> list[Any]:
    """Return the results of an operation, and the gradients of its inputs."""
    with portable():
        torch.manual_seed(1)
        result = op(sample.input, *sample.args, **sample.kwargs)
        outputs = [
            one
            for one in tree_leaves(result)
            if isinstance(one, Tensor) and one.requires_grad and not one.is_complex()
        ]
        inputs = [
            one
            for one in tree_leaves((sample.input, sample.args, sample.kwargs))
            if isinstance(one, Tensor) and one.requires_grad
        ]
        grads: Any = ()
        if outputs and inputs:
            seeds = [torch.linspace(-1, 1, one.numel()).to(one).view(one.shape) for one in outputs]
            grads = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
        return [result, list(grads)]


def find_error(op: Any, sample: Any, found: Any, dtype: torch.dtype) -> float:
    """Return the distance to the result of plain torch in float64; 0 if torch cannot tell."""

    def widen(value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().double() if wide else value

    given = tree_map(widen, (sample.input, sample.args, sample.kwargs))
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        try:
            results.append(tree_leaves(op(tree_map(clone, given[0]), *given[1], **given[2])))
        except Exception:  # noqa: BLE001 - it has no float64
            return 0.0
    if digest(results[0]) != digest(results[1]):
        return 0.0  # random numbers
    worst = 0.0
    for one, result in zip(results[0], tree_leaves(found), strict=False):
        dense = isinstance(one, Tensor) and one.layout == torch.strided and one.numel() > 0
        if dense and one.is_floating_point() and one.shape == result.shape:
            exact, other = one.detach(), result.detach().double()
            same = (exact == other) | (exact.isnan() & other.isnan())
            finite = exact.isfinite()
            scale = exact[finite].abs().max().clamp(min=1e-30) if finite.any() else 1.0
            gaps = torch.where(same, 0.0, (exact - other).abs() / scale)
            large = gaps.isinf() & (exact.abs() > torch.finfo(dtype).max)
            worst = max(worst, float(torch.where(large, 0.0, gaps).nan_to_num(1.0).max()))
    return worst


def find_own_error(op: Any, sample: Any, dtype: torch.dtype) -> float:
    """Return the distance of plain torch's result: terms may cancel, as those of kl_div do."""
    torch.manual_seed(1)
    given = tree_map(clone, (sample.input, sample.args, sample.kwargs))
    try:
        return find_error(op, sample, op(given[0], *given[1], **given[2]), dtype)
    except Exception:  # noqa: BLE001 - it has none of this type
        return 0.0


def clone(value: Any) -> Any:
    """Return a copy of a tensor."""
    return value.clone() if isinstance(value, Tensor) else value


def make_samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Yield samples whose numbers are drawn portably, where that is possible."""
    has_gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    try:
        torch.manual_seed(0)
        with portable():
            samples = list(
                islice(op.sample_inputs("cpu", dtype, requires_grad=has_gradients), SAMPLES[dtype])
            )
    except NotPortableError:
        torch.manual_seed(0)
        given = op.sample_inputs("cpu", dtype, requires_grad=has_gradients)
        samples = list(islice(given, SAMPLES[dtype]))
    yield from samples


def run_op(op: Any, dtype: torch.dtype) -> list[list[str]]:
    """Return for each sample the digest of its inputs, and that of its results or an error."""
    found = []
    for sample in make_samples(op, dtype):
        given = digest([sample.input, sample.args, sample.kwargs])
        try:
            values = run_sample(op, sample)
            result = digest(values)
            distance = find_error(op, sample, values[0], dtype)
            if distance > BOUNDS[dtype] and distance > 4 * find_own_error(op, sample, dtype):
                result += f" inaccurate: {distance:.0e}"
        except NotPortableError as error:
            result = f"refused {error.op}"
        except Exception as error:  # noqa: BLE001 - each operation counts
            result = f"{type(error).__name__}: {str(error)[:120]}"
        found.append([given, result])
    return found


def run_all(names: list[str]) -> dict[str, list[list[str]]]:
    """Return what each operation gives in this process."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, list[list[str]]] = {}
    for op in op_db:
        if (names and op.name not in names) or op.name in UNDEFINED:
            continue
        for dtype in SAMPLES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            name = f"{op.name} {op.variant_test_name}".strip() + f" {str(dtype)[6:]}"
            try:
                found[name] = run_op(op, dtype)
            except Exception as error:  # noqa: BLE001 - torch's own samples
                found[name] = [["", f"no samples: {type(error).__name__}: {str(error)[:80]}"]]
    return found


def judge(results: list[list[list[str]]]) -> str:
    """Return what an operation did under all settings.

    Samples that torch itself makes otherwise under another setting are only seen to be refused.
    """
    verdict, trouble = "equal", ""
    for rows in zip(*results, strict=True):
        found = {row[1] for row in rows}
        refused = all(one.startswith("refused") for one in found)
        if len({row[0] for row in rows}) > 1 and not refused:
            return "inputs differ"
        if len(found) > 1:
            return "differs"
        if ": " in rows[0][1]:
            trouble = trouble or rows[0][1]
        verdict = rows[0][1] if refused else verdict
    # What is inaccurate has a digest, too.
    return trouble[max(trouble.find("inaccurate"), 0) :] or verdict


def main() -> None:
    """Run all operations under each setting, and print what is not equal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--here", action="store_true", help="only in this process, as JSON")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.here:
        warnings.simplefilter("ignore")
        print(json.dumps(run_all(options.ops)))
        return
    found = run_settings(PORTABLE_SETTINGS, __file__, "--ops", *options.ops)
    verdicts = {name: judge([one[name] for one in found]) for name in found[0]}
    counts = Counter(v if v in ("equal", "differs") else v.split()[0] for v in verdicts.values())
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "settings": PORTABLE_SETTINGS,
        "counts": counts,
        "refused": {name: v[8:] for name, v in verdicts.items() if v.startswith("refused")},
        "other": {
            name: v for name, v in verdicts.items() if v != "equal" and not v.startswith("refused")
        },
    }
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
