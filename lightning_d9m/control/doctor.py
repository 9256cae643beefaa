"""What in this process and on this machine would make a run nondeterministic, and each fix."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_d9m.control import environment
from lightning_d9m.control.seeding import describe_hash_seed_problem
from lightning_d9m.control.settings import HIGHEST_SEED
from lightning_d9m.control.threads import DYNAMIC, threads_vary
from lightning_d9m.control.torch_flags import capture_flags

OLDEST_TORCH = (2, 11)
Status = Literal["problem", "note", "ok"]

# What a session lets each be, its own choice first, and what another value does.
_VARIABLES = {
    environment.CUBLAS: (
        environment.CUBLAS_ALLOWED,
        "cuBLAS shares workspaces between streams with it, so products differ.",
    ),
    environment.INDUCTOR: (("1", ""), "The compiler chooses kernels by timing them otherwise."),
    environment.FLASH_ATTENTION: (
        ("1", ""),
        "The backward kernel of flash-attn adds with atomics.",
    ),
    environment.TRANSFORMER_ENGINE: (
        ("0", ""),
        "It lets Transformer Engine choose nondeterministic kernels.",
    ),
}


@dataclass(frozen=True)
class CheckResult:
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


def find_problems() -> list[CheckResult]:
    """Look at the interpreter, torch, the variables and the threads; problems come first.

    Nothing is changed, and no device is initialised.
    """
    return sort_findings(_look())


def sort_findings(findings: Iterable[CheckResult]) -> list[CheckResult]:
    """Return problems first, then notes, each in the order that they came in."""
    order = {"problem": 0, "note": 1, "ok": 2}
    return sorted(findings, key=lambda finding: order[finding.status])


def judge_variable(name: str, allowed: Sequence[str], reason: str, *, unset: str) -> CheckResult:
    """Judge a variable that need not be set.

    Args:
        name: The variable.
        allowed: The values that it may have, the best first.
        reason: What another value does.
        unset: What happens where it is not set.
    """
    found = os.environ.get(name)
    if found is None:
        return CheckResult(name, "ok", f"not set; {unset}")
    if found in allowed:
        return CheckResult(name, "ok", found or "empty")
    return CheckResult(name, "problem", found, reason, f"Unset it, or set {name}={allowed[0]}.")


def _look() -> Iterator[CheckResult]:
    yield _look_at_torch_version()
    yield _look_at_hash_seed()
    yield _look_at_seed()
    for name, (allowed, reason) in _VARIABLES.items():
        yield judge_variable(name, allowed, reason, unset="the callback sets it")
    yield _look_at_nccl()
    yield from _look_at_flags()
    yield _look_at_precision()
    yield _look_at_threads()
    yield _look_at_dynamic_threads()


def _look_at_torch_version() -> CheckResult:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        return CheckResult(
            "torch",
            "problem",
            torch.__version__,
            "Older versions leave more operations nondeterministic than lightning_d9m knows of.",
            f"pip install 'torch>={'.'.join(map(str, OLDEST_TORCH))}'",
        )
    if torch.version.hip is not None:
        return CheckResult(
            "torch",
            "note",
            f"{torch.__version__} for ROCm",
            "Memory-efficient attention by Composable Kernel adds in any order on AMD's devices, "
            "whatever torch's flag says.",
            "torch.backends.cuda.enable_mem_efficient_sdp(False)",
        )
    return CheckResult("torch", "ok", torch.__version__)


def _look_at_hash_seed() -> CheckResult:
    if describe_hash_seed_problem() is None:
        return CheckResult("PYTHONHASHSEED", "ok", "fixed")
    return CheckResult(
        "PYTHONHASHSEED",
        "problem",
        "not fixed",
        "Sets of strings have another order in each run; Python reads it when it starts.",
        "Start programs with PYTHONHASHSEED=0 (`d9m repeat` does).",
    )


def _look_at_seed() -> CheckResult:
    text = os.environ.get("PL_GLOBAL_SEED")
    if not text:
        return CheckResult("PL_GLOBAL_SEED", "ok", "not set; seed_everything sets it")
    if text.isdecimal() and int(text) <= HIGHEST_SEED:
        return CheckResult("PL_GLOBAL_SEED", "ok", text)
    return CheckResult(
        "PL_GLOBAL_SEED",
        "problem",
        text,
        "It is no seed: the callback, which takes its own from it, refuses it, and seed_everything "
        "takes another.",
        f"Unset it, or set it to a whole number from 0 to {HIGHEST_SEED}.",
    )


def _look_at_nccl() -> CheckResult:
    found = os.environ.get(environment.NCCL)
    if found is None or not environment.allows_nvls(found):
        return CheckResult(environment.NCCL, "ok", found or "not set; the callback sets it")
    return CheckResult(
        environment.NCCL,
        "problem",
        found,
        "NVLS reduces inside the switch, in an order that differs between calls.",
        f"Unset it, or set {environment.NCCL}={environment.NCCL_DEFAULT}.",
    )


def _look_at_flags() -> Iterator[CheckResult]:
    flags = capture_flags()
    on = flags["torch.deterministic_algorithms"]
    found = "on" if on else "off, as torch starts; the callback switches them on"
    yield CheckResult("deterministic algorithms", "ok", found)
    if flags["cudnn.benchmark"]:
        yield CheckResult(
            "cuDNN benchmark",
            "problem",
            "on as Python starts",
            "The benchmark picks kernels by timing them.",
            "Remove torch.backends.cudnn.benchmark = True from sitecustomize.py or usercustomize.py"
            " (and Trainer(benchmark=True) from programs).",
        )
    else:
        yield CheckResult("cuDNN benchmark", "ok", "off")


def _look_at_precision() -> CheckResult:
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    allowed = {
        "TF32 in matrix products": _uses_tf32(cuda),
        "TF32 in convolutions": _uses_tf32(getattr(cudnn, "conv", None)),
        "TF32 in recurrent networks": _uses_tf32(getattr(cudnn, "rnn", None)),
        "reduced sums of float16": bool(cuda.allow_fp16_reduced_precision_reduction),
        "reduced sums of bfloat16": bool(cuda.allow_bf16_reduced_precision_reduction),
    }
    names = [name for name, is_allowed in allowed.items() if is_allowed]
    if not names:
        return CheckResult("precision", "ok", "full")
    return CheckResult(
        "precision",
        "note",
        f"{', '.join(names)} on CUDA devices",
        "They are deterministic, and give other bits than full precision does; they are left as "
        "they are, and recorded.",
    )


def _uses_tf32(backend: Any) -> bool:
    # Not `allow_tf32`: that raises once a program has used the newer name.
    return getattr(backend, "fp32_precision", None) == "tf32"


def _look_at_threads() -> CheckResult:
    cores, usable = os.cpu_count() or 1, _count_usable_cores()
    found = f"{torch.get_num_threads()} on {usable} of {cores} cores"
    # One number for each level of nesting; torch takes the first, and ignores what is no number.
    if os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip().isdigit():
        return CheckResult("CPU threads", "ok", f"{found}, fixed by OMP_NUM_THREADS")
    return CheckResult(
        "CPU threads",
        "note",
        f"{found}, chosen by torch",
        "CPU results differ between numbers of threads, and torch chooses by the cores that it may "
        "use here" + (", of which this container or job has a part." if usable < cores else "."),
        "To get the same bits on several machines, set OMP_NUM_THREADS or "
        "DeterminismCallback(threads=...).",
    )


def _count_usable_cores() -> int:
    """Return what OpenMP counts. It does not look at a container's quota of time."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _look_at_dynamic_threads() -> CheckResult:
    found = os.environ.get(DYNAMIC)
    if not threads_vary():
        return CheckResult(DYNAMIC, "ok", found or "not set")
    return CheckResult(
        DYNAMIC,
        "problem",
        str(found),
        "OpenMP chooses the number of threads by the load of the machine, at every operation.",
        f"Unset it, or set {DYNAMIC}=false.",
    )
