"""Processes of the user's command, and of all that they start.

Killing a process group reaches neither a daemon nor a process in a new session. On Linux this
process becomes the parent of orphans among its descendants (PR_SET_CHILD_SUBREAPER, prctl(2)), so
that all of them are found below it, and none outlives the run.

Several processes are the ranks of one training. They get the variables that torchrun sets, which
Lightning's ``TorchElasticEnvironment`` and ``torch.distributed.init_process_group`` read, so that
the Trainer starts no processes itself.
"""

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from lightning_d9m.engine.ledger.folder import LEDGER_VARIABLE
from lightning_d9m.engine.recording.interruption import INTERRUPT, RESUME
from lightning_d9m.engine.recording.pace import size_ledgers
from lightning_d9m.errors import CommandError, LedgerError, file_errors
from lightning_d9m.text import describe_names, pluralize, printable, quote
from lightning_d9m.tools.launch.progress import RunProgress

# Python has no function for prctl, and these numbers are part of the kernel's interface.
_SET_SUBREAPER, _GET_SUBREAPER = 36, 37  # linux/prctl.h
_POLL_SECONDS = 0.02
# A killed process may wait for a disk for an unlimited time.
_MOST_KILL_SECONDS = 10.0


@contextmanager
def subreaper_enabled() -> Iterator[None]:
    """Adopt orphaned descendants while the body runs, on Linux."""
    before = ctypes.c_int()
    # macOS has no prctl: there a daemon of the command is not found.
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: -1)
    prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_SUBREAPER, before.value, 0, 0, 0)


