"""The environment of a computation: variables, torch's flags, and its number of threads."""

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_d9m.compatibility import has_compiler_flag, has_mkldnn_flag
from lightning_d9m.engine.control.settings import read_variable
from lightning_d9m.errors import SettingError, TooLateError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
NCCL = "NCCL_ALGO"
INDUCTOR = "TORCHINDUCTOR_DETERMINISTIC"
FLASH_ATTENTION = "FLASH_ATTENTION_DETERMINISTIC"
TRANSFORMER_ENGINE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
# Set by `d9m locate --no-determinism`. With "off" a session seeds and records, and does not switch
# anything, so that the effect of determinism can be measured with the unchanged program.
CONTROL = "LIGHTNING_D9M_CONTROL"


_NVLS = {"NVLS", "NVLSTREE"}  # between the devices of a host, and between hosts


def allows_nvls(algorithms: str) -> bool:
    """Return whether a value of ``NCCL_ALGO`` lets NCCL choose NVLS for some collective.

    >>> [allows_nvls(text) for text in ("Ring", "Tree,NVLS", "^NVLS", "^NVLS,NVLSTree")]
    [False, True, True, False]
    >>> [allows_nvls(text) for text in ("allreduce:ring", "ring;allreduce:tree")]
    [True, False]
    """
    # NCCL's src/graph/tuning.cc: a part with the name of a collective concerns that one alone, and
    # the first part without a name concerns all. It compares whole names, without regard to case.
    parts = algorithms.upper().split(";")
    if ":" in parts[0]:
        return True
    for part in parts:
        names = part.rpartition(":")[2]
        # A space is a part of a name: an exclusion with one excludes nothing.
        listed = {name if names.startswith("^") else name.strip() for name in names.split(",")}
        listed = {name.removeprefix("^") for name in listed}
        allowed = _NVLS - listed if names.startswith("^") else _NVLS & listed
        if allowed:
            return True
    return False


@dataclass(frozen=True)
class Variable:
    """A variable that a session sets.

    Attributes:
        name: Its name.
        wanted: The value that a session chooses.
        effect: The effect of a value that is not allowed.
        allows: Returns whether results are deterministic with a value; it is empty if not set.
        library: The library that reads it when it starts; empty if it is read again and again.
        has_started: Returns whether this process has started the library.
        remedy: How to let the library start later.
    """

    name: str
    wanted: str
    effect: str
    allows: Callable[[str], bool]
    library: str = ""
    has_started: Callable[[], bool] = bool
    remedy: str = (
        "Call lightning_d9m.enable() at the top of the program, before anything uses the GPU"
    )


def _has_started_nccl() -> bool:
    """Return whether torch.distributed runs on NCCL."""
    group = torch.distributed
    # `get_backend` returns "undefined" for a group without a named backend.
    is_open = group.is_available() and group.is_initialized()
    return is_open and "nccl" in str(group.get_backend_config())


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
        lambda: bool(torch.cuda.is_initialized()),
    ),
    # See nccl issue 1497.
    Variable(
        NCCL,
        "^NVLS,NVLSTree",
        "NVLS reduces inside the network switch, in an order that differs between calls.",
        lambda value: value != "" and not allows_nvls(value),
        "NCCL",
        _has_started_nccl,
    ),
    # The compiler reads it when its configuration is imported; after that, `restore_flags` sets
    # the configuration itself.
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


# Libraries read some variables once, when they start, so these must be set before CUDA and NCCL
# start. Under Lightning both may start before `Callback.setup`: in the constructor of the Trainer,
# and when its strategy sets up the process group. Therefore the constructors of the callback and of
# a session already change `os.environ`. A library keeps the value that it has read after the
# variable is restored, so this state remembers that value.
_holders: Counter[str] = Counter()
_previous: dict[str, str | None] = {}  # of the variables that are held
_in_force: dict[str, str] = {}  # what a library read when it started, for later sessions
# Reentrant: a callback that is garbage-collected while the lock is held gives up its hold at once.
_lock = threading.RLock()


