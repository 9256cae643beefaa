"""Horovod's installation, its variables, the store of its ranks, and their stacks."""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import distributed

from lightning_d9m.engine.control.doctor import CheckResult, check_variable, judge
from lightning_d9m.engine.control.environment import NCCL, VARIABLES, Variable
from lightning_d9m.engine.ledger.format.records import Scalar
from lightning_d9m.engine.ledger.stack import capture_stack, format_differences, stack_differences
from lightning_d9m.errors import SettingError, StackDifferenceError

# Milliseconds between two cycles of Horovod's threads, which exchange messages in each cycle even
# if there is nothing to do. At the default of 1 ms they take a good part of the cores from ranks
# that compute on them. Collectives are torch's, so Horovod is idle.
_CYCLE_MS = "50"
_STORE_BYTES = 256  # of the address of a store


def _has_started() -> bool:
    hvd: Any = sys.modules.get("horovod.torch")
    return hvd is not None and bool(hvd.is_initialized())


def _pin(name: str, wanted: str, effect: str, *others: str) -> Variable:
    """Return a variable of Horovod that has one value; ``others`` mean the same to it."""
    allows = frozenset((wanted, *others)).__contains__
    remedy = "Do not call hvd.init() yourself, the strategy does"
    return Variable(name, wanted, effect, allows, "Horovod", _has_started, remedy)


# The strategy's gradients do not pass through Horovod: these are for sums of the program.
PINNED = (
    _pin(
        "HOROVOD_FUSION_THRESHOLD",
        "0",
        "Tensor fusion packs the gradients that are ready, so the order of sums changes.",
    ),
    _pin(
        "HOROVOD_DISABLE_GROUP_FUSION",
        "1",
        "Otherwise groups are fused with other tensors that are ready.",
    ),
    # The rest is off by default.
    _pin("HOROVOD_AUTOTUNE", "0", "Autotuning changes the fusion by measured times.", ""),
    _pin(
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "0",
        "It sums within each host first, in another order.",
        "",
    ),
    _pin("HOROVOD_TORUS_ALLREDUCE", "0", "It sums in two dimensions, in another order.", ""),
    # The wait is enqueued on the default stream of Horovod's thread instead of the stream that
    # reads the result.
    _pin(
        "HOROVOD_ENABLE_ASYNC_COMPLETION",
        "0",
        "Results may be read before the device has written them.",
        "",
    ),
    _pin(
        "HOROVOD_ELASTIC",
        "0",
        "Elastic Horovod changes the number of ranks while training, which changes the sums.",
        "",
    ),
)
# Fixed, to a value that the user may choose. Settings of torch.distributed do not apply to the
# communicator that Horovod has of NCCL.
CHOSEN = (
    # NCCL's tuner selects an algorithm by size and topology. A session that began before the
    # strategy has set its own value, and NCCL keeps the one that it has read.
    *(replace(variable, wanted="Ring") for variable in VARIABLES if variable.name == NCCL),
    # Protocols divide a message into different chunks, and the sum of a chunk starts at a rank that
    # depends on the chunk.
    Variable("NCCL_PROTO", "Simple", "", lambda _: True),
)


def list_variables(stall_seconds: float) -> list[Variable]:
    """Return what must be set before Horovod starts.

    Horovod gives up waiting for a rank after ``stall_seconds``.
    """
    free = {
        # Horovod waits indefinitely for a rank that hangs unless this is set.
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(1, round(stall_seconds))),
        "HOROVOD_CYCLE_TIME": _CYCLE_MS,
    }
    if interface := os.environ.get("HOROVOD_GLOO_IFACE"):  # that horovodrun has found
        free["GLOO_SOCKET_IFNAME"] = interface
    # Any value is allowed: these change no result.
    return [
        *PINNED,
        *CHOSEN,
        *(Variable(name, value, "", lambda _: True) for name, value in free.items()),
    ]


