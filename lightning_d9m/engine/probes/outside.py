"""Reads from outside of a program: what reaches it that is neither its source nor its seed.

While ``LIGHTNING_D9M_WATCH`` names a folder, each process appends to its file there a line for each
read of entropy, seeds, clocks, listings, files, temporary names, process numbers and addresses, and
for each thread and process that starts, with the line of the program. An audit hook sees those that
Python reports; functions that it does not report are wrapped. Moments of the ledger stand between
them, in the order of a clock that all processes of a machine share.

A helper of any library is seen by this, because all of them draw entropy from the same few places:
NumPy's generators without a seed, for example, from ``random._urandom``.
"""

import json
import os
import random
import stat
import sys
import sysconfig
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, ClassVar, TypeAlias

from xxhash import xxh3_64_hexdigest

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.engine.probes.training import Watched

VARIABLE = "LIGHTNING_D9M_WATCH"
PATTERN = "outside-*.jsonl"
# Of one place of the program, the first reads are written and then those whose number is a power of
# two, so that a long training writes few.
_FIRST_READS = 16
# A process that reads without end must fill neither memory nor disk: at most so many places and
# samples are noted, entries of a folder, bytes of a file, and characters of a text.
_MOST_PLACES, _MOST_SAMPLES = 20_000, 500_000
_MOST_ENTRIES, _MOST_BYTES, _MOST_TEXT = 10_000, 2**26, 60
# Read through a library these matter as well; a library's clocks, threads and folders do not.
_THROUGH_LIBRARIES = frozenset({"entropy", "seed", "file", "connection"})
# torch's numbers come from its own generators; its Python code draws entropy for names alone.
_NAMES = ["torch", "entropy"]
# Python's own modules read these for themselves.
_BY_PROGRAM = frozenset({"clock", "address", "process number"})
_OWN, _STANDARD = "own", ""
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
# Bound before it is wrapped, so that the watch does not note its own reads.
_clock = time.monotonic_ns
_Handler: TypeAlias = Callable[["OutsideWatch", Any], None]


class _Source:
    """A function that notes what it returns.

    An object, and no function, since a class may hold one (``clock = time.time``): a function would
    become a method there.
    """

    def __init__(self, watch: "OutsideWatch", owner: object, name: str, kind: str) -> None:
        self.__wrapped__ = getattr(owner, name)
        self.__name__ = self.__qualname__ = name
        self.__module__ = getattr(owner, "__name__", "")  # where pickle finds it
        self.__doc__ = self.__wrapped__.__doc__
        self._watch, self._kind = watch, kind
        self._what = f"{self.__module__}.{name}".replace("random._urandom", "os.urandom")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.__wrapped__(*args, **kwargs)
        said = (args, kwargs) if self._kind == "seed" else found
        self._watch.note(self._kind, self._what, lambda: _cut(said))
        return found

    # torch.compile need not trace what it cannot compile in any case.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own mark

    def __reduce__(self) -> str:
        return self.__name__


