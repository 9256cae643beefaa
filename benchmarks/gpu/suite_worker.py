"""Measure one row of ``gpu_suite.py`` for each line of standard input, and answer in JSON.

``gpu_suite.py`` starts it with the arguments device, rounds, calls, only.
"""

import json
import os
import platform
import resource
import sys
import warnings

import suite_graphs
import torch
from patch_workloads import WORKLOADS
from suite_client import Row
from suite_device import LARGE, SCANS, run_scan, run_size, run_steps
from suite_measures import Settings, default_dtype, list_outputs
from suite_rows import (
    SIZES,
    find_workload,
    run_determinism,
    run_digest,
    run_facts,
    run_graph,
    run_portable,
    run_smoke,
    run_speed,
)

from lightning_d9m.ops.patches.triton.launch import _withdrawn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def list_ops(settings: Settings) -> list[str]:
    """Return the names of the chosen workloads."""
    return [f"{one.op}, {one.shape}" for one in WORKLOADS if settings.only in one.op]


def list_versions(settings: Settings) -> list[str]:
    """Return the chosen workloads in each dtype."""
    return [f"{name} | {dtype}" for dtype in DTYPES for name in list_ops(settings)]


def list_models(settings: Settings) -> list[str]:
    """Return the models whose steps are measured."""
    return ["ResNet50", "Transformer"] if settings.device == "cuda" else ["Digits"]


# The function that measures a task of each part, and the one that lists the tasks in their order.
PARTS = {
    "machine": (run_facts, lambda _: ["stack", "nvidia-smi"]),
    "sizes": (run_size, lambda _: [*LARGE]),
    "portable": (run_portable, lambda _: ["Digits", "Transformer"]),
    "scans": (run_scan, lambda _: [*SCANS]),
    "steps": (run_steps, list_models),
    "facts": (run_facts, lambda _: ["copy", "matmul"]),
    "smoke": (run_smoke, lambda own: ["patches", "forward", *list_ops(own)]),
    "determinism": (run_determinism, list_versions),
    "speed": (run_speed, list_versions),
    "digest": (run_digest, lambda own: [*SIZES[own.device], "1,000 tensors"]),
    "graphs": (run_graph, lambda own: [*list_ops(own), suite_graphs.COMPILED]),
}
STRICT = ("smoke", "portable")  # a warning, as of torch ops for kernels, is a failure


def answer(line: str, settings: Settings) -> Row:
    """Return the result of a task, or its error."""
    part, _, task = line.partition(" ")
    if part == "list":
        return {"tasks": PARTS[task][1](settings)}
    name, _, dtype = task.partition(" | ")
    cuda = settings.device == "cuda"
    try:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        with (
            warnings.catch_warnings(record=True) as caught,
            default_dtype(DTYPES[dtype or "float32"]),
        ):
            warnings.simplefilter("always")
            unsupported = find_refusal(part, name, dtype, settings)
            row = unsupported or PARTS[part][0](name, settings)
        row |= {"device_mb": torch.cuda.max_memory_allocated() / 2**20} if cuda else {}
    except Exception as error:  # noqa: BLE001 - any error is the row's result
        row = {"error": summarize(error), "fatal": not still_works(settings.device)}
        caught = []
    said = sorted({str(one.message).splitlines()[0] for one in caught})
    if said and part in STRICT:
        row.setdefault("error", f"warning: {said[0]}")
    verdict = "failed" if "error" in row else "unsupported" if "unsupported" in row else "ok"
    return {
        "verdict": verdict,
        **row,
        "host_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        **({"warnings": said} if said else {}),
        **({"withdrawn": sorted(_withdrawn)} if _withdrawn else {}),  # kernels, so far
    }


def find_refusal(part: str, name: str, dtype: str, settings: Settings) -> Row | None:
    """Return the row of an op that torch's own kernel does not compute in a dtype."""
    if part not in {"determinism", "speed"} or dtype == "float32":
        return None
    try:
        list_outputs(find_workload(name).make(settings.device)())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if not still_works(settings.device):
            raise
        return {"unsupported": summarize(error)}
    return None


def summarize(error: Exception) -> str:
    """Return class and first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def still_works(device: str) -> bool:
    """Return whether the device still works: after some errors it does not in this process."""
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError:
        return False
    return True


def main() -> None:
    settings = Settings(*sys.argv[1:])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries is not an answer
    cuda = settings.device == "cuda"
    named = torch.cuda.get_device_name() if cuda else platform.processor() or "cpu"
    print(json.dumps({"device": named, "torch": torch.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line.strip(), settings)), file=answers, flush=True)


if __name__ == "__main__":
    main()
