"""Environment variables that libraries read once, when they start.

They must be set before CUDA and NCCL start, which under Lightning is before ``Callback.setup``.
What a library has read stays in force after the variable is restored, so that is remembered.
"""

import os
import threading
import weakref
from dataclasses import dataclass

import torch

from lightning_d9m.errors import SettingError, TooLateError

# One fixed workspace per handle. With the default, cuBLAS may share and resize workspaces between
# streams, and splits a product by the workspace that it finds. torch's Context.cpp accepts these
# two values; with ":4096:2", which torch's documentation of RNN also names, it raises at the first
# matrix product on CUDA.
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_ALLOWED = (":4096:8", ":16:8")
# NVLS reduces inside the switch, in an order that differs between calls (nccl issue 1497).
NCCL = "NCCL_ALGO"
NCCL_DEFAULT = "^NVLS,NVLSTree"
# The compiler chooses kernels by timing them otherwise. Read when its configuration is imported;
# `algorithms` sets the configuration itself if that has happened.
INDUCTOR = "TORCHINDUCTOR_DETERMINISTIC"
# Attention of the flash-attn package adds with atomics in its backward kernel, and torch's flag
# does not reach it; transformers and others pass this on to it.
FLASH_ATTENTION = "FLASH_ATTENTION_DETERMINISTIC"
# Transformer Engine chooses nondeterministic attention kernels unless this is 0.
TRANSFORMER_ENGINE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
# Ours, set by `d9m audit model`: "off" seeds and records as always, and switches nothing, so that
# what determinism changes and costs can be measured with the program as it is.
CONTROL = "LIGHTNING_D9M_CONTROL"
_SWITCHES = {INDUCTOR: "1", FLASH_ATTENTION: "1", TRANSFORMER_ENGINE: "0"}


def control_is_on() -> bool:
    """Return whether a session is to switch anything.

    Raises:
        SettingError: When the variable has a value that is not allowed.
    """
    found = os.environ.get(CONTROL) or "on"
    if found not in ("on", "off"):
        raise SettingError(f"The variable {CONTROL} is {found!r}; allowed: 'on' or 'off'.")
    return found == "on"


def cuda_started() -> bool:
    """Return whether this process has initialised CUDA."""
    return bool(torch.cuda.is_initialized())


def nccl_started() -> bool:
    """Return whether torch.distributed runs on NCCL in this process."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    # Not `get_backend`: that of a group which was given no name is "undefined".
    return "nccl" in str(distributed.get_backend_config())


def allows_nvls(algorithms: str) -> bool:
    """Return whether a value of ``NCCL_ALGO`` lets NCCL choose NVLS.

    >>> [allows_nvls(text) for text in ("Ring", "Tree,NVLS", "^NVLS", "^Tree", "allreduce:ring")]
    [False, True, False, True, False]
    """
    for part in algorithms.upper().split(";"):
        names = part.rpartition(":")[2]
        excluded = names.startswith("^")
        named = "NVLS" in names.removeprefix("^").replace(" ", "").split(",")
        if named != excluded or ("NVLSTREE" in names and not excluded):
            return True
    return False


@dataclass
class _VariableState:
    """What this process's holders have set; one for the process, as the environment is."""

    holders: int = 0
    previous: dict[str, str | None] | None = None
    # Values under which a library started, for later sessions in this process.
    in_force: dict[str, str] | None = None


_state = _VariableState()
# Reentrant: a callback that is garbage-collected while the lock is held gives up its hold at once.
_lock = threading.RLock()


class EarlyVariables:
    """Holds the variables set; the first holder sets them and the last restores them.

    A holder that is forgotten (a callback that was built and never used) restores them too.
    """

    def __init__(self) -> None:
        self._hold: weakref.finalize[[], EarlyVariables] | None = None

    def __getstate__(self) -> dict[str, None]:
        # A process that is spawned inherits the variables, and restores nothing.
        return {"_hold": None}

    def set(self) -> None:
        """Set what is not set well already. A second call does nothing.

        Raises:
            SettingError: When the user's value of a variable allows nondeterminism.
            TooLateError: When a library has started under another value.
        """
        if self._hold is not None or not control_is_on():
            return
        with _lock:
            if _state.holders == 0:
                _set_variables()
            _state.holders += 1
        self._hold = weakref.finalize(self, _give_up)
        self._hold.atexit = False  # the environment ends with the process

    def restore(self) -> None:
        """Give up holding; the last holder restores what was there. A second call does nothing."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold()


def users_value(name: str) -> str | None:
    """Return the user's value of a variable, whether or not it is set to another one now."""
    return (os.environ if _state.previous is None else _state.previous).get(name)


def _give_up() -> None:
    with _lock:
        _state.holders -= 1
        if _state.holders == 0:
            _restore_variables()


def _set_variables() -> None:
    wanted = {CUBLAS: _choose_cublas(), NCCL: _choose_nccl()}
    wanted |= {name: _choose_switch(name, value) for name, value in _SWITCHES.items()}
    _state.previous = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)


def _restore_variables() -> None:
    remembered = _state.in_force or {}
    for name, started in ((CUBLAS, cuda_started()), (NCCL, nccl_started())):
        if started:
            remembered.setdefault(name, os.environ.get(name, ""))
        else:
            remembered.pop(name, None)
    _state.in_force = remembered
    for name, value in (_state.previous or {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _state.previous = None


def _choose_cublas() -> str:
    found = os.environ.get(CUBLAS)
    if cuda_started():
        value = (_state.in_force or {}).get(CUBLAS, found)
        if value not in CUBLAS_ALLOWED:
            raise _too_late("CUDA", CUBLAS, value, CUBLAS_ALLOWED[0])
        return value
    if found is None:
        return CUBLAS_ALLOWED[0]
    if found not in CUBLAS_ALLOWED:
        raise SettingError(
            f"The variable {CUBLAS} is {found!r}; deterministic products need one of "
            f"{', '.join(CUBLAS_ALLOWED)}. Unset it, or set one of these."
        )
    return found


def _choose_nccl() -> str:
    found = os.environ.get(NCCL)
    if nccl_started():
        value = (_state.in_force or {}).get(NCCL, found)
        if value is None or allows_nvls(value):
            raise _too_late("NCCL", NCCL, value, NCCL_DEFAULT)
        return value
    if found is None:
        return NCCL_DEFAULT
    if allows_nvls(found):
        raise SettingError(
            f"The variable {NCCL} is {found!r}, which lets NCCL reduce by NVLS, in an order that "
            f"differs between calls. Unset it, or exclude NVLS: {NCCL}={NCCL_DEFAULT}."
        )
    return found


def _choose_switch(name: str, wanted: str) -> str:
    found = os.environ.get(name)
    if found not in (None, "", wanted):
        raise SettingError(
            f"The variable {name} is {found!r}, which asks for nondeterministic kernels. Unset it, "
            f"or set {name}={wanted}."
        )
    return wanted


def _too_late(library: str, name: str, value: str | None, wanted: str) -> TooLateError:
    found = "not set" if value is None else repr(value)
    return TooLateError(
        f"{library} started in this process while {name} was {found}, and reads it only then. Call "
        "lightning_d9m.enable() at the top of the program, before anything uses the GPU, or start "
        f"the program with {name}={wanted}."
    )
