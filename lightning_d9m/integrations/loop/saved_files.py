"""The files that a program saves, whose tensors are digested when they are written.

What a program publishes may be in no ledger: an exponential moving average, a merged adapter, a
model that was loaded again. With ``LIGHTNING_D9M_RECORD_SAVES=1``, which ``d9m repeat`` sets, each
call of ``torch.save`` and ``safetensors`` with a path adds a record to a ledger ``saved-NNN``;
``save_pretrained`` calls them. Records are compared by their order among the files of one name,
whose digits do not count: runs number and date their files. Only tensors and arrays count: a zip
file's bytes vary with its time, and a program's numbers with the clock.

A segment of an earlier run must not write over the files of that run: it saves to a folder of its
own, and finds its files there.

A checkpoint of a Trainer goes through memory, has no path here, and is in the ledger of its fit.
"""

import builtins
import inspect
import io
import os
import shutil
import sys
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_d9m.engine.hashing.digest import DigestQueue, digest_value
from lightning_d9m.engine.hashing.nested_values import read_saved
from lightning_d9m.engine.ledger.folder import state_folder
from lightning_d9m.engine.ledger.format.records import Digests, End
from lightning_d9m.engine.ledger.kinds import SAVED, UNREAD, name_saved
from lightning_d9m.engine.recording.interruption import FOLDER, SAVED_FILES, is_segment
from lightning_d9m.engine.recording.run import Run
from lightning_d9m.engine.state.parts import CODE
from lightning_d9m.integrations.loop.process_hooks import ProcessHooks
from lightning_d9m.integrations.loop.recorder import find_ranks, open_alone

_SAFETENSORS = ("safetensors.torch", "safetensors.numpy")
_PLAIN = (str, bytes, int, float, complex, type(None))
_FEW_BYTES = 1024  # of names, keys and other texts
_CONTAINERS, _MAPPINGS = (list, tuple, deque, torch.Size), (dict, OrderedDict, defaultdict)
_PARTS = object()
_MODULES = ("_parameters", "_buffers", "_modules")
# Most of what is saved beside tensors, such as a vocabulary; none of it counts.
_UNCOUNTED = frozenset((str, int, float, complex, bool, type(None)))
# What a program does with files that it has saved, and how many of the first arguments are paths.
_USES = (
    (builtins, "open", 1),
    (io, "open", 1),
    *((os, name, 1) for name in ("remove", "unlink", "stat")),
    *((os, name, 2) for name in ("rename", "replace")),
    *((shutil, name, 2) for name in ("copy", "copy2", "copyfile", "move")),
)


class SegmentFiles:
    """The files that a segment has saved, all its ranks and workers, and the place of each."""

    def __init__(self) -> None:
        self._folder = Path(os.environ.get(FOLDER) or tempfile.mkdtemp(), SAVED_FILES)

    def place(self, path: str | os.PathLike[str]) -> Path:
        """Return where the file of a path is saved."""
        full = os.path.abspath(path)  # noqa: PTH100 - of a file that may not exist
        name = blake2b(os.fsencode(full), digest_size=16).hexdigest()
        return self._folder / name

    def has(self, path: object) -> bool:
        """Return whether the segment has saved a file of this path."""
        if not isinstance(path, str | os.PathLike) or not os.path.lexists(self._folder):
            return False
        return os.path.lexists(self.place(path))

    def wrap(self, call: Callable[..., Any], count: int) -> Callable[..., Any]:
        """Return a function that finds the files of the segment by their paths."""

        @wraps(call)
        def call_in_place(*args: Any, **words: Any) -> Any:
            own = [self.has(path) for path in args[:count]]
            if not any(own):
                return call(*args, **words)
            paths = list(args[:count])
            if count > 1 and os.path.isdir(paths[1]):  # noqa: PTH112 - of any kind of path
                paths[1] = Path(paths[1], Path(paths[0]).name)
            # Another file may take the place of one of the segment, and then is one itself.
            found = [self.place(each) if n or own[0] else each for n, each in enumerate(paths)]
            return call(*found, *args[count:], **words)

        return call_in_place