class EarlyVariables:
    """A holder of variables: the first holder of one sets it, and the last one restores it.

    A holder that is garbage-collected (a callback that was built and never used) gives up its hold.
    By default they are those of a session, which ``LIGHTNING_D9M_CONTROL`` may switch off.
    """

    _variables: Sequence[Variable] = VARIABLES

    def __init__(self, variables: Sequence[Variable] | None = None) -> None:
        self._hold: weakref.finalize[[Sequence[Variable]], EarlyVariables] | None = None
        if variables is not None:
            self._variables = variables

    def __getstate__(self) -> dict[str, None]:
        # A spawned process inherits the variables and must not restore them.
        return {"_hold": None}

    def set(self) -> None:
        """Set the variables that have no valid value yet. A second call does nothing.

        Raises:
            SettingError: When the user's value of a variable allows nondeterminism.
            TooLateError: When a library has started under another value.
        """
        is_on = self._variables is not VARIABLES or control_is_on()
        if self._hold is not None or not is_on:
            return
        with _lock:
            # First, as a holder that is collected meanwhile would otherwise restore them.
            _holders.update(variable.name for variable in self._variables)
            try:
                wanted = {variable.name: _choose(variable) for variable in self._variables}
            except BaseException:
                _give_up(self._variables)
                raise
            for name, value in wanted.items():
                _previous.setdefault(name, os.environ.get(name))
                os.environ[name] = value
        self._hold = weakref.finalize(self, _give_up, self._variables)
        self._hold.atexit = False  # the environment ends with the process

    def restore(self) -> None:
        """Give up the hold; the last holder restores the variables. A second call does nothing."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold()


def _give_up(variables: Sequence[Variable]) -> None:
    """Restore the variables that no one else holds; note the values that libraries have read."""
    with _lock:
        _holders.subtract(variable.name for variable in variables)
        for name, has_started in ((each.name, each.has_started) for each in variables):
            if _holders[name]:
                continue
            # Before the variable is restored, because what is read now is what a library that has
            # started keeps.
            if has_started():
                _in_force.setdefault(name, os.environ.get(name, ""))
            else:
                _in_force.pop(name, None)
            value = _previous.pop(name, os.environ.get(name))
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _choose(variable: Variable) -> str:
    """Return the value of the user, or ours if there is none."""
    name, found = variable.name, os.environ.get(variable.name, "")
    if variable.has_started():
        value = _in_force.get(name, found)
        if not variable.allows(value):
            raise TooLateError(
                f"{variable.library} started in this process while {name} was "
                f"{repr(value) if value else 'not set'}, and reads it only at its start. "
                f"{variable.remedy}, or start the program with {name}={variable.wanted}."
            )
        return value or variable.wanted
    if found and not variable.allows(found):
        raise SettingError(
            f"The variable {name} is {found!r}, which a deterministic session does not allow. "
            f"{variable.effect} Unset it, or set {name}={variable.wanted}."
        )
    return found or variable.wanted


_INDUCTOR = "torch._inductor.config"
Flags = dict[str, bool]
# The owners of flags that are attributes, by dotted name; an older torch lacks some.
_OWNERS: dict[str, Any] = {
    "torch.fill_uninitialized_memory": torch.utils.deterministic,
    "cudnn.deterministic": torch.backends.cudnn,
    "cudnn.benchmark": torch.backends.cudnn,
}
if has_mkldnn_flag():
    _OWNERS["mkldnn.deterministic"] = torch.backends.mkldnn


def capture_flags() -> Flags:
    """Return torch's flags that this module sets, by dotted name."""
    flags = {
        "torch.deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "sdpa.cudnn": bool(torch.backends.cuda.cudnn_sdp_enabled()),
    }
    flags |= {name: getattr(owner, name.rpartition(".")[2]) for name, owner in _OWNERS.items()}
    if has_compiler_flag():
        config: Any = sys.modules.get(_INDUCTOR)
        # Before the (slow) import of its module, the user's variable says its initial value.
        user = _previous.get(INDUCTOR, os.environ.get(INDUCTOR))
        value = user == "1" if config is None else config.deterministic
        flags["inductor.deterministic"] = bool(value)
    return flags


