"""Files that runs of a command leave behind, and that later runs may read.

What the file system knows of a file tells whether a run wrote or read it, so it does not matter how
a program does so: through Python, a library in another language, a database or another process.
"""

import os
import re
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from stat import S_ISREG

from lightning_d9m.engine.hashing.files import hash_file, read_sign
from lightning_d9m.text import printable

# Of a folder's files and folders, the least nested first. The home may be on a slow network.
_MOST_FILES, _MOST_SHARED = 20_000, 2000
_MOST_SHOWN = 5
# Of the files of one run, as they are listed, so many bytes are read: a second on most disks.
_MOST_BYTES = 2**30
# Their many files change in each run, such as bytecode, and are not what a program reads as data.
_LEFT_OUT = frozenset({".git", "__pycache__", ".venv", "site-packages", "node_modules"})


class FileWatch:
    """The files in the folders of a command, as they are before and after each run.

    The folders are the working folder, those of the files that the command names, the home folder
    and that of temporary files. Programs beside the runs may write there, too.

    ``left_out`` is the folder of the runs' own files.
    """

    def __init__(self, command: Sequence[str], left_out: Path) -> None:
        # A word may be a program, which is too long for a path: `Path` raises an error then.
        named = [Path(word).parent for word in command[1:] if os.path.isfile(word)]  # noqa: PTH113 - as above
        self._own = [place.resolve() for place in (Path.cwd(), *named)]
        # Libraries keep caches below the home, and programs leave files among temporary ones.
        shared = [place.resolve() for place in (Path(tempfile.gettempdir()), Path.home())]
        self._folders = list(dict.fromkeys([*self._own, *shared]))
        self._left_out = str(left_out.resolve())
        self._files = self._list_files()
        self._runs = 0
        # By path, what each run wrote there; None where that was not read, as too much was written.
        self._written: dict[str, dict[int, str | None]] = {}
        self._read: dict[str, list[int]] = {}

    def note_run(self) -> None:
        """Note what changed in a run, after it."""
        self._runs += 1
        before, self._files = self._files, self._list_files()
        for path, (sign, read) in self._files.items():
            # A new file has no sign before, so it counts as written.
            known_sign, known_read = before.get(path, (None, read))
            if known_sign != sign:
                self._written.setdefault(path, {})[self._runs] = None
            # Most systems mount with relatime, which notes only the first read after a write: a
            # time that has changed proves a read, and one that has not proves nothing.
            elif known_read != read:
                self._read.setdefault(path, []).append(self._runs)
        left = _MOST_BYTES  # of the contents of what this run and all before it wrote
        for path, contents in self._written.items():
            if len(contents) < self._runs or not self._is_own(path):
                continue
            with suppress(OSError):  # it was removed meanwhile, or may not be read
                status = Path(path).stat()
                # To open a pipe would wait for the other end.
                if S_ISREG(status.st_mode) and status.st_size <= left:
                    left -= status.st_size
                    contents[self._runs] = hash_file(Path(path))
                # This must not count as a read by the next run.
                self._files[path] = self._files[path][0], Path(path).stat().st_atime_ns

    def describe_written(self, is_compared: Callable[[str], bool]) -> str:
        """Return a sentence on the files that every run wrote and whose content is in no ledger.

        Args:
            is_compared: Whether a ledger has the content of a file of this name.
        """
        found: dict[str, list[str]] = {"different bytes": [], "not compared": [], "equal bytes": []}
        names = Counter(
            _without_numbers(path) for path, runs in self._written.items() if len(runs) == 1
        )
        alone = []
        for path, contents in sorted(self._written.items()):
            if is_compared(Path(path).name) or not self._is_own(path):
                continue
            if len(contents) == self._runs:
                digests = {*contents.values()}
                kind = "different bytes" if len(digests) > 1 else "equal bytes"
                found["not compared" if None in digests else kind].append(path)
            # Under names that differ in more than numbers, which no counterpart can be found for.
            elif len(contents) == names[_without_numbers(path)] == 1:
                alone.append(path)
        if len({run for path in alone for run in self._written[path]}) == self._runs:
            found["under another name in each run, not compared"] = alone
        said = [f"{self._list_names(paths)} ({kind})" for kind, paths in found.items() if paths]
        return f"all runs wrote files that no ledger covers: {'; '.join(said)}." if said else ""

    def describe(self, *, first_alone: bool) -> str:
        """Return a sentence on the files through which a run may have changed a later one.

        Args:
            first_alone: Whether only the first run differs from the others. If so, files that it
                wrote are named even if no later run is known to read them (a file system need not
                note that), and those in the home folder and among temporary files.
        """
        used = [
            path
            for path, runs in self._written.items()
            if max((*runs, *self._read.get(path, ()))) > min(runs)
            and (first_alone or self._is_own(path))
        ]
        said = "written in one run and read or written in a later one"
        if not used and first_alone:
            used = [path for path, runs in self._written.items() if 1 in runs]
            said = "written in run 1"
        if not used:
            return ""
        # Those of a numbered folder for each run, such as a logger's, are the least likely.
        kinds = Counter(map(_without_numbers, self._written))
        used.sort(key=lambda path: (kinds[_without_numbers(path)], not self._is_below(path), path))
        return f"Files {said}: {self._list_names(used)}."

    def _list_names(self, paths: Sequence[str]) -> str:
        names = [os.path.relpath(path) if self._is_below(path) else path for path in paths]
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        return f"{', '.join(map(printable, names[:_MOST_SHOWN]))}{more}"

    def _is_own(self, path: str) -> bool:
        return any(map(Path(path).is_relative_to, self._own))

    def _is_below(self, path: str) -> bool:
        return Path(path).is_relative_to(self._own[0])

    def _list_files(self) -> dict[str, tuple[object, int]]:
        """Return what tells whether each file was written, and when it was read."""
        found: dict[str, tuple[object, int]] = {}
        for folder in self._folders:
            most = _MOST_FILES if folder in self._own else _MOST_SHARED
            for entry in islice(self._walk(str(folder)), most):
                with suppress(OSError):  # it was removed meanwhile
                    if entry.is_dir(follow_symlinks=False):
                        continue
                    stat = entry.stat(follow_symlinks=False)
                    found[entry.path] = read_sign(stat), stat.st_atime_ns
        return found

    def _walk(self, folder: str) -> Iterator["os.DirEntry[str]"]:
        # Breadth first: where the limit cuts, the files near the top have been seen.
        waiting = deque([folder])
        while waiting:
            with suppress(OSError), os.scandir(waiting.popleft()) as entries:
                for entry in entries:
                    yield entry
                    if (
                        entry.is_dir(follow_symlinks=False)
                        and entry.name not in _LEFT_OUT
                        and entry.path != self._left_out
                    ):
                        waiting.append(entry.path)


def _without_numbers(path: str) -> str:
    return re.sub(r"\d+", "", path)
