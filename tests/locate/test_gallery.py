"""``d9m locate`` on real causes, in trainings that do not import lightning_d9m."""

import json
import os
import re
import subprocess
from functools import partial
from itertools import cycle, repeat
from pathlib import Path

import pytest
from forking_python import ForkingPython, shared_python

from lightning_d9m.cli import locate as locate_module
from lightning_d9m.cli.locate import describe
from lightning_d9m.cli.main import main
from lightning_d9m.errors import CommandError
from lightning_d9m.launch import run as launched
from lightning_d9m.launch.run import make_rank_variables, run_once
from lightning_d9m.locate.search import Search

TRAINING = Path(__file__).parents[1] / "support" / "gallery_training.py"
PAGE = (Path(__file__).parents[2] / "docs" / "gallery.md").read_text()


def run_forked(command, folder, *, variables, ranks, pythons, **_):
    """Replace ``run_once``: the same variables, without the start of an interpreter."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}
    environment |= {"LIGHTNING_D9M": "1", "PYTHONHASHSEED": "0"}
    environment |= {"LIGHTNING_D9M_LEDGER_DIR": str(folder), **variables}
    log = folder / "output.log"
    python = next(pythons)
    with log.open("wb") as file:
        processes = [
            subprocess.Popen(
                [python, *command[1:]],
                env=environment | own,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
            for own in ([{}] if ranks == 1 else make_rank_variables(ranks))
        ]
        statuses = [process.wait(timeout=240) for process in processes]
    if any(statuses):
        raise CommandError(log.read_text())


@pytest.fixture
def locate(tmp_path, monkeypatch, capsys):
    """Return a function that locates one cause; it gives (status, what was found)."""
    monkeypatch.chdir(tmp_path)
    for name in ("LIGHTNING_D9M", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)

    class Kept(Search):
        """Keeps the result, for its report as text."""

        def locate(self):
            kept.append(super().locate())
            return kept[-1]

    kept = []
    monkeypatch.setattr(locate_module, "Search", Kept)

    def locate(cause, *words, ranks=1, run=run_forked, pythons=None):
        pythons = pythons or repeat(shared_python())
        if run is run_forked:
            monkeypatch.setattr(launched, "run_once", partial(run, ranks=ranks, pythons=pythons))
        command = [shared_python(), str(TRAINING), cause]
        status = main(["locate", "--json", *words, "--", *command])
        found = json.loads(capsys.readouterr().out)
        codes = [finding.code for finding in kept[-1].lines]
        kept[-1].lines = []
        said = "\n".join(describe(kept[-1], determinism=True))
        return status, found | {"said": said, "codes": codes}

    return locate


WITHOUT = "--no-determinism"


def mask(text, *, whole=False):
    """Return a report without line breaks and without values that change in each run.

    Unless ``whole``, it ends before the values, the advice and the looks, as most reports of the
    page do.
    """
    words = " ".join(text.replace(str(TRAINING), "train.py").split())
    if not whole:
        words = re.split(" (?:values|advice|looks): ", words)[0]
    where, _, values = words.partition(" differ: ")
    values = re.sub(r"( \[[\d, ]*\] \S+ \S+)+", " [values]", values)
    return where, re.sub(r"\d[\d,.]*(e[+-]\d+)?(?![\w-])", "#", values)


# What the page shows of each cause, but for numbers.
BLOCKS = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
# The file of the trainings has the lines of all causes; a block shows only the one of its cause.
LINE = re.compile(
    r"^line: +[^ ]+ ((?:.*\n)(?: {10}.*\n)*?) {10}D9M\d+:.*\n(?: {10}.*\n)*", re.MULTILINE
)
LINES = {mask(LINE.sub("", block)): LINE.findall(block) for block in BLOCKS}


# The causes that a table shows: (line of code, kind, where, rule of the line that is found).
ROWS = re.findall(
    r"^\| .* \| `(.*)` \| ([\w -]+), at ([^|]*?)(, D9M\d+)? \| .* \|$", PAGE, re.MULTILINE
)


def shows(found):
    """Return whether the page shows this report, with lines that were found."""
    where = re.search(r"^where: +(.*)$", found["said"], re.MULTILINE)[1]
    for line, kind, place, rule in ROWS:
        same = (kind, place) == (found["cause"], where)
        if same and (not rule or any(code in line for code in found["codes"])):
            return True
    lines = [" ".join(line.split()) for line in LINES.get(mask(found["said"]), ["absent"])]
    return set(lines) <= set(found["codes"])


@pytest.mark.parametrize(
    ("cause", "words", "expected"),
    [
        ("urandom", (), ("data", 0, "batch", "batch")),
        ("default_rng", (), ("data", 0, "batch", "batch")),
        ("listdir", (), ("data", 0, "batch", "batch")),
        ("initial", (), ("initial weights", 0, "weights", "layers.0.weight")),
        ("draws", (), ("random numbers", 2, "rng", "torch")),
        ("generator", (), ("random numbers", 0, "op", "layers.1::aten.rand.generator")),
        ("clock", (), ("optimizer settings", 5, "optimizer", "0.group.0:lr")),
        ("thread", (), ("weights", 3, "weight", "layers.0.weight")),
        ("gradient", (), ("gradients", 6, "gradient", "layers.2.weight")),
        ("empty", (WITHOUT,), ("uninitialized memory", 0, "op", "layers.1")),
    ],
)
def test_a_cause(locate, cause, words, expected):
    """Kind of the cause, step, kind of the place, and its name, which begins with the module's."""
    status, found = locate(cause, *words)
    assert status == 1
    kind, step, place, name = expected
    assert (found["cause"], found["ranks"], found["step"]) == (kind, [0], step), found
    assert found["kind"] == place
    assert found["name"].startswith(name)
    assert shows(found)