class OutsideWatch:
    """Writes the reads from outside of this process, and of those that it forks, to a folder.

    Attributes:
        generators: Paths of the generators in the data of the fit whose ledger begins next.
    """

    _hooked: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self.generators: tuple[str, ...] = ()
        self._folder = str(folder.absolute())
        # As the clock.
        self._read_pid = os.getpid
        self._pid = 0
        self._counts: Counter[tuple[object, ...]] = Counter()
        self._written: set[str] = set()
        self._samples = 0
        self._busy = threading.local()
        self._owners: dict[str, str] = {}
        paths = sysconfig.get_paths()
        self._standard = (paths["stdlib"], paths["platstdlib"], os.path.dirname(os.__file__), "<")  # noqa: PTH120 - text
        self._installed = (
            f"{sys.prefix}/",
            f"{sys.base_prefix}/",
            "/proc/self",
            "/sys/",
            self._folder,
        )
        self._package = os.path.join(str(Path(__file__).parents[2]), "")  # noqa: PTH118 - ends in a separator
        self._patches = AttributePatches()

    def start(self) -> None:
        """Watch from now on, in this process and those that it forks."""
        Watched.watch = self
        for module, name, kind in _list_sources():
            self._replace(module, name, _Source(self, module, name, kind))
        self._replace(random.Random, "seed", self._wrap_seed(random.Random.seed))
        self._replace(random, "seed", random._inst.seed)  # noqa: SLF001 - bound before
        for kind, owner in (("process", BaseProcess), ("thread", threading.Thread)):
            self._replace(owner, "start", self._wrap_start(kind, owner.start))
        if not OutsideWatch._hooked:  # a hook cannot be removed; it asks for the current watch
            OutsideWatch._hooked = True
            sys.addaudithook(_audit)

    def stop(self) -> None:
        """Restore what was wrapped; the audit hook does nothing from now on."""
        Watched.watch = None
        self._patches.undo()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        holders = [(owner, name)]
        # Modules of the program that have imported the function by its name, before torch.
        for module in [*sys.modules.values()]:
            file = getattr(module, "__file__", None)
            if file and self._owner(file) == _OWN:
                holders += [(module, key) for key, own in vars(module).items() if own is original]
        for holder, key in holders:
            self._patches.replace(holder, key, value)

    def _wrap_seed(self, original: Callable[..., None]) -> Callable[..., None]:
        def seed(self: random.Random, a: Any = None, *args: Any, **kwargs: Any) -> None:
            original(self, a, *args, **kwargs)
            if watch := Watched.watch:
                what = "random.seed" if self is random._inst else "random.Random"  # noqa: SLF001
                kind = "entropy" if a is None else "seed"
                watch.note(kind, what, lambda: _cut(a or self.getstate()))

        return seed

    def _wrap_start(self, kind: str, original: Callable[..., None]) -> Callable[..., None]:
        def start(self: object) -> None:
            if watch := Watched.watch:
                watch.note(kind, _name_target(self))
            original(self)

        return start

    def _owner(self, file: str) -> str:
        """Return the package of a file; a constant for the program's own and Python's files."""
        if file not in self._owners:
            self._owners[file] = self._classify(file)
        return self._owners[file]

    def _classify(self, file: str) -> str:
        if file.startswith(self._package):
            return "lightning_d9m"
        _, found, inside = file.rpartition("-packages/")  # site- or dist-packages
        if found:
            return inside.partition("/")[0].removesuffix(".py")
        return _STANDARD if file.startswith(self._standard) else _OWN

    def _find_line(self, kind: str, frame: FrameType | None) -> tuple[str, int, str] | None:
        """Return file and line of the program, and the libraries between; None to skip it."""
        libraries: list[str] = []
        while frame is not None:
            file = frame.f_code.co_filename
            owner = self._owner(file)
            if owner == _OWN:
                return file, frame.f_lineno, ", ".join(libraries)
            if owner == "lightning_d9m":
                return None
            if owner == _STANDARD:
                # Temporary names are noted where they are made, and what a library draws while it
                # is imported does not reach the training.
                # A library makes such names, and identifiers, for itself.
                names = ("tempfile.py", "uuid.py") if libraries else ("tempfile.py",)
                draws = kind == "entropy" and file.endswith(names)
                imports = libraries and file.startswith("<frozen importlib")
                if draws or imports or kind in _BY_PROGRAM:
                    return None
            elif kind not in _THROUGH_LIBRARIES or (not libraries and [owner, kind] == _NAMES):
                return None
            elif owner not in libraries:
                libraries.insert(0, owner)
            frame = frame.f_back
        return None

    def note(
        self,
        kind: str,
        what: str,
        value: Callable[[], str | None] | None = None,
        path: str = "",
    ) -> None:
        """Write a read, unless no line of the program is behind it.

        Args:
            kind: The kind of read.
            what: What was read, for people.
            value: Returns what tells the value from another run's; None if nothing does.
            path: The file that was read; each is a place.
        """
        if not getattr(self._busy, "now", False):
            self._busy.now = True
            try:
                with suppress(Exception):  # an error here would end the program's call
                    self._note(kind, what, value, path)
            finally:
                self._busy.now = False

    def _note(
        self, kind: str, what: str, value: Callable[[], str | None] | None, path: str
    ) -> None:
        line = self._find_line(kind, _find_caller())
        if line is None:
            return
        if self._pid != self._read_pid():  # forked
            self._pid = self._read_pid()
            self._counts.clear()
        place = (kind, line, path)
        if place not in self._counts and len(self._counts) >= _MOST_PLACES:
            return
        count = self._counts[place]
        self._counts[place] += 1
        if count < _FIRST_READS or count & (count - 1) == 0:
            file, number, libraries = line
            own = [os.path.abspath(file), number, libraries]  # noqa: PTH100 - text
            self._write({"time": _clock(), "read": [kind, what, value and value(), *own]})

    def mark(self, moment: str, epoch: int, step: int, batch: int = 0) -> None:
        """Write a moment of the ledger."""
        self._write({"time": _clock(), "mark": [moment, epoch, step, batch]})

    def begin(self, ledger: Path, rank: int) -> None:
        """Write that a ledger begins, the line of the program that trains, and the generators."""
        frame = _find_caller()
        while frame is not None and self._owner(frame.f_code.co_filename) != _OWN:
            frame = frame.f_back
        line = (os.path.abspath(frame.f_code.co_filename), frame.f_lineno) if frame else ("", 0)  # noqa: PTH100
        begun = [ledger.name, rank, *line]
        self._write({"time": _clock(), "ledger": begun, "generators": self.generators})

    def take_samples(self, batch: Any) -> None:
        """Write a digest of each sample of a batch, to tell an order from content."""
        if self._samples < _MOST_SAMPLES:
            rows = list(_digest_rows(batch))
            self._samples += len(rows)
            self._write({"time": _clock(), "samples": rows})

    def note_file(self, path: Any, mode: Any, flags: Any) -> None:
        """Note a file that the program opens to read, unless it wrote it itself."""
        if not isinstance(path, str | bytes | os.PathLike) or getattr(self._busy, "now", False):
            return
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a file's name need not be a Path's
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else flags & 3
        if writes:
            self._written |= {name} if len(self._written) < _MOST_PLACES else set()
        elif (
            not name.startswith(self._installed)
            and not name.endswith((".py", ".pyc"))
            and name not in self._written
        ):
            self.note("file", name, lambda: _digest_file(name), name)

    def note_listing(self, folder: Any) -> None:
        """Note a listing: the order of the names, and that of the times at which they changed."""
        if isinstance(folder, int) or getattr(self._busy, "now", False):
            return
        name = os.path.abspath(os.fsdecode(folder or "."))  # noqa: PTH100
        self.note("listing", name, lambda: _digest_listing(name))
        self.note("times", name, lambda: _digest_listing(name, by_time=True))

    def _write(self, record: dict[str, object]) -> None:
        # Opened each time: a program may close all files that it does not know, and open its own
        # under the same number.
        busy, self._busy.now = getattr(self._busy, "now", False), True
        try:
            place = f"{self._folder}/{PATTERN.replace('*', str(self._read_pid()))}"
            with suppress(OSError), open(place, "a", encoding="utf-8") as file:  # noqa: PTH123
                file.write(json.dumps(record) + "\n")
        finally:
            self._busy.now = busy