def restore_flags(flags: Flags) -> None:
    """Put torch's flags back as they were captured, unless the interpreter is shutting down."""
    if sys.is_finalizing():  # nothing can be imported any more, and nothing will be computed
        return
    # torch's flag first: it also sets that of the compiler, which follows.
    torch.use_deterministic_algorithms(
        flags["torch.deterministic_algorithms"], warn_only=flags["torch.deterministic_warn_only"]
    )
    torch.backends.cuda.enable_cudnn_sdp(flags["sdpa.cudnn"])
    for name, owner in _OWNERS.items():
        setattr(owner, name.rpartition(".")[2], flags[name])
    if has_compiler_flag():
        # `use_deterministic_algorithms` has imported this module and set it to its own mode.
        sys.modules[_INDUCTOR].deterministic = flags["inductor.deterministic"]  # type: ignore[attr-defined]


def wanted_flags(*, fill_uninitialized_memory: bool) -> Flags:
    """Return the flags of a deterministic session."""
    return {
        # Chooses deterministic kernels, and raises if an operation has none.
        "torch.deterministic_algorithms": True,
        # With warn_only, attention keeps its nondeterministic backward kernels.
        "torch.deterministic_warn_only": False,
        # A program that reads memory it never wrote reads the same values in each run.
        "torch.fill_uninitialized_memory": fill_uninitialized_memory,
        # cuDNN's fastest convolutions add with atomics.
        "cudnn.deterministic": True,
        # The benchmark chooses kernels by timing them.
        "cudnn.benchmark": False,
        # cuDNN's attention does not read torch's flag.
        "sdpa.cudnn": False,
        # Without it oneDNN chooses the fastest kernel for a device.
        "mkldnn.deterministic": True,
        # Autotuning chooses kernels by timing them.
        "inductor.deterministic": True,
    }


@contextmanager
def algorithms_switched(wanted: Flags) -> Iterator[None]:
    """Compute with the flags of a deterministic session, and restore torch's flags."""
    before = capture_flags()
    try:
        restore_flags(wanted)
        yield
    finally:
        restore_flags(before)


def find_changed_flags(wanted: Flags) -> Flags:
    """Return the present values of the flags that differ from those of a session."""
    return {name: value for name, value in capture_flags().items() if value != wanted[name]}


# With it OpenMP gives an operation fewer threads while the machine is busy, even if the number is
# pinned. OpenMP reads it when it starts, which is when torch is imported.
DYNAMIC = "OMP_DYNAMIC"
# The number that the user has set, which OpenMP also reads when it starts. Later the variable may
# hold another one: Lightning's launchers set it, if it is not set, by the number of processes.
_NUMBER_AT_START = os.environ.get("OMP_NUM_THREADS", "")


def read_threads() -> int | None:
    """Return the ``OMP_NUM_THREADS`` of the user, who sets it before torch is imported; or None.

    torchrun sets it for its processes.
    """
    text = _NUMBER_AT_START.partition(",")[0].strip()  # the rest is of nested parallel regions
    return int(text) if text.isdecimal() and int(text) else None


@contextmanager
def threads_pinned(number: int | None) -> Iterator[None]:
    """Compute with ``number`` intra-op threads, and restore the number that was set.

    With None nothing changes.

    Raises:
        SettingError: If OpenMP may vary the number.
    """
    # torch splits a sum over many elements into one part per thread, and each split rounds
    # differently. The number of inter-op threads does not matter: they run independent operations
    # side by side.
    if threads_vary():
        raise SettingError(
            f"The variable {DYNAMIC} is {os.environ[DYNAMIC]!r}, so OpenMP chooses the number of "
            "threads by the load of the machine, and results differ with it. Start the program "
            f"without it, or with {DYNAMIC}=false."
        )
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)


def threads_vary() -> bool:
    """Return whether OpenMP may choose the number of threads for every operation."""
    return os.environ.get(DYNAMIC, "").strip().lower() in ("true", "1")
