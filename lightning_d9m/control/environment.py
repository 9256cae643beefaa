"""Environment variables that libraries read once, when they start.

They must be set before CUDA and NCCL start. Under Lightning both may start before
``Callback.setup``: in the constructor of the Trainer, and when its strategy sets up the process
group. Therefore the constructors of the callback and of a session already change ``os.environ``.
A library keeps the value that it has read after the variable is restored, so this module remembers
that value.
"""

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from lightning_d9m.control.env_settings import read_variable
from lightning_d9m.errors import SettingError, TooLateError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
NCCL = "NCCL_ALGO"
INDUCTOR = "TORCHINDUCTOR_DETERMINISTIC"
FLASH_ATTENTION = "FLASH_ATTENTION_DETERMINISTIC"
TRANSFORMER_ENGINE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
# Set by `d9m audit model`. With "off" a session seeds and records, and does not switch anything, so
# that the effect and the cost of determinism can be measured with the unchanged program.
CONTROL = "LIGHTNING_D9M_CONTROL"


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


@dataclass(frozen=True)
class Variable:
    """A variable that a session sets.

    Attributes:
        name: Its name.
        wanted: The value that a session chooses.
        effect: The effect of a value that is not allowed.
        allows: Returns whether results are deterministic with a value.
        library: The library that reads it when it starts; empty if it is read again and again.
    """

    name: str
    wanted: str
    effect: str
    allows: Callable[[str], bool]
    library: str = ""


_ON = ("1", "").__contains__
VARIABLES = (
    # One fixed workspace per handle. With the default, cuBLAS may share and resize workspaces
    # between streams, and splits a product by the workspace that it finds. torch's Context.cpp
    # accepts these two values; with ":4096:2", which torch's documentation of RNN also names, it
    # raises at the first matrix product on CUDA.
    Variable(
        CUBLAS,
        ":4096:8",
        "With it cuBLAS shares workspaces between streams, so products differ.",
        (":4096:8", ":16:8").__contains__,
        "CUDA",
    ),
    # See nccl issue 1497.
    Variable(
        NCCL,
        "^NVLS,NVLSTree",
        "NVLS reduces inside the network switch, in an order that differs between calls.",
        lambda value: not allows_nvls(value),
        "NCCL",
    ),
    # The compiler reads it when its configuration is imported; after that, `torch_flags` sets the
    # configuration itself.
    Variable(INDUCTOR, "1", "With it the compiler chooses kernels by timing them.", _ON),
    # The flash-attn package does not read torch's flag; transformers and other packages pass this
    # variable on to it.
    Variable(FLASH_ATTENTION, "1", "The backward kernel of flash-attn adds with atomics.", _ON),
    Variable(
        TRANSFORMER_ENGINE,
        "0",
        "With it Transformer Engine may choose nondeterministic kernels.",
        ("0", "").__contains__,
    ),
)


def control_is_on() -> bool:
    """Return whether sessions may switch flags and variables.

    Raises:
        SettingError: When the variable has a value that is not allowed.
    """
    value: str | None = read_variable(CONTROL, os.environ, Literal["on", "off"])
    return value != "off"


def cuda_started() -> bool:
    """Return whether this process has initialized CUDA."""
    return bool(torch.cuda.is_initialized())


def nccl_started() -> bool:
    """Return whether torch.distributed runs on NCCL in this process."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    # `get_backend` returns "undefined" for a group without a named backend.
    return "nccl" in str(distributed.get_backend_config())


@dataclass
class _VariableState:
    """The variables that this process has set, and their previous values."""

    holders: int = 0
    previous: dict[str, str | None] | None = None
    # Values that a library read when it started, for later sessions in this process.
    in_force: dict[str, str] = field(default_factory=dict)


_state = _VariableState()
# Reentrant: a callback that is garbage-collected while the lock is held gives up its hold at once.
_lock = threading.RLock()


class EarlyVariables:
    """A holder of the variables: the first holder sets them, and the last one restores them.

    A holder that is garbage-collected (a callback that was built and never used) gives up its hold.
    """

    def __init__(self) -> None:
        self._hold: weakref.finalize[[], EarlyVariables] | None = None

    def __getstate__(self) -> dict[str, None]:
        # A spawned process inherits the variables and must not restore them.
        return {"_hold": None}

    def set(self) -> None:
        """Set the variables that have no valid value yet. A second call does nothing.

        Raises:
            SettingError: When the user's value of a variable allows nondeterminism.
            TooLateError: When a library has started under another value.
        """
        if self._hold is not None or not control_is_on():
            return
        with _lock:
            if _state.holders == 0:
                wanted = {variable.name: _choose(variable) for variable in VARIABLES}
                _state.previous = {name: os.environ.get(name) for name in wanted}
                os.environ.update(wanted)
            _state.holders += 1
        self._hold = weakref.finalize(self, _give_up)
        self._hold.atexit = False  # the environment ends with the process

    def restore(self) -> None:
        """Give up the hold; the last holder restores the variables. A second call does nothing."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold()


def read_user_value(name: str) -> str | None:
    """Return the user's value of a variable, also while a session has changed it."""
    return (os.environ if _state.previous is None else _state.previous).get(name)


def _give_up() -> None:
    """Restore the variables for the last holder; note the values that libraries have read."""
    with _lock:
        _state.holders -= 1
        if _state.holders:
            return
        remembered = _state.in_force
        for variable in VARIABLES:
            if _has_started(variable.library):
                remembered.setdefault(variable.name, os.environ.get(variable.name, ""))
            else:
                remembered.pop(variable.name, None)
        for name, value in (_state.previous or {}).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _state.previous = None


def _has_started(library: str) -> bool:
    return bool(library) and {"CUDA": cuda_started, "NCCL": nccl_started}[library]()


def _choose(variable: Variable) -> str:
    """Return the value of the user, or ours if there is none."""
    name, found = variable.name, os.environ.get(variable.name)
    if _has_started(variable.library):
        value = _state.in_force.get(name, found)
        if value is None or not variable.allows(value):
            raise TooLateError(
                f"{variable.library} started in this process while {name} was "
                f"{'not set' if value is None else repr(value)}, and reads it only at its start. "
                "Call lightning_d9m.enable() at the top of the program, before anything uses the "
                f"GPU, or start the program with {name}={variable.wanted}."
            )
        return value
    if found is not None and not variable.allows(found):
        raise SettingError(
            f"The variable {name} is {found!r}, which a deterministic session does not allow. "
            f"{variable.effect} Unset it, or set {name}={variable.wanted}."
        )
    return found or variable.wanted
