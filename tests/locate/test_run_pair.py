"""Pairs of runs: each fit has the name of its counterpart in the first run."""

import pytest

from lightning_d9m.launch import run as launched
from lightning_d9m.launch.run import Runs
from lightning_d9m.locate.search import Runner


@pytest.fixture
def runner(tmp_path, runs, monkeypatch):
    """Return a function that makes a Runner from (seed, last digest) of the fits of each run."""

    def make(*contents):
        remaining = iter(contents)

        def write(command, folder, **_):
            runs.parent = folder
            for seed, value in next(remaining):

                def edit(_, records, value=value):
                    for record in records[3:-1]:
                        record["totals"]["weights"] = f"{value:032x}"

                runs.write(1, edit=edit, seed=seed)

        monkeypatch.setattr(launched, "run_once", write)
        return Runner(Runs(["true"], tmp_path), {})

    return make


def test_parallel_fits_keep_their_names_in_each_run(runner):
    made = runner([(1, 7), (2, 7)], [(2, 7), (1, 7)], [(2, 7), (1, 7)], [(1, 7), (2, 8)])
    assert not made.run_pair("whole run").differs
    pair = made.run_pair("steps of the epoch")
    assert (pair.fit, pair.expected.header.seed) == ("fit-001", 2)


def test_a_single_run_is_named_like_the_first(runner):
    made = runner([(1, 7), (2, 7)], [(2, 7), (1, 7)])
    seeds = [{name: fit.header.seed for name, fit in made.run("").fits.items()} for _ in range(2)]
    assert seeds == [{"fit-000": 1, "fit-001": 2}] * 2
