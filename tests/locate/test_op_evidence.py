"""The evidence on an operation in the dumps of two runs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightning_d9m.engine.probes.dumps import Dump, keep
from lightning_d9m.engine.probes.training import ProbePoint
from lightning_d9m.tools.cli.locate import describe_op
from lightning_d9m.tools.locate.op_evidence import examine_op, measure_saved

PLACE = ("op", "layers.0::aten.mm.default", 1)
FOUND = SimpleNamespace(
    rank=0, moment="batch", epoch=0, step=4, batch=4, kind="op", name=PLACE[1], call=1
)


@pytest.fixture
def dumped(tmp_path):
    """Return a function that dumps a product like two runs, and returns the finding."""

    def dump(*runs, op="aten.mm.default"):
        folders = []
        for number, (one, other, product) in enumerate(runs):
            folders.append(tmp_path / str(number))
            content = {"op": op, "args": keep([one, other]), "kwargs": {}}
            content |= {"outputs": keep([product]), "source": "train.py:7 in forward: a @ b"}
            Dump(folders[-1], 0).save(ProbePoint(0, 4, 4), PLACE, content)
        return examine_op(FOUND, folders)

    return dump


def product():
    one, other = torch.rand(3, 4), torch.rand(4, 5)
    return one, other, one @ other


def test_different_outputs_for_equal_inputs(dumped):
    one, other, result = product()
    changed = result.clone()
    changed.view(torch.int32)[2, 3] += 1
    found = dumped((one, other, result), (one, other, changed))
    assert found.inputs_equal
    assert (found.magnitude.count, found.magnitude.ulps) == (1, 1)
    assert found.magnitude.examples[0][0] == (2, 3)
    assert (found.replays, found.outcomes, found.obstacle) == (20, 1, "")
    text = join(describe_op(found))
    assert "called at train.py:7 in forward: a @ b" in text
    assert "Its inputs were equal in both runs." in text
    assert "always gave the same output" in text


def join(lines):
    """Return lines as one, with single spaces."""
    return " ".join(" ".join(lines).split())


def test_different_inputs_are_reported_and_where_the_gradient_comes_from(dumped):
    one, other, result = product()
    found = dumped((one, other, result), (one + 1, other, (one + 1) @ other))
    assert (found.inputs_equal, found.only_numbers_differ) == (False, False)
    said = join(describe_op(replace(found, backward=True)))
    assert said.startswith("op: aten.mm.default, in the backward pass of train.py:7 in forward")
    assert "Its inputs differed, although no recorded operation wrote them." in said


def test_inputs_of_which_only_a_number_differs(dumped):
    one = torch.rand(3)
    found = dumped((one, 1.5, one * 1.5), (one, 2.5, one * 2.5), op="aten.mul.Tensor")
    assert (found.inputs_equal, found.only_numbers_differ) == (False, True)


def test_an_operation_that_cannot_run_alone_has_a_reason(dumped):
    same = product()
    found = dumped(same, same, op="nowhere.op.default")
    assert found.replays == 0
    text = join(describe_op(found))
    assert "could not be run alone: LedgerError: The dump holds the operation" in text


def test_draws_from_a_different_state_are_reported_and_confirmed(tmp_path):
    """The inputs were equal; the state of the generator differs."""
    place = ("op", "layers.0::aten.rand.generator", 0)
    for seed in (0, 1):
        words = {"generator": torch.Generator().manual_seed(seed)}
        content = {"op": "aten.rand.generator", "args": keep([[4]]), "kwargs": keep(words)}
        content |= {"outputs": keep([torch.rand(4, **words)]), "source": None}
        Dump(tmp_path / str(seed), 0).save(ProbePoint(0, 4, 4), place, content)
    where = SimpleNamespace(**vars(FOUND) | {"name": place[1], "call": 0})
    assert examine_op(where, [tmp_path / "0", tmp_path / "none"]) is None
    found = examine_op(where, [tmp_path / "0", tmp_path / "1"])
    assert (found.inputs_equal, found.generator_equal, found.outcomes) == (True, False, 1)
    text = join(describe_op(found))
    assert "Its inputs were equal in both runs, but not the state of its generator." in text
    assert "Confirmed: run alone 20 times from one state of its generator" in text


VALUES = [
    ("weight", "layers.0.weight", torch.ones(3), torch.tensor([1, 1 + 2**-23, 1]), (1, 1, (1,))),
    ("optimizer", "0.group.0:lr", 0.1, 0.2, (1, 4503599627370496, ())),
    ("scalar", "count", 3, 4, (1, None, ())),
]


@pytest.mark.parametrize("moment", ["batch", "initial"])
@pytest.mark.parametrize(("kind", "name", "one", "other", "expected"), VALUES)
def test_the_values_of_a_place_are_measured(tmp_path, moment, kind, name, one, other, expected):
    """In the initial digests an optimizer setting has no place, only its whole group."""
    for number, value in enumerate((one, other)):
        dump = Dump(tmp_path / str(number), 0)
        dump.save(ProbePoint(0, 4, 4), (kind, "elsewhere", 0), {"value": number})
        dump.save(ProbePoint(0, 4, 4), (kind, name, 0), {"value": value})
    own = name if moment == "batch" else name.partition(":")[0]
    where = SimpleNamespace(**vars(FOUND) | {"name": own, "moment": moment, "call": 0})
    found = measure_saved(where, kind, [tmp_path / "0", tmp_path / "1"])
    assert (found.count, found.ulps, found.examples[0][0]) == expected
