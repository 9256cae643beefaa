"""``d9m locate`` on real causes, in trainings that do not import lightning_d9m."""

import json
import re
from functools import partial
from itertools import cycle, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
from forking_python import ForkingPython, shared_python
from rank_processes import start_ranks

from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.errors import CommandError
from lightning_d9m.tools.cli import locate as locate_module
from lightning_d9m.tools.cli.locate import describe
from lightning_d9m.tools.cli.main import main
from lightning_d9m.tools.launch import runs as launched
from lightning_d9m.tools.launch.processes import run_once
from lightning_d9m.tools.launch.progress import RunProgress
from lightning_d9m.tools.locate import search as search_module
from lightning_d9m.tools.locate.search import Search

TRAINING = Path(__file__).parents[1] / "support" / "gallery_training.py"
PAGE = (Path(__file__).parents[2] / "docs" / "gallery.md").read_text()


def run_forked(command, folder, *, variables, ranks, pythons, **_):
    """Replace ``run_once``: the same variables, without the start of an interpreter."""
    own = {"LIGHTNING_D9M": "1", "LIGHTNING_D9M_LEDGER_DIR": str(folder), **variables}
    _, script, *words = command
    statuses, outputs = start_ranks(script, ranks, *words, python=next(pythons), **own)
    (folder / "output.log").write_text("".join(outputs))
    if any(statuses):
        raise CommandError("".join(outputs))


@pytest.fixture
def locate(tmp_path, monkeypatch, capsys):
    """Return a function that locates one cause; it gives (status, what was found)."""
    monkeypatch.chdir(tmp_path)
    for name in ("LIGHTNING_D9M", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)

    class Kept(Search):
        """Keeps the result, for its report as text."""

        def locate(self, between=None):
            kept.append(super().locate(between))
            return kept[-1]

    kept = []
    monkeypatch.setattr(locate_module, "Search", Kept)

    def locate(cause, *words, ranks=0, run=run_forked, pythons=None):
        if run is run_forked:
            run = partial(run, ranks=ranks, pythons=pythons or repeat(shared_python()))
        monkeypatch.setattr(launched, "run_once", run)
        command = [shared_python(), str(TRAINING), cause]
        words = words if run is run_once else ("--one-by-one", *words)
        status = main(["locate", "--json", *words, "--", *command])
        printed = capsys.readouterr()
        assert printed.out, printed.err
        found = json.loads(printed.out)
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


# The causes that a table shows: (line of code, cause and place, rule of the line that is found).
ROWS = re.findall(
    r"^\| .* \| `(.*)` \| ([\w -]+, at [^|]*?)(, D9M\d+)? \| .* \|$", PAGE, re.MULTILINE
)


def shows(found):
    """Return whether the page shows this report, with lines that were found."""
    for line, place, rule in ROWS:
        if place == summarize(found) and (not rule or any(code in line for code in found["codes"])):
            return True
    lines = [" ".join(line.split()) for line in LINES.get(mask(found["said"]), ["absent"])]
    return set(lines) <= set(found["codes"])


def summarize(found):
    """Return the cause and the place, as the page does."""
    where = re.search(r"^where: +(.*)$", found["said"], re.MULTILINE)[1]
    return f"{found['cause']}, at {where}"


START = "epoch 0, step 0, batch 0"


@pytest.mark.parametrize(
    ("cause", "words", "expected"),
    [
        ("urandom", (), f"data, at {START}: batch"),
        ("default_rng", (), f"data, at {START}: batch"),
        ("listdir", (), f"data, at {START}: batch"),
        ("initial", (), "initial weights, at the initial state: weights layers.0.weight"),
        ("draws", (), "random numbers, at epoch 0, step 2, batch 2: rng torch"),
        ("generator", (), f"random numbers, at {START}: op layers.1::aten.rand.generator"),
        ("clock", (), "optimizer settings, at epoch 1, step 5, batch 1: optimizer 0.group.0:lr"),
        ("thread", (), "weights, at epoch 0, step 3, batch 3: weight layers.0.weight"),
        ("gradient", (), "gradients, at epoch 1, step 6, batch 2: gradient layers.2.weight"),
        ("empty", (WITHOUT,), f"uninitialized memory, at {START}: op layers.1"),
        # Filled memory does not change it.
        ("clock in step", (), f"value from outside torch, at {START}: op "),
    ],
)
def test_a_cause(locate, cause, words, expected):
    status, found = locate(cause, *words)
    assert (status, found["ranks"]) == (1, [0])
    assert summarize(found).startswith(expected)
    assert shows(found) == (cause != "clock in step")
    assert "generators" not in found  # a line explains it


