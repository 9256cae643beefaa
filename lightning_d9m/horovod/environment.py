"""The variables that Horovod and NCCL read once, when Horovod starts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_d9m.control.environment import allows_nvls
from lightning_d9m.errors import SettingError, StackDifferenceError, TooLateError
from lightning_d9m.ledger.records import Scalar
from lightning_d9m.ledger.stack import capture_stack, format_differences, stack_differences

# What must have this value, and the mechanism that makes it necessary.
PINNED = {
    # Fuses whatever is ready when its cycle comes round; the ring sums an element in an order that
    # depends on its place in the fused buffer.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # Without it, a group is fused with whatever else is ready, which moves its elements.
    "HOROVOD_DISABLE_GROUP_FUSION": "1",
    # Changes the threshold and the algorithm while training, guided by measured times.
    "HOROVOD_AUTOTUNE": "0",
    # Sums within each host first: another order, which depends on how ranks are spread over hosts.
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
    # The same in two dimensions.
    "HOROVOD_TORUS_ALLREDUCE": "0",
}
# What must be fixed; which value is the user's choice. Horovod has a communicator of its own, that
# settings of torch.distributed do not reach.
CHOSEN = {
    # NCCL's tuner picks an algorithm by size and topology, and NVLS sums in the switch, in an
    # order of its own.
    "NCCL_ALGO": "Ring",
    # Protocols cut a message into different chunks, and a chunk decides where its sum begins.
    "NCCL_PROTO": "Simple",
}
# Milliseconds between two cycles of Horovod's threads, in each of which they exchange messages even
# if there is nothing to do: at its own 1 ms they take a good part of the cores from ranks that
# compute on them. Where torch moves the tensors, there never is. No bit depends on it.
CYCLE_MS = {"horovod": "3", "torch": "50"}

_switched_on: dict[str, str] | None = None  # the variables with which this process started Horovod


@dataclass(frozen=True)
class SavedEnvironment:
    """Variables as they were before `switch_on`."""

    previous: Mapping[str, str | None]

    def restore(self) -> None:
        """Set them back. Horovod has read them, so that it stays as it is."""
        for name, value in self.previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def switch_on(
    *, initialized: bool, stall_seconds: float, transport: Literal["horovod", "torch"] = "horovod"
) -> SavedEnvironment:
    """Set the variables for a Horovod that starts next, or check those of one that runs.

    Args:
        initialized: Whether Horovod runs already.
        stall_seconds: How long Horovod waits for a rank that does not come.
        transport: By what tensors will travel.

    Raises:
        SettingError: A variable asks for the opposite.
        TooLateError: Horovod was initialised without a variable that it reads only then.
    """
    global _switched_on  # noqa: PLW0603 - Horovod is one per process, and so is this record of it
    if os.environ.get("HOROVOD_ELASTIC", "0") not in {"", "0"}:
        raise SettingError(
            "HOROVOD_ELASTIC is on: elastic Horovod changes the number of ranks while training, "
            "which changes the sums. Start with `horovodrun -np N` without --min-np and --max-np."
        )
    wanted = {**PINNED, **{name: os.environ.get(name) or value for name, value in CHOSEN.items()}}
    for name, value in PINNED.items():
        found = os.environ.get(name)
        if found is not None and found.strip() != value:
            raise SettingError(
                f"The variable {name} is {found!r}, but deterministic training needs {value!r}: "
                "unset it, and take it out of horovodrun's options."
            )
    if allows_nvls(wanted["NCCL_ALGO"]):
        raise SettingError(
            f"The variable NCCL_ALGO is {wanted['NCCL_ALGO']!r}, which lets NCCL reduce by NVLS, "
            f"in an order that differs between calls: unset it, or set {CHOSEN['NCCL_ALGO']!r}."
        )
    if initialized:
        _check_running(wanted)
    else:
        _switched_on = wanted
    # Ends a wait that would last for ever, when a rank hangs without ending.
    bounds = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(1, round(stall_seconds)))}
    if not torch.cuda.is_available():
        bounds["HOROVOD_CYCLE_TIME"] = CYCLE_MS[transport]
    missing = {n: v for n, v in {**wanted, **bounds}.items() if n not in os.environ}
    previous = {name: os.environ.get(name) for name in missing}
    os.environ.update(missing)
    return SavedEnvironment(previous)


def _check_running(wanted: Mapping[str, str]) -> None:
    """Horovod does not tell what it runs with: trust our own start, or the variables."""
    if _switched_on is not None:
        return
    for name in PINNED:
        if name in {
            "HOROVOD_AUTOTUNE",
            "HOROVOD_HIERARCHICAL_ALLREDUCE",
            "HOROVOD_TORUS_ALLREDUCE",
        }:
            continue  # off unless they are asked for
        if name not in os.environ:
            raise TooLateError(
                f"Horovod was initialised without {name}={wanted[name]}, which it reads only then: "
                "do not call hvd.init() yourself, the strategy does; or set the variable before "
                f"it: `{name}={wanted[name]} horovodrun ...`."
            )


def describe_rank(options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return what must be the same on every rank: the strategy's options and the stack."""
    variables = {f"variable.{name}": os.environ.get(name) for name in (*PINNED, *CHOSEN)}
    return capture_stack({f"strategy.{n}": v for n, v in options.items()} | variables)


def check_ranks(described: Sequence[Mapping[str, Scalar]]) -> None:
    """Compare what the ranks described.

    Raises:
        StackDifferenceError: A rank differs from rank 0; the message names rank and field.
    """
    for rank, actual in enumerate(described):
        differences = stack_differences(described[0], actual)
        if differences:
            raise StackDifferenceError(
                f"Rank {rank} (actual) runs with other settings or on another stack than rank 0 "
                "(expected), so that they would compute different bits; make them equal:\n"
                f"{format_differences(differences)}",
                differences=differences,
            )


def import_horovod() -> Any:
    """Import ``horovod.torch``.

    Raises:
        SettingError: It is missing, or it was built for another torch.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise SettingError(
            f"Horovod cannot be imported with torch {torch.__version__} ({error}): run "
            "`d9m install-horovod`, which builds it for the torch that is installed."
        ) from error
    return hvd