@dataclass(frozen=True)
class ProcessTree:
    """The processes of a command and all their descendants.

    Attributes:
        others: Children that this process had before; they and their descendants are left alone.
        received: The signals that this process received meanwhile, in order.
        leaders: The command's processes; each leads its process group, or is in that of this one.
    """

    others: frozenset[int]
    received: list[int]
    leaders: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def start(
        self,
        command: Sequence[str],
        folder: Path | None,
        log: Path | None,
        environment: Mapping[str, str] = os.environ,
    ) -> "subprocess.Popen[bytes]":
        """Start a process, in a folder, that writes to a log; without one, it uses the terminal.

        One with a log leads a session, so that a signal to its group reaches what it has started.

        Raises:
            CommandError: If it does not start.
            LedgerError: If the log cannot be made.
        """
        streams: dict[str, Any] = {}
        with ExitStack() as opened:
            if log is not None:
                with file_errors(LedgerError, f"The log {log} cannot be made"):
                    output = opened.enter_context(log.open("wb"))
                # A program that reads from the terminal would wait for an answer that nobody gives.
                streams = {"stdin": subprocess.DEVNULL, "stdout": output}
                streams |= {"stderr": subprocess.STDOUT, "start_new_session": True}
            try:
                leader = subprocess.Popen(command, cwd=folder, env=dict(environment), **streams)
            except (OSError, ValueError) as error:
                if log is not None:
                    log.unlink(missing_ok=True)
                raise CommandError(_describe_refusal(command, error)) from error
        self.leaders.append(leader)
        return leader

    def find_descendants(self) -> dict[int, str]:
        """Return ``{pid: name}`` of the running descendants of the leaders. Reap exited ones."""
        found: dict[int, str] = {}
        leaders = {leader.pid for leader in self.leaders}
        for child in psutil.Process().children():
            if child.pid in self.others:
                continue
            with suppress(psutil.NoSuchProcess):
                for process in (child, *child.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                            found[process.pid] = process.name()
                        # An orphan became a child of this process, so nobody else reaps it: it
                        # would stay a zombie, and its number in use. `Popen` reaps the leaders.
                        elif process is child and child.pid not in leaders:
                            with suppress(ChildProcessError):
                                os.waitpid(child.pid, os.WNOHANG)
        return {pid: name for pid, name in found.items() if pid not in leaders}

    def is_alive(self) -> bool:
        """Return whether a leader or a descendant still runs."""
        # All are polled, so that each that has ended is reaped.
        running = [leader for leader in self.leaders if leader.poll() is None]
        return bool(running or self.find_descendants())

    def wait(self, seconds: float, signals: int = 1) -> bool:
        """Wait at most ``seconds``, or for so many signals; return whether all have ended."""
        start = time.monotonic()
        while self.is_alive():
            if len(self.received) >= signals or time.monotonic() - start >= seconds:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def end(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL after ``grace`` seconds or at one more signal."""
        # The signal that ends the command, if it was one, has been received already.
        further = max(1, len(self.received)) + 1
        self._signal(signal.SIGTERM)
        if not self.wait(grace, further):
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL until all have ended."""
        start = time.monotonic()
        # Repeat: a process may start another one between the search and the signal.
        while self.is_alive() and time.monotonic() - start < _MOST_KILL_SECONDS:
            self._signal(signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        for leader in self.leaders:
            _send(leader, number)
        for pid in self.find_descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _send(leader: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Send a signal to a leader and its process group."""
    # After a leader is reaped its PID can be reused: `poll` reaps, so it comes first.
    if leader.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            # One that runs on the terminal is in the group of this process.
            leads = os.getpgid(leader.pid) == leader.pid
            (os.killpg if leads else os.kill)(leader.pid, number)


@contextmanager
def running_processes(pressed: list[int] | None = None) -> Iterator[ProcessTree]:
    """Yield an empty tree for processes that the body starts.

    SIGINT, SIGTERM and SIGHUP are raised after the body; see ``signals_deferred``. All processes
    have ended then: the first signal ends them within 5 seconds, a further one kills them at once.
    ``pressed`` gets each SIGINT in their place, which ends nothing.
    """
    others = frozenset(child.pid for child in psutil.Process().children())
    with signals_deferred(pressed) as received, subreaper_enabled():
        tree = ProcessTree(others, received)
        try:
            yield tree
        finally:
            tree.end(_GRACE_SECONDS)


# A name of this module, so that a test can let hours pass.
_read_clock = time.monotonic  # of the seconds that a command may take
# Two runs may train so much longer past their difference.
_TICK_SECONDS = 0.25
# For what a program does at SIGTERM, such as to save; a terminal's user waits for it.
_GRACE_SECONDS = 5.0
# A process that ends shortly after the command, such as a pool's helper, was not left behind.
_SETTLE_SECONDS = 1.0
# The end of a traceback of torch, with the error. A line may be long, as that of a progress bar.
_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_TAIL_WIDTH, _LAST_WIDTH = 200, 2000
# Bytes: less than any log and ledger need.
_FULL = 2**16
# Terminal sequences: colors, cursor movements, titles.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


def run_once(
    command: Sequence[str],
    folder: Path,
    *,
    progress: RunProgress,
    timeout: float | None,
    variables: Mapping[str, str] = MappingProxyType({}),
    working_folder: Path | None = None,
    killed_when: Callable[[], bool] = lambda: False,
    processes: int | None = None,
) -> None:
    """Run the command once, in processes that write ledgers and a log each to ``folder``.

    If one fails, the others are ended. If this process gets SIGINT, SIGTERM or SIGHUP meanwhile, it
    ends the command first.

    Args:
        command: The program and its arguments.
        folder: The run's folder.
        progress: Shows the progress of the run.
        timeout: Seconds after which the run counts as hanging; None for no limit.
        variables: Further environment variables of the processes.
        working_folder: Where the command runs; None for the working folder of this process.
        killed_when: Condition under which the command is killed without counting as a failure;
            evaluated a few times a second and when the command ends.
        processes: Starts the command so many times at once, as the ranks of one training; None
            starts it once, without variables for ranks.

    Raises:
        CommandError: If the command does not start, fails, or runs longer than ``timeout``. All
            of its processes have ended by then.
    """
    ranks = [{}] if processes is None else make_rank_variables(processes)
    logs = [folder / (f"output-{rank}.log" if rank else "output.log") for rank in range(len(ranks))]
    environment = _make_environment(folder) | dict(variables)
    failed, left = None, dict[int, str]()
    with progress:
        with running_processes() as tree:
            for log, own in zip(logs, ranks, strict=True):
                tree.start(command, working_folder, log, environment | own)
            statuses = _wait(tree, timeout, progress.tick, killed_when)
            if statuses is not None and any(status != 0 for status in statuses):
                failed = _find_failure(tree, statuses, logs)
            elif not tree.wait(_SETTLE_SECONDS):
                left = tree.find_descendants()
        # Reported when the line of the progress is gone, and raised when all processes have ended.
        if left:
            names = describe_names(sorted({*left.values()}), len({*left.values()}))
            what = pluralize(len(left), "process", "processes")
            text = f"d9m: the command left {what} running, ended now: {names}"
            print(text, file=sys.stderr)
        if failed is not None:
            raise CommandError(_describe_failure(command, *failed, logs=logs, timeout=timeout))


# Memory that the second of two runs may need, as a multiple of what the first one has.
_MEMORY = 1.2


def run_beside(
    command: Sequence[str],
    folders: Sequence[Path],
    *,
    progress: RunProgress,
    timeout: float | None,
    variables: Sequence[Mapping[str, str]],
    killed_when: Callable[[], bool],
) -> list[CommandError | None]:
    """Run the command twice at once, so that both can be compared while they run.

    The second begins when the first trains, or when it has ended if the memory is short. Folders
    and variables are those of each run; the other arguments are those of ``run_once``.

    Returns:
        For each run, why it failed; None if it did not, or was killed.

    Raises:
        CommandError: If the command does not start.
    """
    logs = [folder / "output.log" for folder in folders]
    is_short = False  # the memory; looked at once, when the first run trains
    with progress, running_processes() as tree:

        def start(number: int) -> None:
            environment = _make_environment(folders[number]) | share_cores()
            tree.start(command, None, logs[number], environment | dict(variables[number]))

        def tick(passed: float) -> None:
            nonlocal is_short
            first, *second = tree.leaders
            if not second and not is_short and size_ledgers(folders[0]):
                is_short = _is_memory_short(first)
            trains = size_ledgers(folders[0]) > 0 and not is_short
            if not second and (trains or first.poll() is not None):
                start(1)
            progress.tick(passed)

        start(0)
        # Each may have half of the cores, or begin when the other has ended.
        limit = None if timeout is None else 2 * timeout
        found = _wait(tree, limit, tick, killed_when, ends_at_failure=False)
    statuses = [*(found or ()), 0, 0]  # one that was killed, or had not begun, has not failed
    return [
        CommandError(_describe_failure(command, 0, status, logs=[log], timeout=limit))
        if status != 0
        else None
        for log, status in zip(logs, statuses, strict=False)
    ]


def share_cores() -> dict[str, str]:
    """Return the variable with which programs that run at once share the cores."""
    # If each needs all of them, a thread that waits for others must not keep one busy, as OpenMP's
    # do by default: on two cores, two small models with two threads each took 18 times as long as
    # one, and so 1.4 times. Stopping one of two (SIGSTOP) would need a process that continues it
    # if this one is killed.
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


def _is_memory_short(leader: "subprocess.Popen[bytes]") -> bool:
    """Return whether the memory does not suffice for a second run like this one."""
    used = 0
    with suppress(psutil.Error):
        first = psutil.Process(leader.pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.Error):
                used += process.memory_info().rss
    return bool(psutil.virtual_memory().available < _MEMORY * used)


def _make_environment(folder: Path) -> dict[str, str]:
    """Return the variables of a run: where its ledgers go, and a fixed hash seed."""
    environment = {name: os.environ[name] for name in os.environ.keys() - {INTERRUPT, RESUME}}
    environment[LEDGER_VARIABLE] = str(folder)
    # Control programs that do not mention us. An explicit LIGHTNING_D9M=0 is respected.
    environment.setdefault("LIGHTNING_D9M", "1")
    # Python reads it when it starts; a random seed changes the order of sets of strings by run.
    if not environment.get("PYTHONHASHSEED", "").isdigit():
        environment["PYTHONHASHSEED"] = "0"
    return environment


def _describe_failure(
    command: Sequence[str],
    number: int,
    status: int | None,
    *,
    logs: Sequence[Path],
    timeout: float | None,
) -> str:
    """Describe the failure of a process: its number, and its exit status, None if it hangs."""
    described, log = describe_command(command), logs[number]
    which = f" in process {number} of {len(logs)}" if len(logs) > 1 else ""
    if status is None:
        return (
            f"The command {described} was still running{which} after {timeout:g} s and was ended. "
            f"Allow it more with --timeout, or see where it hangs in {log}.{tail(log)}"
        )
    cause = f"signal {_name_signal(-status)}" if status < 0 else f"exit status {status}"
    return f"The command {described} ended with {cause}{which}. Log: {log}.{tail(log)}"


def describe_command(command: Sequence[str]) -> str:
    """Return a command in quotes; a long one is cut."""
    return quote(" ".join(command), _TAIL_WIDTH)


def _describe_refusal(command: Sequence[str], error: Exception) -> str:
    """Describe why a command does not start."""
    cause = getattr(error, "strerror", None) or error
    advice = "Give a program that is on PATH, or the path of one that may be executed."
    if len(command) == 1 and command[0].split()[1:]:
        advice = f"Give its words without quotes around them all: -- {command[0]}"
    elif command[0].endswith(".py"):
        advice = f"Start a script with its interpreter: python {command[0]}."
    return f"The command {describe_command(command)} does not start: {cause}. {advice}"


def _wait(
    tree: ProcessTree,
    timeout: float | None,
    tick: Callable[[float], None],
    killed_when: Callable[[], bool],
    *,
    ends_at_failure: bool = True,
) -> list[int | None] | None:
    """Wait until the leaders have ended, or one has failed, or for ``timeout`` seconds.

    Returns:
        The exit status of each, None for one that still runs. None in place of all if they were
        killed, or after a signal to this process, which is raised later: nothing has failed then.
    """
    start = _read_clock()
    while not tree.received:
        running = [leader for leader in tree.leaders if leader.poll() is None]
        for leader in running:
            with suppress(subprocess.TimeoutExpired):
                # They share one tick, so that it takes as long for many ranks as for one.
                leader.wait(_TICK_SECONDS / len(running))
        passed = _read_clock() - start
        tick(passed)  # it may start another one
        statuses = [leader.poll() for leader in tree.leaders]
        if killed_when():
            tree.kill()
            return None
        has_failed = ends_at_failure and any(statuses)
        is_late = timeout is not None and passed > timeout
        if has_failed or is_late or None not in statuses:
            return statuses
    return None


def run_in_terminal(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> int:
    """Run the command once on the terminal of this process; it gets all keys, with Ctrl-C.

    Its ledgers go to the folder.

    Returns:
        The exit status.

    Raises:
        CommandError: If it does not start.
        KeyboardInterrupt: If it failed after Ctrl-C.
    """
    # The terminal sends Ctrl-C to its whole foreground group, so the command has it already: a
    # debugger in it may only stop what it runs.
    pressed: list[int] = []
    environment = _make_environment(folder) | dict(variables)
    with running_processes(pressed=pressed) as tree:
        tree.start(command, None, None, environment)
        statuses = _wait(tree, None, lambda _: None, lambda: False)
    status = 0 if statuses is None else statuses[0] or 0
    if status and pressed:
        raise KeyboardInterrupt
    return status


def _find_failure(
    tree: ProcessTree, statuses: Sequence[int | None], logs: Sequence[Path]
) -> tuple[int, int | None]:
    """Return the process that failed first, or else one that still runs, and its exit status.

    Others may fail shortly after, because of it. It wrote to its log before them.
    """
    if not any(statuses):
        return statuses.index(None), None
    if len(logs) > 1:
        tree.wait(_SETTLE_SECONDS)
    # The status of a later failure is often that of a lost connection, and explains nothing.
    failed = [number for number, leader in enumerate(tree.leaders) if leader.poll()]
    first = min(failed, key=lambda number: logs[number].stat().st_mtime_ns)
    return first, tree.leaders[first].poll()


@contextmanager
def signals_deferred(pressed: list[int] | None = None) -> Iterator[list[int]]:
    """Defer SIGINT, SIGTERM and SIGHUP until the body is done; then raise the first one.

    Each SIGINT is added to ``pressed`` in place of that, if it is given.

    Yields:
        The signals received so far, in order.
    """
    received: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def keep(number: int, _: object) -> None:
        (received if pressed is None or number != signal.SIGINT else pressed).append(number)

    # Only the main thread may set handlers. A signal that is ignored (nohup) stays ignored.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                previous[number] = signal.signal(number, keep)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if received:
            name = _name_signal(received[0])
            with suppress(OSError):  # the terminal may have been closed
                print(f"\nd9m: {name} received; the command was ended.", file=sys.stderr)
            signal.raise_signal(received[0])
            # If the user's own signal handler returns, terminate anyway.
            raise SystemExit(128 + received[0])


def _name_signal(number: int) -> str:
    """Return a signal's name; real-time signals have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def tail(log: Path) -> str:
    """Return the last lines of a log as a terminal shows them, indented for a message."""
    with log.open("rb") as stream:
        # A log may have gigabytes.
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = stream.read().decode("utf-8", "replace")
    # A progress bar overwrites its line; only the last state of a line is shown.
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")]
    lines = [printable(_ESCAPE.sub("", line.expandtabs())) for line in shown if line.strip()]
    full = ""
    if shutil.disk_usage(log.parent).free < _FULL:
        full = (
            f" The disk of {log.parent} is full, so what it wrote there is not complete. Free "
            "space, or give a folder on another disk with --output."
        )
    if not lines:
        return full or " It printed nothing."
    # The last line is most often the error, whose remedy stands at its end.
    widths = [_TAIL_WIDTH] * (len(lines) - 1) + [_LAST_WIDTH]
    return f"{full}\nThe end of its output:" + "".join(
        f"\n  | {line[:width]}{' ...' * (len(line) > width)}"
        for line, width in [*zip(lines, widths, strict=True)][-_TAIL_LINES:]
    )


_ADDRESS = "127.0.0.1"


def make_rank_variables(count: int) -> list[dict[str, str]]:
    """Return the variables of each of ``count`` processes, by rank."""
    with socket.socket() as probe:  # for a port that is free now; the process of rank 0 opens it
        probe.bind((_ADDRESS, 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        # torchrun's group is a host.
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        # By this one torch and Lightning recognize a launch by torchrun.
        "TORCHELASTIC_RUN_ID": "d9m",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Lightning takes these as the Trainer's default arguments.
        "PL_TRAINER_DEVICES": str(count),
        "PL_TRAINER_NUM_NODES": "1",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def count_threads(processes: int) -> int:
    """Return how many threads each of several processes may use on this machine, at least 1."""
    # A job of a cluster or a container may use only some of the cores. macOS lacks this function.
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    return max(1, cores // processes)