def _find_caller() -> FrameType | None:
    """Return the frame that called this module."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _audit(event: str, args: tuple[Any, ...]) -> None:
    watch = Watched.watch
    handler = _EVENTS.get(event)
    if watch is None or handler is None:
        return
    with suppress(Exception):  # an error here would end the program's call
        handler(watch, args)


def _note_event(kind: str, what: Callable[[Any], str], *, known: bool = False) -> _Handler:
    def handle(watch: OutsideWatch, args: Any) -> None:
        value = (lambda: what(args)) if known else None
        watch.note(kind, what(args), value)

    return handle


def _name_target(started: Any) -> str:
    """Return what a thread or process runs, for people."""
    target = getattr(started, "_target", None) or type(started).run
    name = getattr(target, "__qualname__", type(target).__qualname__)
    return f"{type(started).__name__} that runs {name}"


_EVENTS: dict[str, _Handler] = {
    "open": lambda watch, args: watch.note_file(*args[:3]),
    "sqlite3.connect": _note_event("connection", lambda args: _cut(args[0])),
    "os.listdir": lambda watch, args: watch.note_listing(args[0]),
    "os.scandir": lambda watch, args: watch.note_listing(args[0]),
    "builtins.id": _note_event("address", lambda _: "id"),
    "tempfile.mkdtemp": _note_event("temporary name", lambda args: _cut(args[0]), known=True),
    "tempfile.mkstemp": _note_event("temporary name", lambda args: _cut(args[0]), known=True),
    "subprocess.Popen": _note_event("process", lambda args: _cut(args[1])),
    "os.fork": _note_event("process", lambda _: "fork"),
    "socket.connect": _note_event("connection", lambda args: _cut(args[1])),
}


def _list_sources() -> Iterator[tuple[ModuleType, str, str]]:
    """Yield the functions that Python reports to no audit hook: module, name and kind."""
    yield from ((time, f"{name}{unit}", "clock") for name in _CLOCKS for unit in ("", "_ns"))
    yield from ((time, name, "clock") for name in ("localtime", "gmtime", "ctime", "strftime"))
    yield from ((os, name, "entropy") for name in ("urandom", "getrandom") if hasattr(os, name))
    yield from ((random, "_urandom", "entropy"), (uuid, "uuid1", "entropy"))
    yield from ((os, "getpid", "process number"), (os, "getppid", "process number"))
    yield from ((threading, "get_ident", "address"), (threading, "get_native_id", "process number"))
    import numpy as np
    import torch

    yield (np.random, "seed", "seed")
    for module in (torch, torch.random):
        yield from ((module, "manual_seed", "seed"), (module, "seed", "entropy"))


def _cut(value: object) -> str:
    """Return a value as a short text that differs if the value does."""
    text = value if isinstance(value, str) else repr(value)
    return (
        text
        if len(text) <= _MOST_TEXT
        else xxh3_64_hexdigest(text.encode(errors="surrogateescape"))
    )


def _digest_file(path: str) -> str | None:
    """Return the digest of a file's content; None if it cannot be told by reading it."""
    if not os.path.exists(path) or os.path.isdir(path):  # noqa: PTH110, PTH112 - as below
        return "no content"
    with suppress(OSError):
        found = os.stat(path)  # noqa: PTH116 - as the program named it
        if stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES:
            with open(path, "rb") as file:  # noqa: PTH123
                return xxh3_64_hexdigest(file.read(_MOST_BYTES))
        if stat.S_ISREG(found.st_mode):
            return f"{found.st_size} bytes of {found.st_mtime_ns}"
    return None


