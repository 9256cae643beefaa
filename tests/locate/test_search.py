"""The search of ``d9m locate``: its looks, the lines that may explain a cause, and the report."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_d9m.engine.ledger.differences import Divergence, FieldDifference, PlaceDifference
from lightning_d9m.engine.ledger.kinds import PROBE_KINDS
from lightning_d9m.errors import CommandError
from lightning_d9m.tools.cli.locate import describe
from lightning_d9m.tools.comparison.ledgers import RankComparison, RunSide
from lightning_d9m.tools.locate import search as search_module
from lightning_d9m.tools.locate.cause_lines import find_cause_lines, find_program
from lightning_d9m.tools.locate.op_evidence import find_patch
from lightning_d9m.tools.locate.search import Search
from lightning_d9m.tools.segments.segment import RecordedRun


def pair(
    kind=None, name="a", *, step=0, moment="batch", epoch=0, values=("", ""), others=(), fit="a"
):
    """Return a pair of runs that diverge at a place, or that are equal."""
    places = [PlaceDifference(0, str(kind), own, 0, *values) for own in (name, *others)]
    found = Divergence(
        epoch=epoch, step=step, batch=step, moment=moment, places=places, count=1, compared=9
    )
    ranks = [SimpleNamespace(divergence=None if kind is None else found)]
    return SimpleNamespace(
        differs=kind is not None,
        rank_drift=None,
        comparison=SimpleNamespace(
            verdict="equal" if kind is None else "different",
            one_is_longer=False,
            ranks=ranks,
            divergences=[] if kind is None else [found],
            refusals=(),
            stack=(),
            portable=False,
            extent="logged values",
            logged=None,
            probes=frozenset(PROBE_KINDS),
            seeded=("", ""),
            begins_late=False,
        ),
        fit=fit,
        actual=None,
        expected=SimpleNamespace(path=Path("nowhere/fit-000")),
        fits=1,
    )


def search(*pairs, tries=1, varying="", failed=()):
    """Search in the given pairs; return the result, and (stage, settings) of each look."""
    looks = []
    remaining = iter(pairs)

    def run_pairs(stage, tries, **words):
        for _ in range(2 * tries - 1):
            looks.append((stage, words))
            if isinstance(found := next(remaining), BaseException):
                raise found
            yield found

    ledger = SimpleNamespace(header=SimpleNamespace(settings={"varying_ops": varying}))
    made = [SimpleNamespace(fits={"fit-000": ledger})] * (2 * tries)
    runner = SimpleNamespace(run_pairs=run_pairs, command=["true"], made=made, failed=failed)
    return Search(runner, tries).locate(), looks


def search_between(*ledgers):
    """Search in two ledgers; a run that is made fails the test."""
    runner = SimpleNamespace(command=["true"], made=[], failed=[])
    return Search(runner, 1).locate(tuple(map(RecordedRun, ledgers)))


def test_two_runs_of_which_one_failed_are_not_run_again(runs):
    def fail(_, records):
        del records[-3]  # it does not reach the end of its last epoch
        records[-2] |= {"moment": "exception", "step": 50}
        records[-1] |= {"status": "failed", "step": 50, "error": "RuntimeError: no memory"}

    found = search_between(runs.write(), runs.write(edit=fail))
    assert found.looks == ["the two runs: epoch 2, step 50, where a run ended: end status"]
    assert "This run was ended by RuntimeError: no memory." in found.cause.text


def test_two_runs_of_different_lengths_are_not_run_again(runs):
    found = search_between(runs.write(5), runs.write(3))
    assert found.looks == ["the two runs: epoch 2, step 69, where a run ended: end epoch"]
    assert (found.verdict, found.cause.kind) == ("different", "length")
    assert found.cause.text.startswith("One run continues where the other ends")


def test_a_logged_value_that_differs_before_a_run_ends_is_the_cause(runs):
    """Such as one that EarlyStopping reads."""

    def log(_, records):
        records[4]["scalars"]["train_loss"] = (0.5).hex()

    found = search_between(runs.write(5), runs.write(3, edit=log))
    assert found.cause.text.startswith("A logged value differs first")


def test_of_two_equal_runs_that_exist_nothing_is_said_of_tries(runs):
    found = search_between(runs.write(), runs.write())
    assert list(describe(found, determinism=True)) == ["equal: the runs do not differ."]
    assert found.as_json()["runs"] == 0


def test_two_equal_runs_that_were_killed_are_incomplete(runs):
    def cut(_, own):
        del own[5:]

    found = search_between(runs.write(edit=cut), runs.write(edit=cut))
    assert (found.verdict, found.cause) == ("incomplete", None)
    (said,) = [" ".join(describe(found, determinism=True))]
    assert said.startswith("incomplete: the runs do not differ, as far as they go; a run was ended")


def test_a_run_that_was_killed_is_not_called_different(runs):
    found = search_between(
        runs.write(), runs.write(edit=lambda _, own: own.__delitem__(slice(5, 9)))
    )
    assert (found.verdict, found.as_json()["verdict"]) == ("incomplete", "incomplete")
    assert next(describe(found, determinism=True)).startswith("incomplete: length. One run cont")


def test_all_runs_with_filled_memory_are_counted():
    """A segment runs as often as time allows."""
    looks = SimpleNamespace(run_pairs=lambda *_, **__: iter([pair()] * 49))
    known = Search(looks, 2)
    first = pair("op", "a").comparison.divergences[0]
    known._explain_inputs(first, only_numbers=False)
    assert known._found.looks == ["filled memory: nothing differs in 50 runs"]


def test_runs_that_agree():
    failed = ["whole run: a run failed"]
    found, looks = search(pair(), pair(), pair(), tries=2, failed=failed)
    assert found.cause is None
    assert len(looks) == 3
    assert found.looks == [*failed, "whole run: nothing differs in 4 runs"]
    said = " ".join(describe(found, determinism=True))
    assert "no two runs differ. --tries 15 would show a difference in 10% of the runs" in said


@pytest.mark.parametrize("kind", [None, "loss"])
def test_ops_that_may_vary_are_named(kind):
    """Beside every verdict, as `compare` and `check` do."""
    found, _ = search(*[pair(kind)] * 4, varying="histc put_")
    said = " ".join(describe(found, determinism=True))
    assert "varying_ops lets histc, put_ run, whose results may vary." in said
    assert found.as_json()["varying_ops"] == ("histc", "put_")


LOSS, OUTPUT = pair("loss", "loss", step=4), pair("output", "layers", step=4)
BATCH = pair("batch", "batch:0", step=4)
ELSEWHERE = "the divergence did not occur again in 2 runs, 1 of 1 pairs differ elsewhere"
GONE = "the divergence did not occur again in 2 runs"
# What the looks see, one pair after the other; the kind of the cause that is found; the steps that
# each look probes; and which look says what.
SEARCHES = {
    "a race that does not come back while operations are recorded": (
        [LOSS, pair(), OUTPUT, OUTPUT],
        ("module", [":", "4:5", "4:5", "4:5"], {1: f"operations of the step: {GONE}"}),
    ),
    # The step before shows whether it was equal there.
    "values of state are saved with the step before": (
        [pair("weight", "layers.weight", step=4)] * 2,
        ("weights", [":", "3:5"], {-1: "values: epoch 0, step 4, batch 4: weight layers.weight"}),
    ),
    "values of a pair that diverges earlier do not count": (
        [pair("weight", "layers.weight", step=step) for step in (4, 3)],
        ("weights", None, {-1: f"values: {ELSEWHERE}"}),
    ),
    "values of a different kind do not count": (
        [pair("gradient", "a", step=4), pair("local_gradient", "a", step=4)],
        ("gradients", None, {-1: f"values: {ELSEWHERE}"}),
    ),
    # As in a race: chance decides which gradients a fused buffer rounds differently.
    "values count if another place of that kind differs first": (
        [
            pair("gradient", "b.weight", step=4),
            pair("gradient", "a.weight", step=5, others=("b.weight",)),
        ],
        ("gradients", None, {-1: "values: epoch 0, step 5, batch 5: gradient b.weight"}),
    ),
    # The cause lies before the steps that were probed.
    "state that differs in the first probed step does not count": (
        [LOSS, pair("weight", "layers.weight", step=4), OUTPUT, pair()],
        ("module", None, {1: f"operations of the step: {ELSEWHERE}"}),
    ),
    "the end of an epoch after the probed steps does not count": (
        [LOSS, pair("weights", moment="epoch", step=10), pair(), pair()],
        ("module", None, {1: f"operations of the step: {ELSEWHERE}"}),
    ),
    "a different fit of a run does not count": (
        [LOSS, pair("batch", "batch", step=4, fit="fit-001"), pair(), pair()],
        ("module", None, {1: f"operations of the step: {ELSEWHERE}"}),
    ),
    "the end of a fit after the probed steps does not count": (
        [LOSS, pair("weights", moment="final", step=10), pair(), pair()],
        ("module", None, {1: f"operations of the step: {ELSEWHERE}"}),
    ),
    # The values are saved in the first step of a resumed fit; there is none before.
    "initial weights of a resumed fit": (
        [pair("weights", moment="initial", step=7)] * 2,
        ("initial weights", [":", "7:8"], {}),
    ),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search(name):
    pairs, (kind, steps, said) = SEARCHES[name]
    found, looks = search(*pairs)
    assert found.cause.kind == kind
    assert steps in (None, [words.get("probe_steps") for _, words in looks])
    assert {number: found.looks[number] for number in said} == said


def test_each_look_has_the_probes_that_show_more():
    found, looks = search(BATCH, BATCH)
    assert found.cause.kind == "data"
    assert [stage for stage, _ in looks] == ["whole run", "values"]
    assert looks[-1][1].get("evidence") == "batch:0"
    later = {"step": 14, "epoch": 1}
    op = pair("op", "layers[0]::aten.max.dim:1", **later)
    found, looks = search(pair("loss", "loss", **later), op)
    assert found.cause.kind == "op"
    assert [words.get("probe_steps") for _, words in looks] == [":", "14:15"]
    assert {words.get("probe_modules") for _, words in looks} == {"*"}
    assert looks[-1][1]["evidence"] == "loss"


def test_operations_of_other_modules_are_not_the_cause():
    """They are if the whole model computes what a module gets."""
    names = ("other::aten.rand", "layers::aten.mm", "layers")
    kinds = ("op", "op", "output")

    def look(*kinds):
        found = pair("op", step=4)
        divergence = found.comparison.divergences[0]
        places = [
            PlaceDifference(number, kind, name, 0, "", "")
            for number, (kind, name) in enumerate(zip(kinds, names, strict=True))
        ]
        found.comparison.divergences[0] = replace(divergence, places=places)
        return search(LOSS, found, pair())[0].divergences[0].name

    assert look(*kinds) == "layers::aten.mm"
    assert look("op", "op", "input") == "other::aten.rand"


def test_a_divergence_that_does_not_come_back_has_advice():
    found, _ = search(pair("end", moment="epoch", step=10), pair(), pair(), pair())
    text = " ".join("\n".join(describe(found, determinism=True)).split())
    assert found.cause.kind == "unknown"
    assert "no narrower look showed where it began" in text
    assert "advice: If it is rare, raise --tries." in text


def test_a_logged_number_is_measured_from_the_ledger():
    values = ((1.5).hex(), (1.5 + 2**-23).hex())
    logged = pair("scalars", "val_loss", moment="epoch", step=10, values=values)
    found, looks = search(logged, logged)
    assert found.cause.kind == "logged value"
    assert (found.magnitude.ulps, len(looks)) == (1, 1)


@pytest.mark.parametrize("extent", ["evaluations", "training"])
def test_a_value_of_a_validation_is_followed_into_its_operations(extent):
    """They belong to the last step of the epoch."""
    logged = pair("scalars", "val_loss", moment="epoch", step=10, values=("0x0p+0", "0x1p+0"))
    logged.comparison.extent = extent
    op = pair("op", "(model)::aten.add.Tensor", step=9)
    found, looks = search(logged, op)
    assert (found.cause.kind, found.divergences[0].step) == ("op", 9)
    assert [words.get("probe_steps") for _, words in looks] == [":", "9:10"]


@pytest.mark.parametrize("error", [ValueError("the dump"), KeyboardInterrupt(), SystemExit(143)])
def test_what_was_found_is_told_if_a_later_look_fails(error):
    found, _ = search(LOSS, OUTPUT, error)
    assert found.cause.kind == "module"
    reason = "ValueError: the dump" if isinstance(error, ValueError) else "by a signal"
    assert found.looks[-1] == f"stopped: {reason}"
    with pytest.raises(type(error)):
        search(error)  # the first look, so nothing is known


def test_modules_are_recorded_if_the_command_fails_while_operations_are():
    """Some tensor subclasses cannot be made within a TorchDispatchMode."""
    found, looks = search(LOSS, CommandError("already associated"), OUTPUT, OUTPUT)
    assert [words["probes"].endswith(",op") for _, words in looks] == [False, True, False, False]
    assert (found.cause.kind, found.divergences[0].kind) == ("module", "output")
    said = "fails while operations are recorded, so only modules are: already associated"
    assert said in found.looks[1]


def test_a_line_that_cannot_be_the_cause_stays_a_suspect(monkeypatch):
    words = {"code": "hash(x)", "rule": "D9M303", "reason": "Why.", "fix": "Sort."}
    finding = SimpleNamespace(location="t.py:3:1", certainty="certain", **words)
    monkeypatch.setattr(search_module, "find_cause_lines", lambda *_, **__: [finding])
    for kind, label in (("gradient", "suspect: "), ("batch", "line:    ")):
        found, _ = search(*[pair(kind, "a", step=4)] * 2)
        text = "\n".join(describe(found, determinism=True))
        assert f"{label} t.py:3:1: hash(x)" in text
        # The fix of what was found stands in place of the advice to look for it.
        assert ("fix:      Sort." in text, "advice: " in text) == (kind == "batch", kind != "batch")


def test_a_different_stack_is_shown_and_ends_the_search():
    other = pair("weights", moment="initial")
    other.comparison.stack = (FieldDifference("threads", 1, 2, (0,)),)
    found, looks = search(other)
    assert (found.cause.kind, len(looks)) == ("stack", 1)
    assert "  threads" in describe(found, determinism=True)


def test_records_that_only_one_run_has_are_reported():
    longer = pair()
    alone = RunSide(9, 9, "epoch 2", end="finished")
    rank = RankComparison(0, expected=RunSide(end="finished"), actual=alone)
    longer.differs, longer.comparison.ranks = True, [rank]
    longer.comparison.verdict, longer.comparison.one_is_longer = "different", True
    longer.comparison.ranks_only_expected = longer.comparison.ranks_only_actual = ()
    found, looks = search(longer)
    assert (found.cause.kind, len(looks)) == ("length", 1)
    said = "  Rank 0: only this run has 9 records, the first epoch 2."
    assert said in describe(found, determinism=True)


@pytest.mark.parametrize(
    ("op", "args", "name"),
    [
        ("put_.default", [], "put_"),
        ("mm.default", [], None),
        ("index_put_.default", [0, 0, 0, False], "index_put"),
        ("index_put.default", [0, 0, 0, True], "index_put_accumulate"),
        ("_index_put_impl_.default", [], "index_put_accumulate"),
        ("scatter_.src", [], "scatter"),
        ("_scaled_dot_product_flash_attention_backward.default", [],
         "scaled_dot_product_attention_backward"),
    ],
)  # fmt: skip
def test_operations_in_the_catalog(op, args, name):
    found = find_patch(f"aten.{op}", [flag for flag in args if isinstance(flag, bool)])
    assert (found.name if found else None) == name


SETS = "import helper\norder = {name: i for i, name in enumerate({'a', 'b'})}\n"
DRAWS = "import numpy as np\nnoise = np.random.default_rng()\n"


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return a function that lists the lines which may explain a cause of a program."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("train", SETS), ("helper", DRAWS), ("stray", SETS)):
        Path(f"{name}.py").write_text(text)

    def find(cause):
        found = find_cause_lines(["python", "train.py", "--fast"], cause)
        return [(f.file, f.line, f.rule) for f in found]

    return find


def test_what_explains_the_cause_goes_first_and_what_is_certain_follows(places):
    certain = [("helper.py", 2, "D9M201"), ("train.py", 2, "D9M301")]
    for cause in ("data", "random numbers", "all-reduce", ""):
        assert places(cause) == certain
    Path("helper.py").write_text("import torch\ntorch.seed()\n")
    assert places("random numbers") == [("helper.py", 2, "D9M204"), certain[1]]


@pytest.mark.parametrize("command", [["./train"], ["python", "absent.py"], ["python", "-m"]])
def test_no_program(places, command):
    assert find_program(command) is None
    assert find_cause_lines(command, "data") == []


@pytest.mark.parametrize("text", ["order = sorted({'a', 'b'})\n", "import helper\nfor"])
def test_a_clean_program_and_one_that_cannot_be_parsed(places, text):
    Path("train.py").write_text(text)
    assert places("data") == []
