"""What on this machine would make a run nondeterministic, and the fix for each."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any, Literal

import torch

from lightning_d9m.control import variables
from lightning_d9m.control.algorithms import capture_flags
from lightning_d9m.control.seeding import describe_hash_seed_problem

OLDEST_TORCH = (2, 11)
Status = Literal["problem", "note", "ok"]

# Each with the mechanism; what the Horovod strategy sets for itself.
_HOROVOD = {
    "HOROVOD_FUSION_THRESHOLD": (
        "0",
        "Tensor fusion packs whichever gradients are ready, so sums change their order.",
    ),
    "HOROVOD_AUTOTUNE": ("0", "Autotuning changes the fusion by timing it."),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": ("0", "It sums within each host first, in another order."),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What was looked at.
        status: ``"problem"`` makes runs differ, ``"note"`` may, ``"ok"`` does not.
        found: What is so on this machine.
        reason: The mechanism; empty where nothing is wrong.
        fix: What to do; empty where nothing is to be done.
    """

    name: str
    status: Status
    found: str
    reason: str = ""
    fix: str = ""


def find_problems() -> list[Finding]:
    """Look at interpreter, variables, torch, threads and Horovod; problems come first."""
    order = {"problem": 0, "note": 1, "ok": 2}
    return sorted(_look(), key=lambda finding: order[finding.status])


def _look() -> Iterator[Finding]:
    yield _look_at_torch_version()
    yield _look_at_lightning()
    yield _look_at_hash_seed()
    yield _look_at_cublas()
    yield _look_at_nccl()
    yield from _look_at_flags()
    yield _look_at_threads()
    yield from _look_at_horovod()


def _look_at_torch_version() -> Finding:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release >= OLDEST_TORCH:
        return Finding("torch", "ok", torch.__version__)
    oldest = ".".join(map(str, OLDEST_TORCH))
    return Finding(
        "torch",
        "problem",
        torch.__version__,
        "Older versions leave more operations nondeterministic than lightning_d9m knows of.",
        f"pip install 'torch>={oldest}'",
    )


def _look_at_lightning() -> Finding:
    found = [f"{name} {version(name)}" for name in ("lightning", "pytorch-lightning") if _has(name)]
    if found:
        return Finding("Lightning", "ok", ", ".join(found))
    return Finding(
        "Lightning",
        "note",
        "not installed",
        "The callback needs it; `lightning_d9m.deterministic` does not.",
        "pip install lightning",
    )


def _look_at_hash_seed() -> Finding:
    if describe_hash_seed_problem() is None:
        return Finding("PYTHONHASHSEED", "ok", "fixed")
    return Finding(
        "PYTHONHASHSEED",
        "problem",
        "not fixed",
        "Sets of strings have another order in each run; Python reads it when it starts.",
        "Start programs with PYTHONHASHSEED=0 (`d9m repeat` does).",
    )


def _look_at_cublas() -> Finding:
    found = os.environ.get(variables.CUBLAS)
    if found is None or found in variables.CUBLAS_ALLOWED:
        return Finding(variables.CUBLAS, "ok", found or "not set; the callback sets it")
    return Finding(
        variables.CUBLAS,
        "problem",
        found,
        "cuBLAS shares workspaces between streams with it, so products differ.",
        f"Unset it, or set one of {', '.join(variables.CUBLAS_ALLOWED)}.",
    )


def _look_at_nccl() -> Finding:
    found = os.environ.get(variables.NCCL)
    if found is None or not variables.allows_nvls(found):
        return Finding(variables.NCCL, "ok", found or "not set; the callback sets it")
    return Finding(
        variables.NCCL,
        "problem",
        found,
        "NVLS reduces inside the switch, in an order that differs between calls.",
        f"Unset it, or set {variables.NCCL}={variables.NCCL_DEFAULT}.",
    )


def _look_at_flags() -> Iterator[Finding]:
    flags = capture_flags()
    if flags["torch.deterministic_algorithms"]:
        yield Finding("deterministic algorithms", "ok", "on")
    else:
        yield Finding(
            "deterministic algorithms",
            "ok",
            "off, as torch starts; the callback switches them on",
        )
    allowed = [name for name, backend in _TF32.items() if _allows_tf32(backend)]
    if allowed:
        yield Finding(
            "TF32",
            "note",
            f"allowed for {', '.join(allowed)}",
            "It is deterministic, but gives other bits than full float32; it is left as it is, "
            "and recorded.",
        )
    else:
        yield Finding("TF32", "ok", "not allowed")


_TF32 = {"matrix products": torch.backends.cuda.matmul, "cuDNN": torch.backends.cudnn}


def _allows_tf32(backend: Any) -> bool:
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # the newer setting was used, and the older one cannot be read any more
        return str(backend.fp32_precision) == "tf32"


def _look_at_threads() -> Finding:
    found = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    if os.environ.get("OMP_NUM_THREADS"):
        return Finding("CPU threads", "ok", f"{found}, fixed by OMP_NUM_THREADS")
    return Finding(
        "CPU threads",
        "note",
        f"{found}, chosen by torch",
        "CPU results differ between numbers of threads, and torch chooses by the cores it sees.",
        "For runs on several machines, set OMP_NUM_THREADS or DeterminismCallback(threads=...).",
    )


def _look_at_horovod() -> Iterator[Finding]:
    if not _has("horovod"):
        return
    files = distribution("horovod").files or []
    if not any(file.name.startswith("mpi_lib") for file in files):
        yield Finding(
            "Horovod",
            "problem",
            f"{version('horovod')}, without its extension for torch",
            "`pip install horovod` builds one without it, and says nothing.",
            "d9m install-horovod",
        )
    else:
        yield Finding("Horovod", "ok", version("horovod"))
    for name, (wanted, reason) in _HOROVOD.items():
        found = os.environ.get(name)
        if found is None or found == wanted:
            yield Finding(name, "ok", found or "not set; the strategy sets it")
        else:
            yield Finding(name, "problem", found, reason, f"Unset it, or set {name}={wanted}.")


def _has(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
