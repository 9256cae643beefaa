"""The state around each hook of a framework, which tells which hook wrote to it.

Framework-free: the framework's profiler says when a hook begins and ends.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from lightning_d9m.hashing.digest import digest_value
from lightning_d9m.probes.trace import Leaves, Listener

_FILE = "hooks.jsonl"


class StateDigest(Listener):
    """Digests the values whose names match patterns."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._digests: list[str] = []

    def add_leaves(self, kind: str, leaves: Leaves) -> None:  # noqa: ARG002 - see Listener
        """Take values with the names of their places."""
        for name, leaf in leaves:
            if any(fnmatchcase(name, pattern) for pattern in self._names):
                self._digests.append(digest_value(leaf))

    def digest(self) -> str:
        """Return the digest of all values that were taken."""
        return digest_value(self._digests)


Profile = Callable[[str], AbstractContextManager[object]]


def trace_hooks(folder: Path, take: Callable[[], str | None], profile: Profile) -> Profile:
    """Return a profiler's method ``profile`` that also writes a line before and after each hook.

    Args:
        folder: The folder of a rank's dumps.
        take: Returns the digest of the state; None where hooks are not traced.
        profile: The method.
    """

    def write(when: str, name: str) -> None:
        if (digest := take()) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / _FILE).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps([when, name, digest]) + "\n")

    @contextmanager
    def traced(name: str) -> Iterator[object]:
        write("before", name)
        with profile(name) as given:
            yield given
        write("after", name)

    return traced


def find_writer(folders: Sequence[Path], rank: int) -> str:
    """Return what ran when the state of two runs began to differ; empty if it is not known.

    Args:
        folders: The folders of the dumps of both runs.
        rank: The rank.
    """
    files = [folder / f"rank-{rank}" / _FILE for folder in folders]
    if not all(file.exists() for file in files):
        return ""
    lines = [map(json.loads, file.read_text("utf-8").splitlines()) for file in files]
    last: tuple[str, str] | None = None
    for (when, name, digest), other in zip(*lines, strict=False):
        if [when, name] != other[:2]:
            return ""
        if digest != other[2]:
            return "" if last is None else _describe(*last, when, name)
        last = (when, name)
    return ""


def _describe(last_when: str, last: str, when: str, name: str) -> str:
    """Return what ran between two lines of a trace.

    >>> _describe("before", "[Callback]EMA.on_fit_end", "after", "[Callback]EMA.on_fit_end")
    'while EMA.on_fit_end ran'
    >>> _describe("after", "[Callback]A.setup", "before", "run_training_epoch")
    'between A.setup and run_training_epoch, in no hook: by the training loop or a thread'
    """
    last, name = (text.rpartition("]")[2] for text in (last, name))
    if when == "after":
        return f"while {name} ran"
    if last_when == "before":
        return f"while {last} ran, before {name}"
    return f"between {last} and {name}, in no hook: by the training loop or a thread"
