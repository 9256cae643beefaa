"""The stack: everything that bit-exactness may depend on, as one flat table.

Only capturing a stack imports torch; comparing stacks does not.
"""

import os
import platform
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

from lightning_d9m.engine.ledger.format.records import Scalar
from lightning_d9m.errors import StackDifferenceError
from lightning_d9m.text import escape, pluralize, read_stanzas

StackDifference: TypeAlias = tuple[str, Any, Any]
_Key = TypeVar("_Key")

_INFORMATIONAL, _PACKAGES, _VARIABLES, _TORCH = read_stanzas(Path(__file__).with_suffix(".txt"))
# Recorded but never compared; each with the reason.
INFORMATIONAL = {name: reason for name, [reason] in _INFORMATIONAL.items()}

# The number of logical ranks. Where two runs share it, their processes are not compared.
LOGICAL_RANKS = "world.logical_ranks"

SHARDED_PARAMETERS = "world.sharded_parameters"
"""The number of parameters of which ranks hold different parts, if there are any."""
PIPELINE_STAGES = "world.pipeline_stages"
"""The number of parts of the model that ranks train one after the other, if there are several."""
_PROCESSES = ("world.size", "world.nodes", "world.devices_per_node")

# Also where they are shown: if they were cut, two values might look alike.
_MAX_VALUE = 256


def capture_stack(extra: Mapping[str, Scalar] | None = None) -> dict[str, Scalar]:
    """Record the stack of this process as it is now, with the device that it computes on.

    CUDA is initialized only if there are devices. Paths, host names and addresses are not
    recorded.

    Args:
        extra: Further values, such as the layout of the ranks; they replace captured ones.

    Returns:
        Values by dotted name. Packages that are not installed and variables that are unset have no
        entry.
    """
    stack = {**_capture_installation(), **_capture_packages()}
    # Not cached, as the facts of the machine are: all that follows can change within a process.
    # A library that was built with -ffast-math may switch this on when it is loaded.
    stack["cpu.flush_denormal"] = sys.float_info.min / 2 == 0.0
    stack |= _capture_torch()
    stack |= _capture_devices()
    # A copy: another thread may change the variables.
    present = dict(os.environ)
    if present.get("PYTHONHASHSEED") == "random":  # to Python, as if it were not set
        del present["PYTHONHASHSEED"]
    names = " ".join(_VARIABLES["variables"]).split()
    stack |= {f"variable.{name}": _bounded(present[name]) for name in names if name in present}
    stack |= capture_nccl_files()
    return stack | {name: _bounded(value) for name, value in (extra or {}).items()}


def _bounded(value: Scalar) -> Scalar:
    return value[:_MAX_VALUE] if isinstance(value, str) else value


@cache
def _capture_installation() -> Mapping[str, Scalar]:
    """Return what stays as it is in a process: the machine and torch's build."""
    import torch

    stack: dict[str, Scalar] = {
        "python.version": platform.python_version(),
        "python.implementation": platform.python_implementation(),
        "python.hash_randomized": bool(sys.flags.hash_randomization),
        "os.system": platform.system(),
        "os.release": platform.release(),
        "cpu.machine": platform.machine(),
        "cpu.model": _read_cpu_model(),
        "cpu.count": os.cpu_count(),
    }
    with suppress(AttributeError, OSError, ValueError):
        stack["os.libc"] = os.confstr("CS_GNU_LIBC_VERSION")
    built = torch.__config__.show()
    # That line says what this CPU has, so the digest of one build would differ between machines.
    lines = ["" if "CPU capability" in line else line for line in built.split("\n")]
    return stack | {
        # The digest covers the compiler, flags and libraries. The CPU capability is the next field.
        "torch.build": blake2b("\n".join(lines).encode(), digest_size=8).hexdigest(),
        "torch.cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch.blas": _word_after("BLAS_INFO=", built),
        "torch.mkl": _word_after("Math Kernel Library Version ", built),
        "torch.onednn": _word_after("MKL-DNN ", built),
        "torch.openmp": _word_after("OpenMP ", built),
    }


def _read_cpu_model() -> str:
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")[:16_384]
        entries = [line.partition(":") for line in text.split("\n")[:-1]]  # the last is not whole
        fields = {name.strip(): value.lstrip() for name, _, value in entries}
        parts = [fields[name] for name in ("CPU implementer", "CPU part") if name in fields]
        model = fields.get("model name") or " ".join(parts)
        if model:
            return model[:_MAX_VALUE]
    return platform.processor()


