"""Checks of this process and machine for causes of nondeterminism, each with its fix."""

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_d9m.compatibility import (
    OLDEST_TORCH,
    describe_missing_patches,
    parse_release,
)
from lightning_d9m.control import environment
from lightning_d9m.control.hash_seed import describe_hash_seed_problem
from lightning_d9m.control.settings import HIGHEST_SEED
from lightning_d9m.control.torch_flags import DYNAMIC, capture_flags, threads_vary

_GLOO = "GLOO_SOCKET_IFNAME"
Status = Literal["problem", "note", "ok"]

# The values that a session accepts, its own choice first, and the effect of any other value.
_VARIABLES = {
    environment.CUBLAS: (
        environment.CUBLAS_ALLOWED,
        "With it cuBLAS shares workspaces between streams, so products differ.",
    ),
    environment.INDUCTOR: (("1", ""), "With it the compiler chooses kernels by timing them."),
    environment.FLASH_ATTENTION: (
        ("1", ""),
        "The backward kernel of flash-attn adds with atomics.",
    ),
    environment.TRANSFORMER_ENGINE: (
        ("0", ""),
        "With it Transformer Engine may choose nondeterministic kernels.",
    ),
}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: The setting, variable or package.
        status: ``"problem"`` makes runs differ, ``"note"`` may do so, ``"ok"`` does not.
        found: The state on this machine.
        reason: The mechanism; empty if the status is ``"ok"``.
        fix: The remedy; empty if there is nothing to do.
        shell: A shell command that applies the remedy; empty if no variable does.
    """

    name: str
    status: Status
    found: str
    reason: str = ""
    fix: str = ""
    shell: str = ""


def find_problems() -> list[CheckResult]:
    """Check the interpreter, torch, variables and threads; problems come first.

    The checks change nothing and do not initialize any device.
    """
    return sort_results(_run_checks())


def sort_results(results: Iterable[CheckResult]) -> list[CheckResult]:
    """Return problems first, then notes, then the rest, each in their given order."""
    order = {"problem": 0, "note": 1, "ok": 2}
    return sorted(results, key=lambda result: order[result.status])


def check_optional_variable(
    name: str, allowed: Sequence[str], reason: str, *, unset: str
) -> CheckResult:
    """Check a variable that need not be set.

    The best of the allowed values is the first. ``reason`` is the effect of any other, and
    ``unset`` the behavior without the variable.
    """
    found = os.environ.get(name)
    if found is None:
        return CheckResult(name, "ok", f"not set; {unset}")
    if found in allowed:
        return CheckResult(name, "ok", found or "empty")
    return CheckResult(
        name,
        "problem",
        found,
        reason,
        f"Unset it, or set {name}={allowed[0]}.",
        f"export {name}={allowed[0]}",
    )


def _run_checks() -> Iterator[CheckResult]:
    yield _check_torch_version()
    yield _check_hash_seed()
    yield _check_seed()
    for name, (allowed, reason) in _VARIABLES.items():
        yield check_optional_variable(name, allowed, reason, unset="the callback sets it")
    yield _check_nccl()
    yield from _check_host_name()
    yield from _check_flags()
    yield _check_precision()
    yield _check_threads()
    yield _check_dynamic_threads()


def _check_torch_version() -> CheckResult:
    release = parse_release(torch.__version__)
    if release < OLDEST_TORCH:
        return CheckResult(
            "torch",
            "problem",
            torch.__version__,
            "lightning_d9m has not run with older releases.",
            f"pip install 'torch>={'.'.join(map(str, OLDEST_TORCH))}'",
        )
    if problem := describe_missing_patches():
        return CheckResult("torch", "note", torch.__version__, problem)
    if torch.version.hip is not None:
        return CheckResult(
            "torch",
            "note",
            f"{torch.__version__} for ROCm",
            "Memory-efficient attention by Composable Kernel adds in varying order on AMD devices, "
            "even with torch's flag on.",
            "torch.backends.cuda.enable_mem_efficient_sdp(False)",
        )
    return CheckResult("torch", "ok", torch.__version__)


def _check_hash_seed() -> CheckResult:
    if describe_hash_seed_problem() is None:
        return CheckResult("PYTHONHASHSEED", "ok", "fixed")
    return CheckResult(
        "PYTHONHASHSEED",
        "note",
        "not fixed",
        "Sets of strings have a different order in each run; Python reads it when it starts.",
        "Start programs with PYTHONHASHSEED=0 (`d9m repeat` and `d9m locate` do).",
        "export PYTHONHASHSEED=0",
    )


def _check_seed() -> CheckResult:
    text = os.environ.get("PL_GLOBAL_SEED")
    if not text:
        return CheckResult("PL_GLOBAL_SEED", "ok", "not set; seed_everything sets it")
    if text.isdecimal() and int(text) <= HIGHEST_SEED:
        return CheckResult("PL_GLOBAL_SEED", "ok", text)
    return CheckResult(
        "PL_GLOBAL_SEED",
        "problem",
        text,
        "It is not a valid seed: the callback, which reads its seed from it, raises, and "
        "seed_everything chooses a different one.",
        f"Unset it, or set it to a whole number from 0 to {HIGHEST_SEED}.",
        "unset PL_GLOBAL_SEED",
    )


def _check_nccl() -> CheckResult:
    found = os.environ.get(environment.NCCL)
    if found is None or not environment.allows_nvls(found):
        return CheckResult(environment.NCCL, "ok", found or "not set; the callback sets it")
    return CheckResult(
        environment.NCCL,
        "problem",
        found,
        "NVLS reduces inside the network switch, in an order that differs between calls.",
        f"Unset it, or set {environment.NCCL}={environment.NCCL_DEFAULT}.",
        f"export {environment.NCCL}={environment.NCCL_DEFAULT}",
    )


def _check_host_name() -> Iterator[CheckResult]:
    """Check the address that Gloo gives to other hosts, if a launcher names one of them."""
    first = os.environ.get("MASTER_ADDR", "")
    if first in ("", "localhost") or first.startswith("127."):
        return
    if interface := os.environ.get(_GLOO):
        yield CheckResult(_GLOO, "ok", interface)
        return
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "no address"
    if address[0].isdigit() and not address.startswith("127."):
        yield CheckResult(_GLOO, "ok", f"not set; this host's name resolves to {address}")
        return
    yield CheckResult(
        _GLOO,
        "problem",
        "not set",
        f"The name of this host, {socket.gethostname()}, resolves to {address}, so the ranks on "
        "other hosts cannot connect to this one, and wait until a timeout.",
        f"Set it to the interface that `ip route get {first}` names.",
    )


def _check_flags() -> Iterator[CheckResult]:
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


def _check_precision() -> CheckResult:
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
        "They are deterministic, but round differently from full precision. The callback leaves "
        "them unchanged and records them.",
    )


def _uses_tf32(backend: Any) -> bool:
    # `allow_tf32` raises after a program has used the newer name.
    return getattr(backend, "fp32_precision", None) == "tf32"


def _check_threads() -> CheckResult:
    cores, usable = os.cpu_count() or 1, _count_usable_cores()
    found = f"{torch.get_num_threads()} on {usable} of {cores} cores"
    # One number per nesting level; torch takes the first and ignores anything but numbers.
    if os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip().isdigit():
        return CheckResult("CPU threads", "ok", f"{found}, fixed by OMP_NUM_THREADS")
    return CheckResult(
        "CPU threads",
        "note",
        f"{found}, chosen by torch",
        "CPU results depend on the number of threads, and torch chooses it by the number of usable "
        "cores" + (", which this container or job limits." if usable < cores else "."),
        "To get equal results on several machines, set OMP_NUM_THREADS or "
        "DeterminismCallback(threads=...).",
        f"export OMP_NUM_THREADS={torch.get_num_threads()}",
    )


def _count_usable_cores() -> int:
    """Return the number of cores that OpenMP counts. It ignores a container's CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_dynamic_threads() -> CheckResult:
    found = os.environ.get(DYNAMIC)
    if not threads_vary():
        return CheckResult(DYNAMIC, "ok", found or "not set")
    return CheckResult(
        DYNAMIC,
        "problem",
        str(found),
        "OpenMP chooses the number of threads for every operation by the load of the machine.",
        f"Unset it, or set {DYNAMIC}=false.",
        f"export {DYNAMIC}=false",
    )
