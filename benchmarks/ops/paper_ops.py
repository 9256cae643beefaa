"""The op table of Shanmugavelu et al. 2024 (arXiv 2408.05148), measured and published figures.

Ops, sizes and metrics are those of the paper: each of 1,000 runs without determinism is compared
with one deterministic output. The published figures come from the authors' raw data
(github.com/minnervva/correctness, codes/test-suite/paper-results/data, commit 64735b5): means over
1,000 runs on a GPU. Their number of distinct outputs includes the deterministic one, so 2 means
that all runs agree with each other. Cells are empty if the published data lacks the op.

    python benchmarks/ops/paper_ops.py --output FOLDER [--device cuda]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as nnf

from lightning_d9m import deterministic
from lightning_d9m.ops.patches.registration import patches_applied
from lightning_d9m.tools.audit.ops.cases import Inputs
from lightning_d9m.tools.comparison.numeric_difference import SpreadMeter
from lightning_d9m.tools.output.columns import markdown_table, short

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Published:
    """Figures of the paper's raw data: microseconds are means, None if there is no column."""

    distinct: int
    vermv: float
    vc: float
    plain: float
    deterministic: float | None


@dataclass(frozen=True)
class Row:
    """An op on a shape."""

    op: str
    shape: str
    make: Callable[[Inputs], Call]
    published: Published | None = None


def _rows(op: str, side: int, ratio: float) -> Callable[[Inputs], Call]:
    """Make a call that puts ``side * ratio`` rows into as many places of a square."""

    def make(inputs: Inputs) -> Call:
        rows = int(side * ratio)
        index = inputs.whole(rows, rows)
        target, given = inputs.normal(side, side), inputs.normal(rows, side)
        calls = {
            "index_add": lambda: target.index_add(0, index, given),
            "index_copy": lambda: target.index_copy(0, index, given),
            "index_put accumulate": lambda: target.index_put((index,), given, accumulate=True),
            "index_put": lambda: target.index_put((index,), given),
        }
        return calls[op]

    return make


def _reduced(reduce: str, size: int, ratio: float) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        places = int(size * ratio)
        given, index = inputs.normal(size), inputs.whole(places, places)
        target = inputs.normal(places)
        if reduce == "replace":
            return lambda: target.scatter(0, index, given)
        return lambda: target.scatter_reduce(0, index, given, reduce)

    return make


def _convolved(side: int, kernel: int) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        image, weight = inputs.normal(1, 1, side, side), inputs.normal(1, 1, kernel, kernel)
        bias = inputs.normal(1)
        return lambda: nnf.conv_transpose2d(image, weight, bias, dilation=2)

    return make


def _summed(length: int) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        given = inputs.normal(length)
        return lambda: given.cumsum(0)

    return make


def list_rows() -> Iterator[Row]:
    """Yield the rows of the table."""
    for side, ratio, published in (
        (100, 0.5, Published(979, 9.37e-9, 0.0300, 22.4, 156.9)),
        (100, 1.0, Published(915, 1.57e-8, 0.0598, 22.5, 156.8)),
        (200, 0.5, Published(1001, 2.14e-8, 0.0265, 23.0, 161.4)),
        (1000, 0.5, Published(1001, 5.24e-10, 0.0021, 27.1, 169.9)),
        (1000, 1.0, Published(1001, 1.01e-9, 0.0023, 27.0, 178.5)),
    ):
        shape = f"({side}, {side}), R = {ratio}"
        yield Row("index_add", shape, _rows("index_add", side, ratio), published)
    for reduce, size, ratio, published in (
        ("sum", 1000, 0.5, Published(5, 6.92e-11, 0.0007, 28.5, None)),
        ("sum", 2000, 1.0, Published(884, 1.90e-8, 0.0997, 28.2, None)),
        ("sum", 5000, 0.5, Published(1001, 3.81e-9, 0.0159, 28.2, None)),
        ("mean", 5000, 0.5, Published(1001, 1.49e-9, 0.0094, 74.2, None)),
    ):
        shape = f"({size},), R = {ratio}"
        yield Row(f"scatter_reduce {reduce}", shape, _reduced(reduce, size, ratio), published)
    for side, kernel, published in (
        (100, 3, Published(2, 3.12e-7, 0.5322, 169.3, 353.5)),
        (500, 5, Published(2, 5.45e-7, 0.7108, 64.8, 368.5)),
        (1000, 11, Published(2, 1.53e-6, 0.8905, 66.8, 373.5)),
    ):
        shape = f"(1, {side}, {side}), kernel {kernel}, dilation 2"
        yield Row("ConvTranspose2d", shape, _convolved(side, kernel), published)
    for op in ("index_put accumulate", "index_put", "index_copy"):
        for side, ratio in ((200, 0.5), (1000, 0.5)):
            yield Row(op, f"({side}, {side}), R = {ratio}", _rows(op, side, ratio))
    yield Row("scatter", "(5000,), R = 0.5", _reduced("replace", 5000, 0.5))
    yield Row("cumsum", "(1000000,)", _summed(1_000_000))


