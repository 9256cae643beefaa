"""Reads from outside: what each process notes, with the line of the program."""

import copy
import json
import os
import pickle
import random
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from scipy.stats import qmc

from lightning_d9m.engine.probes.outside import VARIABLE, OutsideWatch
from lightning_d9m.tools.locate.outside import read_lines

# A program, and what a line of it reads: kind, and what stands in the text.
PROGRAM = """
import random, secrets, time, uuid
from time import time as now
import torch
import multiprocessing, os, pathlib, tempfile, threading
import numpy as np
from scipy.stats import qmc
from sklearn.utils import check_random_state
def work(): np.random.default_rng()  # entropy
if __name__ == "__main__":
    uuid.uuid4()  # entropy
    secrets.token_hex()  # entropy
    random.Random()  # entropy
    random.SystemRandom().random()  # entropy
    np.random.RandomState()  # entropy
    qmc.LatinHypercube(2)  # entropy
    torch.seed()  # entropy
    torch.manual_seed(3)  # seed
    random.seed(4)  # seed
    np.random.seed(5)  # seed
    now()  # clock
    time.perf_counter_ns()  # clock
    os.getpid()  # process number
    id(work)  # address
    folder = pathlib.Path(tempfile.mkdtemp(dir="."))  # temporary name
    list(folder.iterdir())  # listing
    os.listdir(folder)  # listing
    pathlib.Path("given.txt").read_text()  # file
    np.loadtxt("given.txt")  # file
    thread = threading.Thread(target=work)
    thread.start()  # thread
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=work)
        process.start()  # process
        process.join()
    pathlib.Path("own.txt").write_text("1")
    pathlib.Path("own.txt").read_text()
    np.random.default_rng(1), random.random(), torch.rand(1)
"""


@pytest.fixture
def watch(tmp_path):
    watch = OutsideWatch(tmp_path)
    watch.start()
    yield lambda: [line["read"] for lines in read_lines(tmp_path).values() for line in lines]
    watch.stop()


def test_a_program_in_threads_and_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given.txt").write_text("1")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "watch").mkdir()
    environment = os.environ | {VARIABLE: "watch", "LIGHTNING_D9M": "0"}
    subprocess.run([sys.executable, "program.py"], env=environment, check=True)
    found = read_lines(tmp_path / "watch")
    expected = {
        (kind.strip(), number)
        for number, line in enumerate(PROGRAM.split("\n"), 1)
        for _, mark, kind in [line.partition("  # ")]
        if mark
    }
    reads = [line["read"] for lines in found.values() for line in lines]
    assert {(read[0], read[4]) for read in reads if read[0] != "times"} == expected
    assert {read[3] for read in reads} == {str(tmp_path / "program.py")}
    # The thread, the fork and the new interpreter each read entropy in `work`.
    work = [name for name, lines in found.items() for line in lines if line["read"][4] == 9]
    assert len(work) == len(set(found)) == 3


def test_nothing_is_left_when_it_stops(tmp_path):
    before = (time.time, os.urandom, random.Random.seed, torch.manual_seed, np.random.seed)
    watch = OutsideWatch(tmp_path)
    watch.start()
    assert time.time is not before[0]
    watch.stop()
    assert (time.time, os.urandom, random.Random.seed, torch.manual_seed, np.random.seed) == before
    os.listdir(tmp_path)  # noqa: PTH208 - it is watched
    random.Random()
    assert not list(tmp_path.iterdir())


def test_what_is_wrapped_behaves_as_before(watch):
    class Timer:
        clock = time.monotonic  # a function would become a method

    assert Timer().clock() <= time.monotonic()
    again = pickle.loads(pickle.dumps(time.time))  # noqa: S301 - of this line
    assert again is copy.deepcopy(time.time) is time.time
    assert random.Random(3).random() == 0.23796462709189137
    state = random.getstate()
    random.seed(3)
    assert random.random() == 0.23796462709189137
    random.setstate(state)
    assert len(os.urandom(5)) == 5


def test_a_line_that_reads_often_is_written_seldom(watch):
    for _ in range(1000):
        time.time()
    assert len(watch()) < 30


def test_files_that_do_not_exist_and_folders_have_equal_content(watch, tmp_path):
    for path in (tmp_path.parent / "nowhere.yaml", tmp_path.parent):
        with suppress(OSError):
            path.read_text()
    assert [read[2] for read in watch() if read[0] == "file"] == ["no content"] * 2


def test_a_broken_program_is_not_broken_further(watch, monkeypatch):
    """An error within the watch ends no call of the program."""
    monkeypatch.setattr(json, "dumps", None)
    assert len(os.urandom(4)) == 4
    assert qmc.LatinHypercube(2).random(1).shape == (1, 2)


def test_samples_are_told_by_their_content(tmp_path):
    watch = OutsideWatch(tmp_path)
    x, y = torch.rand(4, 3, dtype=torch.bfloat16), torch.arange(4)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        watch.take_samples({"x": x[order], "y": [y[order]], "name": "a"})
    first, second = (line["samples"] for line in next(iter(read_lines(tmp_path).values())))
    assert [first[n] for n in [2, 0, 3, 1]] == second
    assert len(set(first)) == 4