def _digest_listing(folder: str, *, by_time: bool = False) -> str | None:
    """Return the digest of the order of a folder's entries."""
    with suppress(OSError):
        names = os.listdir(folder)[:_MOST_ENTRIES]  # noqa: PTH208 - the order of the system
        if by_time:
            times = {n: os.stat(f"{folder}/{n}").st_mtime_ns for n in sorted(names)}  # noqa: PTH116
            names = sorted(times, key=times.__getitem__)
        return xxh3_64_hexdigest(os.fsencode("\0".join(names)))
    return None


def _digest_rows(batch: Any) -> Iterator[str]:
    """Yield a digest of each sample of a batch: of the rows that its tensors have in common."""
    import torch

    from lightning_d9m.engine.hashing.nested_values import list_pytree_leaves

    leaves = [leaf for _, leaf in list_pytree_leaves(batch)]
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not tensors or len({len(tensor) for tensor in tensors}) > 1:
        return
    rows = [t.cpu().contiguous().reshape(len(t), -1).view(torch.uint8).numpy() for t in tensors]
    for parts in zip(*rows, strict=True):
        yield xxh3_64_hexdigest(b"".join(part.tobytes() for part in parts))[:12]


def watch_process() -> None:
    """Watch this process if the variable names a folder."""
    folder = os.environ.get(VARIABLE)
    if folder and Watched.watch is None:
        OutsideWatch(Path(folder)).start()
