"""The evidence of two runs on the operation at which they differ, and on the values at a place."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightning_d9m.engine.probes.evidence import Evidence
from lightning_d9m.engine.probes.op_values import keep
from lightning_d9m.engine.probes.training import ProbePoint, StatePoint
from lightning_d9m.tools.cli.locate import describe_op
from lightning_d9m.tools.locate.op_evidence import examine_op, measure_kept

POINT, NAME = ProbePoint(0, 4, 4), "layers.0::aten.mm.default"
FOUND = SimpleNamespace(
    rank=0, moment="batch", epoch=0, step=4, batch=4, kind="op", name=NAME, call=1
)


@pytest.fixture
def open_runs(tmp_path):
    """Return a function that opens the evidence of two runs, and one that closes both."""
    fits = [SimpleNamespace(path=tmp_path / name / "fit-000") for name in ("one", "other")]

    def open_run(number, name=""):
        fits[number].path.mkdir(parents=True, exist_ok=True)
        evidence = Evidence(fits[number].path, 0, name, tmp_path / "one" if number else None)
        evidence.begin(POINT)
        return evidence

    return open_run, fits


@pytest.fixture
def examine(open_runs):
    """Return a function that lets two runs call an operation twice, and returns the finding."""
    open_run, fits = open_runs

    def examine(*runs, op="aten.mm.default", **words):
        for number, (*args, result) in enumerate(runs):
            evidence = open_run(number)
            content = {"op": op, "kwargs": {}, "backward": False, "writes": False} | {
                name: own[number] for name, own in words.items()
            }
            content |= {"args": keep(args), "source": "train.py:7 in forward: a @ b"}
            for own in (torch.zeros(3), result):
                evidence.take_op(NAME, content | {"outputs": keep([own])})
            evidence.close()
        return examine_op(FOUND, fits[1])

    return examine


def product():
    one, other = torch.rand(3, 4), torch.rand(4, 5)
    return one, other, one @ other


def test_different_outputs_for_equal_inputs(examine):
    one, other, result = product()
    changed = result.clone()
    changed.view(torch.int32)[2, 3] += 1
    for runs in ((result, changed), (changed, result)):
        found = examine(*((one, other, own) for own in runs))
        assert found.inputs_equal
        assert (found.replays, found.outcomes, found.obstacle) == (20, 1, "")
        # Alone, the operation gives the result that is right.
        assert (found.magnitude is None) == (runs[1] is result)
        if found.magnitude is not None:
            assert (found.magnitude.count, found.magnitude.ulps) == (1, 1)
            assert found.magnitude.examples[0][0] == (2, 3)
    text = join(describe_op(found))
    assert "called at train.py:7 in forward: a @ b" in text
    assert "Its inputs were equal in both runs." in text
    assert "always gave the same output" in text


def join(lines):
    """Return lines as one, with single spaces."""
    return " ".join(" ".join(lines).split())


def test_an_operation_that_varies_is_measured_from_its_runs_alone(examine, monkeypatch):
    outcomes = iter(torch.full((2,), float(n % 3)) for n in range(20))
    module = "lightning_d9m.engine.probes.evidence.replay_op"
    monkeypatch.setattr(module, lambda _: next(outcomes))
    found = examine((torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(2)))
    assert (found.outcomes, found.magnitude.absolute) == (3, 1.0)


def test_different_inputs_are_reported_and_where_the_gradient_comes_from(examine):
    one, other, result = product()
    found = examine((one, other, result), (one + 1, other, (one + 1) @ other))
    assert (found.inputs_equal, found.only_numbers_differ) == (False, False)
    said = join(describe_op(replace(found, backward=True)))
    assert said.startswith("op: aten.mm.default, in the backward pass of train.py:7 in forward")
    assert "Its inputs differed, although no recorded operation wrote them." in said


def test_inputs_of_which_only_a_number_differs(examine):
    one = torch.rand(3)
    found = examine((one, 1.5, one * 1.5), (one, 2.5, one * 2.5), op="aten.mul.Tensor")
    assert (found.inputs_equal, found.only_numbers_differ) == (False, True)
    assert (found.magnitude.absolute, found.magnitude.total) == (1.0, 1)


def test_an_operation_that_cannot_run_alone_has_a_reason(examine):
    one, other, result = product()
    found = examine((one, other, result), (one, other, result + 1), op="nowhere.op.default")
    assert found.replays == 0
    text = join(describe_op(found))
    assert "could not be run alone: LedgerError: The operation 'nowhere.op.default' is not" in text


def test_draws_from_a_different_state_are_reported_and_confirmed(examine):
    """The inputs were equal; the state of the generator differs."""
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    words = {"kwargs": [keep({"generator": own}) for own in generators]}
    runs = [([4], torch.rand(4, generator=own)) for own in generators]
    found = examine(*runs, op="aten.rand.generator", **words)
    assert (found.inputs_equal, found.generator_equal, found.outcomes) == (True, False, 1)
    text = join(describe_op(found))
    assert "Its inputs were equal in both runs, but not the state of its generator." in text
    assert "Confirmed: run alone 20 times from one state of its generator" in text


def test_equal_operations_leave_no_finding(examine):
    assert examine(product(), product()) is not None
    same = product()
    assert examine(same, same) is None


VALUES = [
    ("weight", "layers.0.weight", torch.ones(3), torch.tensor([1, 1 + 2**-23, 1]), (1, 1, (1,))),
    ("optimizer", "0.group.0:lr", 0.1, 0.2, (1, 4503599627370496, ())),
    ("scalar", "count", 3, 4, (1, None, ())),
]


@pytest.mark.parametrize("moment", ["batch", "initial"])
@pytest.mark.parametrize(("kind", "name", "one", "other", "expected"), VALUES)
def test_the_values_of_a_place_are_measured(open_runs, moment, kind, name, one, other, expected):
    """In the initial digests an optimizer setting has no place, only its whole group."""
    own = name if moment == "batch" else name.partition(":")[0]
    when = POINT if moment == "batch" else StatePoint(0, 4, "initial")
    for number, value in enumerate((one, other)):
        evidence = open_runs[0](number, own)
        evidence.save(when, (kind, "elsewhere", 0), number)
        evidence.save(when, (kind, name, 0), value)
        evidence.close()
    where = SimpleNamespace(**vars(FOUND) | {"name": own, "moment": moment, "call": 0})
    found = measure_kept(where, kind, open_runs[1])
    assert (found.count, found.ulps, found.examples[0][0]) == expected