@pytest.mark.parametrize(
    ("cause", "expected", "index"),
    [
        # The gradients of both ranks differ after the exchange, and were equal before.
        ("exchange", f"all-reduce, at {START}: gradient layers.0.weight", None),
        # The other rank differs one step later, through the gradients, and is not named.
        ("ulp", "weights, at epoch 1, step 3, batch 1: weight layers.0.weight", [2, 3]),
        # Each run ends with a DriftError; its ranks are compared with each other instead.
        ("rank drift", "rank drift, at epoch 1, step 3, batch 1: weight layers.0.weight", [2, 3]),
        # Before the first step, in what is not a weight, and when the training has ended.
        ("rank rate", "rank drift, at the initial state: optimizers 0.group.0", []),
        ("rank averaged", "rank drift, at the final state: weights layers.2.bias", [0]),
    ],
)
def test_a_cause_on_one_of_two_ranks(locate, cause, expected, index):
    status, found = locate(cause, ranks=2)
    assert (status, summarize(found)) == (1, expected)
    assert found["ranks"] == ([0, 1] if index is None else [1])
    assert found.get("reference_rank") == (0 if found["cause"] == "rank drift" else None)
    if index is not None:
        assert found["magnitude"]["count"] == 1
        assert found["magnitude"]["examples"][0][0] == index
    if index == [2, 3]:
        assert found["magnitude"]["ulps"] == 1
    assert shows(found) == (index is None or index == [2, 3])


@pytest.mark.alone
def test_a_race_of_two_threads(locate):
    """It is a different step in each pair, because the threads interleave differently.

    On a busy machine it may not come back in the look that records operations.
    """
    for _ in range(4):
        status, found = locate("index_put", WITHOUT, "--tries", "5")
        assert status == 1
        if found["kind"] == "op":
            break
    assert (found["cause"], found["kind"]) == ("op", "op"), "not in one of 4 searches"
    assert found["name"] == "pool::aten.index_put.default"
    assert found["op"]["inputs_equal"]
    assert "sums.index_put((places,), values, accumulate=True)" in found["op"]["source"]


def test_generators_of_the_dataset_are_named_if_nothing_else_explains_the_batch(
    locate, monkeypatch
):
    monkeypatch.setattr(search_module, "find_cause_lines", lambda *_: [])
    status, found = locate("transform")
    assert (status, found["cause"], "outside" in found) == (1, "data", False)
    assert found["generators"] == ["dataset.transform.random_generator"]
    said = " ".join(found["said"].split())
    assert "Generators that the data holds: dataset.transform.random_generator. Seed each" in said


@pytest.mark.parametrize("words", [(), (WITHOUT,)])
def test_no_false_alarm(locate, words):
    assert locate("none", "--tries", "1", *words)[0] == 0


def test_fits_in_parallel_processes(locate):
    """A fit has a different number in each run, and is compared with its counterpart."""
    status, found = locate("parallel", "--tries", "1")
    assert (status, found["verdict"]) == (0, "equal")


def test_two_runs_at_once_end_where_they_differ(locate, tmp_path):
    """Later looks begin at a checkpoint that they kept, or at step 0, and end after the step."""
    status, found = locate("clock", run=run_once)
    assert (status, found["cause"], found["step"]) == (1, "optimizer settings", 5)
    ledgers = [read_ledger(path) for path in sorted(tmp_path.glob("d9m-runs/000/run-*/fit-000"))]
    ends = [ledger.outcome(0).end for ledger in ledgers]
    assert ends[:2] == [None, None] or ends[0].status == "finished"
    assert {end.status for end in ends[2:]} <= {"stopped"}


def test_two_runs_that_exist(locate, tmp_path):
    """Only the part in which they differ is run again; the report says whom new runs agree with."""
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        command = [shared_python(), str(TRAINING), "clock"]
        run_once(command, folder, progress=RunProgress(name, folder), timeout=None)
    pair = (str(tmp_path / "one"), str(tmp_path / "other"))
    status, found = locate("clock", *pair, run=run_once)
    assert (status, found["cause"], found["step"]) == (1, "optimizer settings", 5)
    assert found["looks"][0].startswith("the two runs: epoch 1, step 8: ")
    assert "2 new runs of steps 0 to 9, 0 agree with the reference and 0" in found["agreement"]
    status, found = locate("none", *pair, run=run_once)
    assert status == 1
    assert "0 agree with the reference and 0 with the other run. They agree" in found["agreement"]
    assert locate("clock", pair[0], pair[0], run=run_once)[0] == 0


def test_a_part_runs_with_the_hash_seed_of_the_runs(runs, monkeypatch, capsys):
    def refuse(_, variables, **__):
        raise CommandError(f"hash seed {variables['PYTHONHASHSEED']}")

    monkeypatch.setattr(locate_module, "Runner", refuse)
    ledgers = [str(runs.write(stack={"variable.PYTHONHASHSEED": "5"})) for _ in range(2)]
    output = str(runs.parent / "out")
    assert main(["locate", *ledgers, "-o", output, WITHOUT, "--", "train"]) == 3
    assert "hash seed 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("equal", "said"),
    [(0, ""), (1, "; the fit before it agrees"), (2, "; the 2 fits before it agree")],
)
def test_a_fit_is_named_with_those_before_it(equal, said):
    pair = SimpleNamespace(fit="fit-002", fits=3, equal_fits=equal)
    assert locate_module._describe_fit(pair) == f"fit-002, one of 3{said}"


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
