"""Orders that nobody fixed, and those that do not matter."""

import glob
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
from torch import nn

LABELS = {"cat", "dog", "bird"}
COUNTS = {1, 2, 3}


def list_sorted(folder, root: Path):
    files = os.listdir(folder)  # fine
    files.sort()
    names = sorted(os.listdir(folder))  # fine
    paths = sorted(root.glob("*.png"))  # fine
    more = sorted(p for p in root.rglob("*") if p.is_file())  # fine
    known = set(os.listdir(folder))  # fine
    number = len(os.listdir(folder))  # fine
    there = "a.png" in os.listdir(folder)  # fine
    for path in root.iterdir():  # fine
        path.unlink()
    return files, names, paths, more, known, number, there


class Images:
    def __init__(self, folder, root):
        self.paths = glob.glob(f"{folder}/*.png")  # expect: D9M302
        self.labels = list(Path(root).iterdir())  # expect: D9M302
        self.ordered = list(Path(root).glob("*.txt"))  # fine
        self.ordered.sort()
        self.samples = []
        for entry in os.scandir(folder):  # expect: D9M302
            self.samples.append(entry.path)
        for path in Path(root).rglob("*.npy"):  # expect: D9M302
            self.samples.append(np.load(path))
        [self.only] = Path(root).glob("*.json")  # fine

    def __getitem__(self, index):
        return self.paths[index], self.ordered[index], self.labels[index]


def number_words(text, tokens):
    vocabulary = set(text.split())
    bad = {word: i for i, word in enumerate(vocabulary)}  # expect: D9M301
    good = {word: i for i, word in enumerate(sorted(vocabulary))}  # fine
    kept = list(dict.fromkeys(tokens))  # fine
    size = len(set(tokens))  # fine
    seen = "cat" in vocabulary  # fine
    longest = max(len(word) for word in vocabulary)  # fine
    array = np.array(list({"a", "b"}))  # expect: D9M301
    numbers = list({3, 1, 2})  # fine
    few = [count for count in COUNTS]  # fine
    return bad, good, kept, size, seen, longest, array, numbers, few


class Heads(nn.Module):
    def __init__(self, tasks: set[str]):
        super().__init__()
        self.heads = nn.ModuleDict()
        for task in tasks:  # expect: D9M301
            self.heads[task] = nn.Linear(4, 1)
        self.names = []
        for label in LABELS:  # expect: D9M301
            self.names.append(label)
        for label in sorted(LABELS):  # fine
            self.names.append(label)
        for label in LABELS:  # fine
            assert label in self.heads
        self.first = LABELS.copy().pop()  # fine

    def choose(self, tasks: set[str], found: set[str]):
        only = tasks.pop() if len(tasks) == 1 else None  # fine
        return only, found.pop()  # expect: D9M301


def work(jobs):
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(job) for job in jobs]
        results = [future.result() for future in as_completed(futures)]  # expect: D9M305
        steady = list(pool.map(str, jobs))  # fine
        ordered = sorted(future.result() for future in as_completed(futures))  # fine
    return results, steady, ordered


class Cache:
    def __hash__(self):
        return hash(("cache", 1))  # fine

    def shard(self, name, n):
        bucket = hash(f"{name}") % n  # expect: D9M303
        other = hash(str(name)) & 0xFF  # expect: D9M303
        number = hash(3) % n  # fine
        place = abs(hash(f"{name}"))  # expect: D9M303
        return bucket, other, number, place

    def walk(self):
        yield from {"a", "b"}  # expect: D9M301
