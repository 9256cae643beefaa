"""Measure the rows of one part that the journal in ``SUITE_ROWS`` does not have.

``gpu_suite.py`` starts it with the arguments part, device, rounds, calls, only.
"""

import os
import platform
import resource
import sys
import warnings
from datetime import datetime, timezone
from pathlib import Path

import torch
from patch_workloads import WORKLOADS
from suite_device import LARGE, SCANS, run_scan, run_size, run_steps
from suite_journal import Journal, Row, run_tasks
from suite_measures import Settings, default_dtype, list_outputs
from suite_rows import (
    COMPILED,
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
    "graphs": (run_graph, lambda own: [*list_ops(own), COMPILED]),
}
APART = ("sizes",)  # each task in its own process
STRICT = ("smoke", "portable")  # a warning, as of torch ops for kernels, is a failure


def answer(part: str, task: str, settings: Settings) -> Row:
    """Return the result of a task, or its error."""
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


def greet(journal: Journal, settings: Settings) -> None:
    """Say once what measures, and how."""
    if journal.of_part("suite"):
        return
    cuda = settings.device == "cuda"
    row = {"part": "suite", "task": "-", "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
    row |= {"rounds": settings.rounds, "calls": settings.calls, "dry": not cuda}
    named = torch.cuda.get_device_name() if cuda else platform.processor() or "cpu"
    journal.append({**row, "device": named, "torch": torch.__version__})


def main() -> None:
    part, *given = sys.argv[1:]
    settings = Settings(*given)
    journal = Journal(Path(os.environ["SUITE_ROWS"]))
    greet(journal, settings)
    tasks = PARTS[part][1](settings)
    run_tasks(journal, part, tasks, lambda task: answer(part, task, settings), apart=part in APART)


if __name__ == "__main__":
    main()
