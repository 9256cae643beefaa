"""Measures the patches: ``python benchmarks/patches.py --output FOLDER`` on a CUDA machine.

For each op and shape: the time of the original (nondeterministic), of torch's deterministic version
where there is one, and of ours; medians over CUDA events; and how many distinct outputs each gave
while another stream competed. Then the step time of whole models. Writes JSON and Markdown.

With ``--device cpu --calls 2 --rounds 1`` it only shows that it runs.
"""

import argparse
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import torch
from patch_models import MODELS
from patch_workloads import WORKLOADS, Call, Workload

from lightning_d9m.errors import D9mError
from lightning_d9m.evidence.digest import digest_many
from lightning_d9m.patches.catalogue import find_op
from lightning_d9m.patches.registration import patches_applied

GOAL_MEAN, GOAL_WORST, GOAL_MODEL = 1.2, 3.0, 1.05


@contextmanager
def deterministic(*, fill: bool) -> Iterator[None]:
    """Turn torch's flag on, with or without the fill of uninitialised memory."""
    settings = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True)
    settings.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(mode=False)


def measure(call: Callable[[], object], device: str, rounds: int) -> float:
    """Return the median time of a call in microseconds, after three calls that are not timed."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        if device == "cpu":
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def count_outputs(call: Call, device: str, calls: int) -> int:
    """Return how many distinct outputs a call gives while another stream competes."""
    side = torch.cuda.Stream() if device == "cuda" else None
    noise = torch.randn(1024, 1024, device=device) if side else None
    seen = set()
    for turn in range(calls):
        if side and noise is not None:
            with torch.cuda.stream(side):
                for _ in range(turn % 4):
                    noise @ noise
        outputs = call()
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        seen.add(tuple(digest_many([tensor.detach() for tensor in tensors])))
    return len(seen)


def run_workload(workload: Workload, device: str, rounds: int, calls: int) -> dict[str, object]:
    """Measure the versions of one op on one shape."""
    record: dict[str, object] = {"op": workload.op, "shape": workload.shape}
    call = workload.make(device)
    record["original_us"] = measure(call, device, rounds)
    record["original_outputs"] = count_outputs(call, device, calls)
    include = [workload.op] if find_op(workload.op).status == "offered" else []
    with patches_applied(device.upper(), include=include), deterministic(fill=False):
        record["ours_us"] = measure(call, device, rounds)
        record["ours_outputs"] = count_outputs(call, device, calls)
    record["ratio"] = record["ours_us"] / record["original_us"]
    if workload.make_deterministic:
        with deterministic(fill=False):
            call = workload.make_deterministic(device)
            record["torch_deterministic_us"] = measure(call, device, rounds)
            record["torch_deterministic_outputs"] = count_outputs(call, device, calls)
    return record


def run_model(name: str, device: str, rounds: int) -> dict[str, object]:
    """Measure the training step of one model."""
    scale = 8 if device == "cuda" else 1
    record: dict[str, object] = {"model": name}
    record["plain_us"] = measure(MODELS[name](device, scale), device, rounds)
    for label, fill in (("fill_off", False), ("fill_on", True)):
        with patches_applied(device.upper()), deterministic(fill=fill):
            record[f"{label}_us"] = measure(MODELS[name](device, scale), device, rounds)
        record[f"{label}_ratio"] = record[f"{label}_us"] / record["plain_us"]
    return record


def render(result: dict[str, object]) -> str:
    """Return the result as Markdown."""
    heading = "op | shape | original | outputs | torch's deterministic | outputs | ours | outputs"
    lines = [
        f"""# Patches on {result["device"]}

torch {result["torch"]}, {result["date"]}. Times in microseconds, medians of
{result["rounds"]} calls; distinct outputs of {result["calls"]} calls beside a competing stream.
The fill of uninitialised memory is off, except where it says on.

Ours over the original: geometric mean {result["geometric_mean"]:.2f} (goal {GOAL_MEAN}), worst
{result["worst"]:.2f} (goal {GOAL_WORST}).

| {heading} | ratio |
| - | - | -: | -: | -: | -: | -: | -: | -: |"""
    ]
    for row in result["ops"]:
        if "error" in row:
            lines.append(f"| {row['op']} | {row['shape']} | failed: {row['error']} |")
            continue
        torchs = row.get("torch_deterministic_us")
        lines.append(
            f"| {row['op']} | {row['shape']} | {row['original_us']:.0f} | "
            f"{row['original_outputs']} | {f'{torchs:.0f}' if torchs else ''} | "
            f"{row.get('torch_deterministic_outputs', '')} | "
            f"{row['ours_us']:.0f} | {row['ours_outputs']} | {row['ratio']:.2f} |"
        )
    lines += [
        "",
        f"Steps of whole models, deterministic over plain (goal {GOAL_MODEL} with the fill off):",
        "",
        "| model | plain | fill off | ratio | fill on | ratio |",
        "| - | -: | -: | -: | -: | -: |",
    ]
    lines += [
        f"| {row['model']} | failed: {row['error']} |"
        if "error" in row
        else f"| {row['model']} | {row['plain_us']:.0f} | {row['fill_off_us']:.0f} | "
        f"{row['fill_off_ratio']:.2f} | {row['fill_on_us']:.0f} | {row['fill_on_ratio']:.2f} |"
        for row in result["models"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=50, help="calls that are timed")
    parser.add_argument("--calls", type=int, default=200, help="calls whose outputs are compared")
    parser.add_argument("--only", default="", help="ops whose name contains this")
    parser.add_argument("--seconds", type=float, default=540, help="start no more work after this")
    words = parser.parse_args()
    begin = time.monotonic()
    ops, models = [], []
    for workload in (one for one in WORKLOADS if words.only in one.op):
        if time.monotonic() - begin > words.seconds * 0.8:
            ops.append({"op": workload.op, "shape": workload.shape, "error": "out of time"})
            continue
        try:
            ops.append(run_workload(workload, words.device, words.rounds, words.calls))
        except (RuntimeError, D9mError) as error:
            first = str(error).splitlines()[0]
            ops.append({"op": workload.op, "shape": workload.shape, "error": first})
        print(json.dumps(ops[-1]), flush=True)
    for name in MODELS if not words.only else ():
        if time.monotonic() - begin > words.seconds:
            break
        try:
            models.append(run_model(name, words.device, words.rounds))
        except (RuntimeError, D9mError) as error:
            models.append({"model": name, "error": str(error).splitlines()[0]})
        print(json.dumps(models[-1]), flush=True)
    ratios = [row["ratio"] for row in ops if "ratio" in row]
    device = (
        torch.cuda.get_device_name() if words.device == "cuda" else platform.processor() or "cpu"
    )
    result = {
        "device": device,
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "rounds": words.rounds,
        "calls": words.calls,
        "seconds": time.monotonic() - begin,
        "geometric_mean": statistics.geometric_mean(ratios) if ratios else float("nan"),
        "worst": max(ratios, default=float("nan")),
        "ops": ops,
        "models": models,
    }
    words.output.mkdir(parents=True, exist_ok=True)
    stem = words.output / f"patches-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(render(result), encoding="utf-8")
    print(render(result))


if __name__ == "__main__":
    main()
