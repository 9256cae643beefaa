"""Checks of this process and machine for causes of nondeterminism, each with its fix."""

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from lightning_d9m.compatibility import OLDEST_TORCH, describe_missing_patches
from lightning_d9m.engine.control.environment import (
    DYNAMIC,
    VARIABLES,
    Variable,
    read_threads,
    threads_vary,
)
from lightning_d9m.engine.control.settings import (
    SWITCH,
    build_from_variables,
    describe_hash_seed_problem,
    read_settings,
)
from lightning_d9m.errors import SettingError
from lightning_d9m.hooks import describe_tested, find_missing, list_hooks
from lightning_d9m.version import parse_release

_GLOO = "GLOO_SOCKET_IFNAME"
Status = Literal["problem", "note", "ok"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: The setting, variable or package.
        status: ``"problem"`` makes runs differ, ``"note"`` may do so, ``"ok"`` does not.
        found: The state on this machine.
        reason: The mechanism; empty if the status is ``"ok"``.
        fix: The remedy; empty if there is nothing to do.
    """

    name: str
    status: Status
    found: str
    reason: str = ""
    fix: str = ""


def find_problems() -> list[CheckResult]:
    """Check the interpreter, torch, variables and threads.

    The checks change nothing and do not initialize any device.
    """
    unset = "the callback sets it"
    return [
        _check_torch(),
        _check_hooks(),
        _check_hash_seed(),
        *(check_variable(each, unset=unset) for each in VARIABLES),
        *_check_host_name(),
        *_check_threads(),
    ]


def check_settings(*owners: Callable[..., object]) -> CheckResult:
    """Check that our variables exist, and that these classes accept the values."""
    problem = ""
    try:
        for owner in owners:
            build_from_variables(owner, read_settings(owner, os.environ))
    except SettingError as error:
        problem = str(error)
    given = sorted(name for name in os.environ if name.startswith(SWITCH))
    return judge(
        problem,
        f"{SWITCH}_*",
        "problem",
        problem or ", ".join(given) or "not set",
        "A run that reads it ends with this error.",
        "Correct or unset the variable.",
    )


def judge(
    wrong: object, name: str, status: Status, found: str, reason: str = "", fix: str = ""
) -> CheckResult:
    """Return a result if what it says is wrong, else that its name is in order."""
    return (
        CheckResult(name, status, found, reason, fix) if wrong else CheckResult(name, "ok", found)
    )


def check_variable(variable: Variable, *, unset: str) -> CheckResult:
    """Check a variable that need not be set; ``unset`` is the behavior without it."""
    found = os.environ.get(variable.name)
    shown = f"not set; {unset}" if found is None else found or "empty"
    fix = f"Unset it, or set {variable.name}={variable.wanted}."
    wrong = found and not variable.allows(found)
    return judge(wrong, variable.name, "problem", shown, variable.effect, fix)


def _check_torch() -> CheckResult:
    found = str(torch.__version__)
    status: Status = "note"
    reason, fix = describe_missing_patches() or "", ""
    if parse_release(found) < OLDEST_TORCH:
        status = "problem"
        reason = "lightning_d9m has not run with older releases."
        fix = f"pip install 'torch>={'.'.join(map(str, OLDEST_TORCH))}'"
    elif torch.version.hip is not None and not reason:
        found = f"{found} for ROCm"
        reason = (
            "Memory-efficient attention by Composable Kernel adds in varying order on AMD devices, "
            "even with torch's flag on."
        )
        fix = "torch.backends.cuda.enable_mem_efficient_sdp(False)"
    return judge(reason, "torch", status, found, reason, fix)


def _check_hooks() -> CheckResult:
    """Check the private names of all libraries that are installed."""
    # Of all libraries that are installed, unlike a session, which checks those that are loaded.
    rows = [hook for hook in list_hooks() if find_spec(hook.library) is not None]
    missing = [str(hook) for hook in find_missing(rows)]
    return judge(
        missing,
        "private names",
        "problem",
        f"{', '.join(missing)}: not found" if missing else f"all {len(rows)} found",
        "lightning_d9m replaces or reads them, and a library has renamed them.",
        f"Install releases that were tested: {describe_tested()}.",
    )


def _check_hash_seed() -> CheckResult:
    random_hashes = describe_hash_seed_problem() is not None
    return judge(
        random_hashes,
        "PYTHONHASHSEED",
        "note",
        "not fixed" if random_hashes else "fixed",
        "Sets of strings have a different order in each run; Python reads it when it starts.",
        "Start programs with PYTHONHASHSEED=0 (`d9m repeat` and `d9m locate` do).",
    )


def _check_host_name() -> Iterator[CheckResult]:
    """Check the address that Gloo gives to other hosts, if a launcher names one of them."""
    # Many distributions map the name of a host to 127.0.1.1, and Gloo gives other ranks the address
    # that the name resolves to.
    first, interface = os.environ.get("MASTER_ADDR", ""), os.environ.get(_GLOO)
    if first in ("", "localhost") or first.startswith("127."):
        return
    try:
        address = "" if interface else socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "no address"
    yield judge(
        not interface and (not address[:1].isdigit() or address.startswith("127.")),
        _GLOO,
        "problem",
        interface or f"not set; this host's name resolves to {address}",
        f"The name of this host is {socket.gethostname()}, and at this address the ranks on "
        "other hosts cannot connect to this one: they wait until a timeout.",
        f"Set it to the interface that `ip route get {first}` names.",
    )


def _check_threads() -> Iterator[CheckResult]:
    cores = os.cpu_count() or 1
    # As OpenMP counts them: it ignores a container's CPU quota.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    fixed = read_threads() is not None
    chosen = "fixed by OMP_NUM_THREADS" if fixed else "chosen by torch"
    yield judge(
        not fixed,
        "CPU threads",
        "note",
        f"{torch.get_num_threads()} on {usable} of {cores} cores, {chosen}",
        "CPU results depend on the number of threads, and torch chooses it by the number of "
        "usable cores" + (", which this container or job limits." if usable < cores else "."),
        "To get equal results on several machines, set OMP_NUM_THREADS or "
        "DeterminismCallback(threads=...).",
    )
    yield judge(
        threads_vary(),
        DYNAMIC,
        "problem",
        os.environ.get(DYNAMIC) or "not set",
        "OpenMP chooses the number of threads for every operation by the load of the machine.",
        f"Unset it, or set {DYNAMIC}=false.",
    )