@contextmanager
def ours(device: str) -> Iterator[None]:
    """Compute as a session with ``patch_ops`` does."""
    with deterministic(), patches_applied(torch.device(device).type.upper()):
        yield


def measure(row: Row, device: str, runs: int, seconds: float) -> dict[str, object]:
    """Run one row without determinism and with it."""
    call = row.make(Inputs(device, torch.float32))
    arms: dict[str, object] = {"op": row.op, "shape": row.shape}
    with ours(device):
        reference = call()
    for arm, scope in (("plain", nullcontext()), ("deterministic", ours(device))):
        meter, times, begin = SpreadMeter(reference), [], time.monotonic()
        with scope:
            call()
            while len(times) < runs and (len(times) < 10 or time.monotonic() - begin < seconds):
                start = time.perf_counter()
                output = call()
                if device != "cpu":
                    torch.accelerator.synchronize()
                times.append((time.perf_counter() - start) * 1e6)
                meter.add(output)
        arms[arm] = {**asdict(meter.spread()), "microseconds": statistics.median(times)}
    arms["published"] = None if row.published is None else vars(row.published)
    return arms


def render(result: dict) -> str:
    """Return the table as Markdown."""
    lines = []
    for row in result["rows"]:
        plain, fixed, there = row["plain"], row["deterministic"], row["published"]
        ratio = fixed["microseconds"] / plain["microseconds"]
        cells = [str(plain["distinct"]), short(plain["vermv"]), short(plain["vc"])]
        cells += [str(fixed["distinct"]), short(plain["microseconds"]), f"{ratio:.2f}"]
        if there:
            known = there["deterministic"]
            cells += [str(there["distinct"]), short(there["vermv"]), short(there["vc"])]
            cells += [f"{known / there['plain']:.2f}" if known else ""]
        cells += [""] * (10 - len(cells))
        lines.append((f"`{row['op']}`", row["shape"], *cells))
    here = ("distinct", "Vermv", "Vc", "distinct, det.", "µs", "det. / plain")
    there = ("distinct, publ.", "Vermv, publ.", "Vc, publ.", "det. / plain, publ.")
    facts = (
        f"torch {result['torch']}, {result['device']}, {result['threads']} threads; "
        f"{result['runs']} runs (fewer if the time limit was reached), each compared with one "
        "deterministic output. *publ.*: the paper's raw data, from a GPU."
    )
    return f"# The paper's op table\n\n{facts}\n\n" + markdown_table(
        ("op", "shape", *here, *there), lines
    )


def main() -> None:
    """Measure every row, and write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="limit of one condition of one row"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    result = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": arguments.device,
        "threads": torch.get_num_threads(),
        "runs": arguments.runs,
    }
    path = arguments.output / f"paper-ops-{arguments.device.replace(':', '')}.json"
    rows = read_rows(path, result)
    done = {(row["op"], row["shape"]) for row in rows}
    for row in list_rows():
        if (row.op, row.shape) in done:
            continue
        rows.append(measure(row, arguments.device, arguments.runs, arguments.seconds))
        write(path, json.dumps({**result, "rows": rows}, indent=1) + "\n")
    page = render({**result, "rows": rows})
    write(path.with_suffix(".md"), page + "\n")
    print(page)


def read_rows(path: Path, about: dict) -> list[dict]:
    """Return the rows of a call that was interrupted, if they were measured alike."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    rows = found.pop("rows")
    return rows if found == about else []


def write(path: Path, text: str) -> None:
    """Replace a file at once, so that an interruption leaves the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":
    main()
