"""The files that a program saves, whose tensors are digested when they are written.

What a program publishes may be in no ledger: an exponential moving average, a merged adapter, a
model that was loaded again. With ``LIGHTNING_D9M_RECORD_SAVES=1``, which ``d9m repeat`` sets, each
call of ``torch.save`` and ``safetensors`` with a path adds a record to a ledger ``saved-NNN``;
``save_pretrained`` calls them. Records are compared by their order among the files of one name,
whose digits do not count: runs number and date their files. Only tensors and arrays count: a zip
file's bytes vary with its time, and a program's numbers with the clock.

A segment of an earlier run writes nothing to a path, because that run has written files of the same
names.

A checkpoint of a Trainer goes through memory, has no path here, and is in the ledger of its fit.
"""

import copyreg
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial, wraps
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.engine.hashing.digest import DigestQueue, digest_value
from lightning_d9m.engine.hashing.nested_values import list_pytree_leaves
from lightning_d9m.engine.ledger.folder import state_folder
from lightning_d9m.engine.ledger.format.records import Digests, End
from lightning_d9m.engine.ledger.kinds import SAVED, UNREAD, name_saved
from lightning_d9m.engine.recording.interruption import is_segment
from lightning_d9m.engine.recording.run import Run
from lightning_d9m.engine.state.parts import CODE
from lightning_d9m.errors import DigestError
from lightning_d9m.integrations.loop.recorder import find_ranks, open_alone

_SAFETENSORS = ("safetensors.torch", "safetensors.numpy")
_PLAIN = (str, bytes, int, float, complex, type(None))