class SavedFiles(ProcessHooks):
    """The wrapped functions that save, and the ledger of what they saved."""

    def __init__(self) -> None:
        super().__init__()
        self._segment = SegmentFiles() if is_segment() else None
        self._run: Run | None = None
        self._numbers: Counter[str] = Counter()
        # The last file, until its name is known: what is saved atomically is renamed afterwards.
        self._last: tuple[Path, dict[str, dict[str, str]]] | None = None

    def install(self, call_after_import: Callable[[str, Callable[[], None]], None]) -> None:
        """Wrap what saves, in modules that are imported later, too; ``remove`` restores it."""
        patches = self._patches
        # A program may call it by either name, and libraries do.
        for owner in (torch, torch.serialization):
            patches.replace(owner, "save", self._wrap(torch.serialization.save))

        def wrap_later(name: str) -> None:
            module = sys.modules[name]
            patches.replace(module, "save_file", self._wrap(module.save_file))
            if self._segment is not None:
                patches.replace(module, "load_file", self._segment.wrap(module.load_file, 1))

        if self._segment is not None:
            for owner, name, count in _USES:
                patches.replace(owner, name, self._segment.wrap(getattr(owner, name), count))

        for name in _SAFETENSORS:
            call_after_import(name, partial(wrap_later, name))
        self._finish_at_exit()

    def _wrap(self, save: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(save)

        @wraps(save)
        def save_and_record(*args: Any, **words: Any) -> Any:
            # What is saved, and where: the first two, by their order or by their names.
            bound = signature.bind(*args, **words)
            (_, value), (second, file) = [*bound.arguments.items()][:2]
            if self._segment is not None:
                if isinstance(file, str | os.PathLike):
                    bound.arguments[second] = place = self._segment.place(file)
                    place.parent.mkdir(parents=True, exist_ok=True)
                return save(*bound.args, **bound.kwargs)
            result = save(*args, **words)
            name = getattr(file, "name", file)  # of an open file
            if isinstance(name, str | os.PathLike):
                with self._lock, suppress(Exception):  # the program did not ask for a ledger
                    self._record(value, Path(os.fspath(name)).absolute())
            return result

        return save_and_record

    def _record(self, value: Any, file: Path) -> None:
        # The variable tells before a process group exists.
        if find_ranks()[0].rank or os.environ.get("RANK", "0") != "0":
            return
        if get_worker_info() is not None:  # a loader's worker, which may write a cache
            return
        if self._is_forked():
            self._run, self._numbers, self._last = None, Counter(), None
        self._write_last()
        try:
            groups = _digest_groups(value)
        except Exception:  # noqa: BLE001 - of an object, or one that is nested too deep
            groups = {UNREAD: {"value": digest_value(type(value))}}
        if groups:  # an empty record would be equal to any other one
            self._last = file, groups

    def _write_last(self) -> None:
        if self._last is None:
            return
        (file, groups), self._last = self._last, None
        moment = name_saved(file.name, is_temporary=not file.exists())
        if self._run is None:  # after all that may fail: an empty ledger would prove nothing
            self._run = open_alone(torch.nn.Module(), state_folder(), SAVED)
            Run.open_runs.discard(self._run)  # it records no training
        totals = {group: digest_value(sorted(named.items())) for group, named in groups.items()}
        number = self._numbers[moment]
        self._numbers[moment] += 1
        self._run.append(Digests(moment=moment, epoch=number, step=0, totals=totals, groups=groups))

    def _end_ledger(self) -> None:
        with self._lock, suppress(Exception):  # as where the program saves
            self._write_last()
            run, self._run = self._run, None
            if run is not None:
                run.end(End(status="finished"))


def _digest_groups(value: Any) -> dict[str, dict[str, str]]:
    """Return the digests of the tensors and arrays in what is saved, and what has none."""
    found, times = dict[str, Any](), Counter[str]()
    for path, leaf in _list_data(value, "", {}):
        name = path or "value"
        found[f"{name}'{times[name]}" if times[name] else name] = leaf
        times[name] += 1
    # Bytes may hold tensors, or a time.
    unread = {n: "" for n, leaf in enumerate(found.values()) if isinstance(leaf, bytearray)}
    queue = DigestQueue()
    queue.add_leaves(
        (bytearray if n in unread else leaf for n, leaf in enumerate(found.values())),
        unread.setdefault,
    )
    groups: dict[str, dict[str, str]] = {SAVED: {}, UNREAD: {}}
    for number, (name, found_digest) in enumerate(zip(found, queue.fetch(), strict=True)):
        groups[UNREAD if number in unread else SAVED][name] = found_digest
    return {group: named for group, named in groups.items() if named}


def _list_data(value: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays in what is saved, and what cannot be read, with their paths.

    Objects are entered as pickle does, so that all that reaches the file is found.

    Args:
        value: What is saved, or a part of it.
        path: That of the part.
        seen: What was entered, by ``id``; kept, so that no new object has the same one.
    """
    if id(value) in seen:
        return
    seen[id(value)] = value
    leaf = _find_leaf(value)
    if leaf is not _PARTS:
        if leaf is not None:
            yield path, leaf
        return
    try:
        parts = _list_parts(value)
    except Exception:  # noqa: BLE001 - whatever an object raises
        yield path, value
        return
    for name, own in parts:
        yield from _list_data(own, ".".join(filter(None, (path, name))), seen)


def _find_leaf(value: Any) -> Any:
    """Return the tensor, array or object that a value is; None for one that does not count.

    Of a value that has parts, it returns ``_PARTS``.
    """
    leaf: Any = _PARTS
    is_array = isinstance(value, np.ndarray)
    if isinstance(value, bytes | bytearray):
        leaf = bytearray(value) if len(value) >= _FEW_BYTES else None
    elif isinstance(value, (*_PLAIN, *CODE)):
        leaf = None
    elif isinstance(value, torch.UntypedStorage | torch.TypedStorage):
        storage = value if isinstance(value, torch.UntypedStorage) else value.untyped()
        leaf = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    elif isinstance(value, torch.Tensor) or (is_array and not value.dtype.hasobject):
        leaf = value
    elif is_array and all(isinstance(own, _PLAIN) for own in value.flat):
        leaf = value.tolist()  # such as names
    elif isinstance(value, set | frozenset):
        # Their order is that of addresses or of hashes, which differ between equal runs.
        leaf = None if all(isinstance(own, _PLAIN) for own in value) else value
    return leaf


def _counts(value: object) -> bool:
    return type(value) not in _UNCOUNTED


def _list_parts(value: Any) -> list[tuple[str, Any]]:
    """Return what pickle stores of an object or a container, with its place."""
    kind = type(value)
    if kind in _CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return [(str(n), own) for n, own in enumerate(value) if _counts(own)]
    if kind in _MAPPINGS:
        # Of another key the text may have an address.
        named = [
            (str(key) if isinstance(key, str | int | float) else f"#{n}", own)
            for n, (key, own) in enumerate(value.items())
            if _counts(own)
        ]
        return [*named, *((f"#{n}", key) for n, key in enumerate(value) if _counts(key))]
    if isinstance(value, np.ndarray):
        return [(str(number), own) for number, own in enumerate(value.flat)]
    _, arguments, state, items, entries = read_saved(value)
    parts = [("state", state)]
    if isinstance(state, dict):
        is_module = isinstance(value, torch.nn.Module)
        # As the names of a state_dict.
        parts = [
            ("" if is_module and name in _MODULES else name, own) for name, own in state.items()
        ]
    others = (("arguments", arguments), ("items", items), ("entries", entries))
    return [*((str(name), own) for name, own in parts), *others]