@cache
def _capture_packages() -> Mapping[str, Scalar]:
    """Read versions from installed metadata, so that nothing is imported; once for a process."""
    stack: dict[str, Scalar] = {}
    for name in " ".join(_PACKAGES["packages"]).split():
        with suppress(metadata.PackageNotFoundError):
            stack[f"package.{name}"] = metadata.version(name)
    return stack


def _capture_torch() -> dict[str, Scalar]:
    import torch

    stack: dict[str, Scalar] = {}
    for name, [path] in _TORCH.items():
        # A name that this version of torch does not know yet, or no longer, has no value to record.
        with suppress(AttributeError):
            value = attrgetter(path)(torch)
            value = value() if callable(value) else value
            stack[name] = value if isinstance(value, bool | int | None) else _bounded(str(value))
    # The library that is loaded: the wheel of NCCL may have been replaced since torch was built.
    if torch.version.cuda is not None and torch.distributed.is_nccl_available():
        version = torch.cuda.nccl.version()
        stack["torch.nccl"] = ".".join(str(part) for part in version)
    return stack


def _word_after(marker: str, text: str) -> str | None:
    """Return the next word; a pattern for each would take 0.1 ms to compile."""
    words = text.partition(marker)[2].split(maxsplit=1)
    return words[0].rstrip(",") or None if words else None


def _capture_devices() -> dict[str, Scalar]:
    import torch

    from lightning_d9m.compatibility import count_devices, find_accelerator

    accelerator = find_accelerator(available=True)
    stack: dict[str, Scalar] = {"device.kind": accelerator.type if accelerator else "cpu"}
    if accelerator is None:
        return stack
    stack["device.count"] = count_devices()
    if accelerator.type != "cuda":
        return stack
    stack["device.driver"] = _read_driver()
    every = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    facts = every[torch.cuda.current_device()]
    names = Counter(one.name for one in every)
    # A hash, because the UUID itself identifies the machine; torch 2.4 and older have none.
    uuids = [str(getattr(one, "uuid", "")).encode() for one in every]
    return stack | {
        "device.name": facts.name,
        "device.capability": f"{facts.major}.{facts.minor}",
        "device.multiprocessors": facts.multi_processor_count,
        # Rounded: drivers differ in how many bytes they keep for themselves.
        "device.memory_gib": round(facts.total_memory / 2**30),
        "device.visible": _bounded(", ".join(f"{count} {name}" for name, count in names.items())),
        "device.order": _bounded(" ".join(blake2b(u, digest_size=4).hexdigest() for u in uuids)),
    }


def _read_driver() -> str | None:
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(errors="replace")
        found = re.search(r"Kernel Module\D*?\s(?:for \S+\s+)?(\d+\.[\d.]+)", text)
        return found[1] if found else None
    return None


def stack_differences(
    expected: Mapping[str, object], actual: Mapping[str, object]
) -> list[StackDifference]:
    """Return (field, expected, actual) for each field that differs and is compared.

    A field that one stack lacks is ``"missing"`` there. The fields of ``INFORMATIONAL`` are left
    out, and the number of processes if both stacks have the same logical ranks.

    >>> stack_differences({"torch.cuda": "12.8", "cpu.count": 8}, {"torch.cuda": "13.0"})
    [('torch.cuda', '12.8', '13.0')]
    """
    ignored = {*INFORMATIONAL, *(_PROCESSES if same_logical_ranks(expected, actual) else ())}
    return [entry for entry in table_differences(expected, actual) if entry[0] not in ignored]


class _Missing(str):
    """The text ``"missing"`` of a type that no table holds; compare with ``is``."""

    __slots__ = ()


MISSING: Final = _Missing("missing")


def table_differences(
    expected: Mapping[_Key, Any], actual: Mapping[_Key, Any]
) -> list[tuple[_Key, Any, Any]]:
    """Return (name, expected, actual) for each entry that differs; ``MISSING`` where it is absent.

    Values of different types differ: 1 is not True, and 1.0 is not 1. Floats are compared by their
    bits: 0.0 is not -0.0. The entries have the order of the first table, and then of the second.

    >>> table_differences({"b": 1, "a": 2}, {"a": 3, "b": True, "c": None})
    [('b', 1, True), ('a', 2, 3), ('c', 'missing', None)]
    """
    differing = []
    for name in {**expected, **actual}:
        one, other = expected.get(name, MISSING), actual.get(name, MISSING)
        alike = type(one) is type(other) and one == other
        if not alike or (type(one) is float and one.hex() != other.hex()):
            differing.append((name, one, other))
    return differing