class SavedFiles:
    """The wrapped functions that save, and the ledger of what they saved."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._is_segment = is_segment()
        self._run: Run | None = None
        self._numbers: Counter[str] = Counter()
        self._hooks = ExitStack()

    def install(self, call_after_import: Callable[[str, Callable[[], None]], None]) -> None:
        """Wrap what saves, in modules that are imported later, too; ``remove`` restores it."""
        patches = AttributePatches()
        # First, so that it is undone last, after the ledger is finished.
        self._hooks.callback(patches.undo)
        # A program may call it by either name, and libraries do.
        for owner in (torch, torch.serialization):
            patches.replace(owner, "save", self._wrap(torch.serialization.save))

        def wrap_later(name: str) -> None:
            module = sys.modules[name]
            patches.replace(module, "save_file", self._wrap(module.save_file))

        for name in _SAFETENSORS:
            call_after_import(name, partial(wrap_later, name))
        # As for the ledger of optimizer steps, also at the end of a process of multiprocessing.
        self._hooks.callback(Finalize(None, self._finish, exitpriority=0).cancel)

    def remove(self) -> None:
        """Finish the ledger and restore what was wrapped."""
        with self._hooks:
            self._finish()

    def _wrap(self, save: Callable[..., Any]) -> Callable[..., Any]:
        # A second installation in a process would record each file twice.
        if hasattr(save, "_records_saves"):
            return save

        @wraps(save)
        def save_and_record(value: Any, file: Any, *args: Any, **words: Any) -> Any:
            if self._is_segment and isinstance(file, str | os.PathLike):
                return None
            result = save(value, file, *args, **words)
            name = getattr(file, "name", file)  # of an open file
            if not self._is_segment and isinstance(name, str | os.PathLike):
                with self._lock, suppress(Exception):  # the program did not ask for a ledger
                    self._record(value, Path(os.fspath(name)).name)
            return result

        save_and_record._records_saves = True  # type: ignore[attr-defined]  # noqa: SLF001 - of ours
        return save_and_record

    def _record(self, value: Any, name: str) -> None:
        # The variable tells before a process group exists.
        if find_ranks()[0].rank or os.environ.get("RANK", "0") != "0":
            return
        if self._process != os.getpid():  # forked: the ledger belongs to the parent process
            return
        moment = name_saved(name)
        groups = _digest_groups(value)
        if not groups:  # an empty record would be equal to any other one
            return
        if self._run is None:  # after all that may fail: an empty ledger would prove nothing
            self._run = open_alone(torch.nn.Module(), state_folder(), SAVED)
            Run.open_runs.discard(self._run)  # it records no training
        totals = {group: digest_value(sorted(named.items())) for group, named in groups.items()}
        number = self._numbers[moment]
        self._numbers[moment] += 1
        self._run.append(Digests(moment=moment, epoch=number, step=0, totals=totals, groups=groups))

    def _finish(self) -> None:
        run, self._run = self._run, None
        if run is not None and self._process == os.getpid():
            run.end(End(status="finished"))


def _digest_groups(value: Any) -> dict[str, dict[str, str]]:
    """Return the digests of the tensors and arrays in what is saved, and what has none."""
    groups: dict[str, dict[str, str]] = {SAVED: {}, UNREAD: {}}
    queue = DigestQueue()
    names: list[str] = []
    for path, leaf in _list_data(value, "", {}):
        name = path or "value"
        while name in names or name in groups[UNREAD]:
            name += "'"
        try:
            if isinstance(leaf, torch.Tensor):
                queue.add([leaf])
            else:
                queue.add_value(leaf)
            names.append(name)
        except DigestError:
            groups[UNREAD][name] = digest_value(type(leaf))
    groups[SAVED] = dict(zip(names, queue.fetch(), strict=True))
    return {group: named for group, named in groups.items() if named}


def _list_data(value: Any, above: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays in what is saved, and what cannot be read, with their paths.

    Objects are entered as pickle does, so that all that reaches the file is found.

    Args:
        value: What is saved, or a part of it.
        above: The path of the part.
        seen: What was entered, by ``id``; kept, so that no new object has the same one.
    """
    for inner, leaf in list_pytree_leaves(value):
        path = ".".join(filter(None, (above, inner)))
        if isinstance(leaf, (*_PLAIN, *CODE)) or id(leaf) in seen:
            continue
        array = leaf if isinstance(leaf, np.ndarray) else None
        if isinstance(leaf, torch.Tensor) or (array is not None and array.dtype != object):
            yield path, leaf
        elif array is not None and all(isinstance(own, _PLAIN) for own in array.flat):
            yield path, array.tolist()  # such as names
        elif isinstance(leaf, Mapping | list | tuple | deque):
            # A leaf if it holds only numbers and texts, or is nested too deep, or in itself.
            held = leaf.values() if isinstance(leaf, Mapping) else leaf
            if not all(isinstance(own, _PLAIN) for own in held):
                seen[id(leaf)] = leaf
                yield from _list_data(leaf, path, seen)
        else:
            seen[id(leaf)] = leaf
            if isinstance(leaf, torch.nn.Module):
                state = leaf.state_dict(keep_vars=True)
                yield from _list_data(state, path, seen)
                seen |= {id(own): own for own in state.values()}
            try:
                parts = _reduce(leaf)
            except Exception:  # noqa: BLE001 - whatever an object raises
                yield path, leaf
            else:
                yield from _list_data(parts, path, seen)


def _reduce(value: Any) -> dict[str, Any]:
    """Return what pickle stores of an object, by the names of its attributes if it has them."""
    if isinstance(value, np.ndarray | set | frozenset):
        items = value.flat if isinstance(value, np.ndarray) else value
        return {str(number): own for number, own in enumerate(items)}
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = value.__reduce_ex__(2) if reduce is None else reduce(value)
    if isinstance(reduced, str):  # the name of a global
        return {}
    _, arguments, state, items, entries = (*reduced, None, None, None)[:5]
    parts = {"arguments": arguments, "items": [*(items or ())], "entries": dict(entries or ())}
    return {**state, **parts} if isinstance(state, dict) else {"state": state, **parts}