def test_the_exchange_of_gradients(locate):
    """The gradients of all ranks differ after the exchange, and were equal before."""
    status, found = locate("exchange", ranks=2)
    assert status == 1
    assert (found["cause"], found["step"], found["ranks"]) == ("all-reduce", 0, [0, 1])
    assert (found["kind"], found["name"]) == ("gradient", "layers.0.weight")
    assert shows(found)


@pytest.mark.alone
def test_a_race_of_two_threads(locate):
    """It is a different step in each pair, because the threads interleave differently."""
    status, found = locate("index_put", WITHOUT, "--tries", "5")
    assert status == 1
    assert (found["cause"], found["kind"]) == ("op", "op")
    assert found["name"] == "pool::aten.index_put.default"
    assert found["op"]["inputs_equal"]
    assert "sums.index_put((places,), values, accumulate=True)" in found["op"]["source"]


def test_one_ulp_on_one_rank(locate):
    """The other rank differs one step later, through the gradients, and is not named."""
    status, found = locate("ulp", ranks=2)
    assert status == 1
    assert (found["cause"], found["step"], found["ranks"]) == ("weights", 3, [1])
    assert (found["kind"], found["name"]) == ("weight", "layers.0.weight")
    assert shows(found)
    assert (found["magnitude"]["count"], found["magnitude"]["ulps"]) == (1, 1)
    assert found["magnitude"]["examples"][0][0] == [2, 3]


def test_a_rank_that_drifts_in_every_run(locate):
    """The run ends with a DriftError; its ranks are compared with each other instead."""
    status, found = locate("rank drift", ranks=2)
    assert status == 1
    assert (found["cause"], found["ranks"], found["reference_rank"]) == ("rank drift", [1], 0)
    assert (found["moment"], found["epoch"], found["step"], found["batch"]) == ("batch", 1, 3, 1)
    assert (found["kind"], found["name"]) == ("weight", "layers.0.weight")
    assert (found["magnitude"]["count"], found["magnitude"]["ulps"]) == (1, 1)
    assert found["magnitude"]["examples"][0][0] == [2, 3]
    assert shows(found)


@pytest.mark.parametrize(
    ("cause", "where", "kind", "name", "index"),
    [
        ("rank rate", ("initial", 0, 0), "optimizers", "0.group.0", []),
        ("rank averaged", ("final", 1, 4), "weights", "layers.2.bias", [0]),
    ],
)
def test_a_rank_that_drifts_outside_of_steps(locate, cause, where, kind, name, index):
    """Before the first, in what is not a weight, and when the training has ended."""
    status, found = locate(cause, ranks=2)
    assert status == 1
    assert (found["cause"], found["ranks"], found["reference_rank"]) == ("rank drift", [1], 0)
    assert (found["moment"], found["epoch"], found["step"]) == where
    assert (found["kind"], found["name"]) == (kind, name)
    assert found["magnitude"]["count"] == 1
    assert found["magnitude"]["examples"][0][0] == index


def test_filled_memory_does_not_change_a_value_from_outside(locate):
    status, found = locate("clock in step")
    assert status == 1
    assert (found["cause"], found["step"], found["kind"]) == ("value from outside torch", 0, "op")


@pytest.mark.parametrize("words", [(), (WITHOUT,)])
def test_no_false_alarm(locate, words):
    assert locate("none", "--tries", "1", *words)[0] == 0


def test_fits_in_processes_that_take_turns(locate):
    """A fit has a different number in each run, and is compared with its counterpart."""
    status, found = locate("parallel", "--tries", "1")
    assert (status, found["verdict"]) == (0, "equal")


def test_the_order_of_a_set(locate):
    """The hash seed is fixed in the runs that we start, unless determinism is off."""
    assert locate("set", "--tries", "1", run=run_once)[0] == 0
    other = ForkingPython()  # Python seeds the hashes of each server
    pythons = cycle((shared_python(), other.path))
    status, found = locate("set", "--tries", "1", WITHOUT, pythons=pythons)
    other.end()
    assert status == 1
    assert (found["cause"], found["step"], found["kind"]) == ("data", 0, "batch")
    assert shows(found)
    assert mask(found["said"], whole=True) == mask(BLOCKS[0], whole=True)


def test_the_page_shows_what_is_tested():
    """Its lines of code are those of the trainings."""
    source = TRAINING.read_text()
    shown = re.findall(r"^`([^`]+)`$|^\| .*? \| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(shown) > 12
    assert [line for line in map("".join, shown) if line not in source] == []