def connect_store(hvd: Any, timeout: timedelta) -> Any:
    """Return a store on rank 0, whose address Horovod sends; every rank must call this.

    After the timeout connecting, or waiting for a key, fails.

    Raises:
        SettingError: This rank cannot connect to rank 0.
    """
    make: Any = distributed.TCPStore  # type: ignore[attr-defined] # public, but not in __all__
    options = {"timeout": timeout, "wait_for_workers": False}
    store, sent = None, torch.zeros(_STORE_BYTES, dtype=torch.uint8, device="cpu")
    if hvd.rank() == 0:
        # Port 0 lets the system choose a free one: several trainings may start on one host at once.
        store = make("127.0.0.1", 0, is_master=True, **options)
        text = f"{_find_address()} {store.port}".encode()
        sent[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
    # The only collective of Horovod that is used. Its launcher gives ranks no address of a store
    # that torch could use, as torchrun does.
    received = hvd.broadcast(sent, 0, name="d9m.store")
    host, port = bytes(received.tolist()).rstrip(b"\0").decode().split()
    try:
        return store or make(host, int(port), is_master=False, **options)
    except (RuntimeError, OSError) as error:
        raise SettingError(
            f"Rank {hvd.rank()} cannot connect to rank 0 at {host}:{port} ({error}): set "
            "GLOO_SOCKET_IFNAME to a network interface that connects the hosts."
        ) from error


def _find_address() -> str:
    """Return the IPv4 address by which other hosts reach this one."""
    # The interface that Gloo uses connects the hosts; the host name may resolve to a loopback
    # address.
    for address in psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), []):
        if address.family == socket.AF_INET:
            return str(address.address)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def compare_stacks(
    options: Mapping[str, Scalar], gather: Callable[[Any], Sequence[Mapping[str, Scalar]]]
) -> None:
    """Compare the strategy's options and the stacks of all ranks, which ``gather`` returns.

    Raises:
        StackDifferenceError: A rank differs from rank 0; the message names rank and field.
    """
    variables = {f"variable.{each.name}": os.environ.get(each.name) for each in (*PINNED, *CHOSEN)}
    stack = capture_stack(
        {f"strategy.{name}": value for name, value in options.items()} | variables
    )
    described = gather(stack)
    for rank, actual in enumerate(described):
        differences = stack_differences(described[0], actual)
        if differences:
            raise StackDifferenceError(
                f"Rank {rank} (this run) runs with different settings or on a different stack than "
                "rank 0 (reference), so they would not compute the same bits; make them equal:\n"
                f"{format_differences(differences)}",
                differences=differences,
            )


def import_horovod() -> Any:
    """Import ``horovod.torch``.

    Raises:
        SettingError: It is missing, or it was built for a different torch.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise SettingError(
            f"Horovod cannot be imported with torch {torch.__version__} ({error}): run "
            "`d9m install-horovod`, which builds it for the installed torch."
        ) from error
    return hvd


def check_installation() -> Iterator[CheckResult]:
    """Check Lightning, and Horovod if it is installed."""
    stack = capture_stack()
    versions = {name: stack.get(f"package.{name}") for name in ("lightning", "pytorch-lightning")}
    packages = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    yield judge(
        not packages,
        "Lightning",
        "note",
        packages or "not installed",
        "The callback needs it; `lightning_d9m.deterministic` does not.",
        "pip install lightning",
    )
    horovod = stack.get("package.horovod")
    if horovod is None:
        return
    cause: object = None
    try:
        import_horovod()
    except SettingError as error:
        cause = error.__cause__
    yield judge(
        cause is not None,
        "Horovod",
        "problem",
        f"{horovod}, which cannot be imported ({cause})" if cause else str(horovod),
        "Its extension is missing, because `pip install horovod` can succeed without it, or it "
        "was built for a different torch.",
        "d9m install-horovod",
    )
    for each in PINNED:
        yield check_variable(each, unset="the strategy sets it")