def same_logical_ranks(expected: Mapping[str, object], actual: Mapping[str, object]) -> bool:
    """Return whether two stacks have logical ranks, and equally many.

    The bits of such runs do not depend on the number of processes.

    >>> same_logical_ranks({"world.logical_ranks": 4}, {"world.logical_ranks": 4})
    True
    >>> same_logical_ranks({}, {})
    False
    """
    return expected.get(LOGICAL_RANKS) == actual.get(LOGICAL_RANKS) is not None


def are_portable(expected: Mapping[str, object], actual: Mapping[str, object]) -> bool:
    """Return whether the settings of two runs both say that their bits depend on no stack.

    >>> are_portable({"portable": True}, {"portable": True})
    True
    >>> are_portable({"portable": True}, {"seed": 1})
    False
    """
    return bool(expected.get("portable") and actual.get("portable"))


def check_stack(
    expected: Mapping[str, object],
    actual: Mapping[str, object],
    policy: Literal["raise", "warn", "ignore"],
) -> None:
    """Compare this stack with that of the reference, and warn if they differ.

    Raises:
        StackDifferenceError: When they differ and the policy is ``"raise"``.
    """
    differences = stack_differences(expected, actual)
    if policy == "ignore" or not differences:
        return
    message = (
        f"The stack differs from the reference's in "
        f"{pluralize(len(differences), 'field')}, so another result would be no "
        f"nondeterminism of this program:\n{format_differences(differences)}\n"
        "Run on the stack of the reference, or record a new reference on this one; with "
        "the policy 'warn' the run continues."
    )
    if policy == "raise":
        raise StackDifferenceError(message, differences=differences)
    warnings.warn(message, stacklevel=3)


def format_differences(differences: Sequence[StackDifference]) -> str:
    """Return the differences as text: each field with both values below it, aligned."""
    return "\n".join(
        f"  {escape(field)}\n    reference: {escape(one, _MAX_VALUE)}\n"
        f"    this run:  {escape(other, _MAX_VALUE)}"
        for field, one, other in differences
    )


COMPILER_CACHE = "compiler.cache"
"""The field for Inductor's cache on disk when the run began: ``cold`` (empty), ``warm`` or
``disabled``."""

# Settings of Inductor that change which kernels it makes, or what they compute.
_FLAGS = (
    *("deterministic", "max_autotune", "freezing", "fallback_random"),
    "emulate_precision_casts",
)


def capture_compiler() -> dict[str, Scalar]:
    """Record Inductor's settings, its cache and its compiler of C++, for a run that compiles."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    settings: Any = config
    graphs = Path(cache_dir()) / "fxgraph"
    found = "warm" if graphs.is_dir() and any(graphs.iterdir()) else "cold"
    stack: dict[str, Scalar] = {
        COMPILER_CACHE: "disabled" if settings.force_disable_caches else found,
        "compiler.cxx": _read_cxx(),
    }
    for name in _FLAGS:
        if hasattr(settings, name):
            stack[f"flag.inductor.{name}"] = bool(getattr(settings, name))
    return stack


@cache
def _read_cxx() -> str | None:
    """Return the first line of ``--version`` of the compiler; None without one."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    with suppress(Exception):  # torch raises InvalidCxxCompiler if it finds none
        command = [get_cpp_compiler(), "--version"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - torch named it
        return text.partition("\n")[0][:256]
    return None


# The links of the devices, the rings and trees between them, and the limits of each algorithm.
_NAMED = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_TUNER_CONFIG_FILE")
_USER, _SYSTEM = "NCCL_CONF_FILE", "/etc/nccl.conf"  # lines of VARIABLE=VALUE


def capture_nccl_files() -> dict[str, str]:
    """Return the hash of each file that NCCL reads, by dotted name.

    A file that does not exist, or cannot be read, has no entry: NCCL continues without it.
    """
    hashes = {}
    paths = {name: os.environ[name] for name in _NAMED if os.environ.get(name)}
    paths |= {_USER: os.environ.get(_USER) or "~/.nccl.conf", "nccl.conf": _SYSTEM}
    for name, path in paths.items():
        with suppress(OSError, RuntimeError):  # there may be no home
            content = Path(path).expanduser().read_bytes()
            hashes[f"file.{name}"] = blake2b(content, digest_size=8).hexdigest()
    return hashes
