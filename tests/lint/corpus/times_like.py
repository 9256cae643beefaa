"""Files in the order of the times at which they changed."""

import os
from os.path import getmtime
from pathlib import Path
from weakref import WeakSet


class Shards:
    def __init__(self, root: Path):
        self.paths = sorted(root.glob("*.pt"), key=os.path.getmtime)  # expect: D9M306
        self.parts = [*sorted(root.glob("*"))]  # fine
        self.parts.sort(key=lambda path: path.stat().st_mtime_ns)  # expect: D9M306

    def __getitem__(self, index):
        return self.paths[index]

    def __iter__(self):
        yield from self.parts


def find_checkpoint(files):
    newest = sorted(files, key=os.path.getmtime)[-1]  # fine
    by_age = sorted(files, key=getmtime)  # fine
    return newest, by_age[0]


def list_alive(parts):
    return list(WeakSet(parts))  # expect: D9M301
