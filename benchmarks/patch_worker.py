"""Measure one row of ``patches.py`` for each line of standard input, and answer in JSON.

``patches.py`` starts it with the arguments device, rounds, calls, only.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from patch_models import MODELS
from patch_workloads import WORKLOADS, Call, Workload
from torch import Tensor

from lightning_d9m.hashing.digest import digest_many
from lightning_d9m.patches.catalog.catalog import OPS, find_op
from lightning_d9m.patches.registration import patches_applied

OFFERED = [op.name for op in OPS if op.status == "offered"]
AHEAD_CYCLES = 2_000_000  # about a millisecond, in which the host enqueues work ahead of the device


@contextmanager
def deterministic(*, fill: bool) -> Iterator[None]:
    """Turn torch's flag on, with or without the fill of uninitialized memory."""
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
    """Return the median time of a call in microseconds, after three calls that are not timed.

    On CUDA the device is kept busy first, so it does not wait for the host to launch kernels; in a
    training step it does not wait either.
    """
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
        torch.cuda._sleep(AHEAD_CYCLES)  # noqa: SLF001 - nothing public keeps a device busy
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def list_outputs(call: Call) -> list[Tensor]:
    """Return the outputs of a call, detached."""
    outputs = call()
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return [tensor.detach() for tensor in tensors]


def count_outputs(call: Call, device: str, calls: int) -> int:
    """Return the number of distinct outputs of a call while a second stream competes."""
    side = torch.cuda.Stream() if device == "cuda" else None
    noise = torch.randn(1024, 1024, device=device) if side else None
    seen = set()
    for turn in range(calls):
        if side and noise is not None:
            with torch.cuda.stream(side):
                for _ in range(turn % 4):
                    noise @ noise
        seen.add(tuple(digest_many(list_outputs(call))))
    return len(seen)


def differ(patched: Sequence[Tensor], original: Sequence[Tensor]) -> float:
    """Return the greatest difference of floating-point outputs, over the greatest magnitude."""
    worst = 0.0
    for left, right in zip(patched, original, strict=True):
        if right.is_floating_point() and right.numel():
            scale = right.double().abs().max().clamp(min=torch.finfo(torch.float64).tiny)
            worst = max(worst, float((left.double() - right.double()).abs().max() / scale))
    return worst


def run_workload(workload: Workload, device: str, rounds: int, calls: int) -> dict[str, object]:
    """Measure the versions of one op on one shape.

    The patched call builds its graph under the session's settings, as a training does.
    """
    offered = find_op(workload.op).status == "offered"
    record: dict[str, object] = {"offered": offered}
    call = workload.make(device)
    record["original_us"] = measure(call, device, rounds)
    record["original_outputs"] = count_outputs(call, device, calls)
    original = list_outputs(call)
    include = [workload.op] if offered else []
    with patches_applied(device.upper(), include=include), deterministic(fill=False):
        call = workload.make(device)
        record["patched_us"] = measure(call, device, rounds)
        record["patched_outputs"] = count_outputs(call, device, calls)
        record["difference"] = differ(list_outputs(call), original)
    record["ratio"] = record["patched_us"] / record["original_us"]
    if workload.make_deterministic:
        with deterministic(fill=False):
            call = workload.make_deterministic(device)
            record["torch_deterministic_us"] = measure(call, device, rounds)
            record["torch_deterministic_outputs"] = count_outputs(call, device, calls)
    return record


def run_model(name: str, device: str, rounds: int) -> dict[str, object]:
    """Measure the training step of one model."""
    scale = 8 if device == "cuda" else 1
    record: dict[str, object] = {"plain_us": measure(MODELS[name](device, scale), device, rounds)}
    conditions = {"fill_off": (False, []), "fill_on": (True, []), "offered": (False, OFFERED)}
    for label, (fill, include) in conditions.items():
        with patches_applied(device.upper(), include=include), deterministic(fill=fill):
            record[f"{label}_us"] = measure(MODELS[name](device, scale), device, rounds)
        record[f"{label}_ratio"] = record[f"{label}_us"] / record["plain_us"]
    return record


def answer(task: str, device: str, rounds: int, calls: int, only: str) -> dict[str, object]:
    """Return the result of a task, or its error."""
    try:
        if task == "list":
            return {
                "ops": [
                    {"task": f"op {place}", "op": one.op, "shape": one.shape}
                    for place, one in enumerate(WORKLOADS)
                    if only in one.op
                ],
                "models": [{"task": f"model {name}", "model": name} for name in MODELS if not only],
            }
        kind, _, name = task.partition(" ")
        if kind == "op":
            return run_workload(WORKLOADS[int(name)], device, rounds, calls)
        return run_model(name, device, rounds)
    except Exception as error:  # noqa: BLE001 - any error is the row's result
        first = (str(error).splitlines() or [""])[0]
        return {"error": f"{type(error).__name__}: {first}", "fatal": not still_works(device)}


def still_works(device: str) -> bool:
    """Return whether the device still works: after some errors it does not in this process."""
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError:
        return False
    return True


def main() -> None:
    device, rounds, calls, only = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries is not an answer
    named = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"
    print(json.dumps({"device": named, "torch": torch.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        result = answer(line.strip(), device, int(rounds), int(calls), only)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
