"""What the dumps of two runs show of the operation at which they diverge."""

from types import SimpleNamespace

import pytest
import torch

from lightning_d9m.adapters.locate_op import examine_op
from lightning_d9m.adapters.locate_report import describe_op
from lightning_d9m.evidence.dumps import Dump, keep
from lightning_d9m.evidence.probes import Moment

PLACE = ("op", "layers.0::aten.mm.default", 1)
FOUND = SimpleNamespace(rank=0, epoch=0, step=4, batch=4, kind="op", name=PLACE[1], call=1)


@pytest.fixture
def dumped(tmp_path):
    """Return a function that dumps a product as each of two runs would; gives the finding."""

    def dump(*runs, op="aten.mm.default"):
        folders = []
        for number, (one, other, product) in enumerate(runs):
            folders.append(tmp_path / str(number))
            content = {"op": op, "args": keep([one, other]), "kwargs": {}}
            content |= {"outputs": keep([product]), "source": "train.py:7 in forward: a @ b"}
            Dump(folders[-1], 0).save(Moment(0, 4, 4), PLACE, content)
        return examine_op(FOUND, folders)

    return dump


def product():
    one, other = torch.rand(3, 4), torch.rand(4, 5)
    return one, other, one @ other


def test_other_outputs_for_equal_inputs(dumped):
    one, other, result = product()
    changed = result.clone()
    changed.view(torch.int32)[2, 3] += 1
    found = dumped((one, other, result), (one, other, changed))
    assert found.inputs_equal
    assert (found.magnitude.count, found.magnitude.ulps) == (1, 1)
    assert found.magnitude.examples[0][0] == (2, 3)
    assert (found.replays, found.outcomes, found.obstacle) == (20, 1, "")
    text = "\n".join(describe_op(found))
    assert "called at train.py:7 in forward: a @ b" in text
    assert "Its inputs were equal in both runs." in text
    assert "gave one output each time" in text


def test_other_inputs_are_told(dumped):
    one, other, result = product()
    found = dumped((one, other, result), (one + 1, other, (one + 1) @ other))
    assert not found.inputs_equal
    said = "Its inputs differed, though no recorded operation wrote them."
    assert said in "\n".join(describe_op(found))


def test_an_operation_that_cannot_be_run_alone_says_why(dumped):
    same = product()
    found = dumped(same, same, op="nowhere.op.default")
    assert found.replays == 0
    text = "\n".join(describe_op(found))
    assert "could not be run alone" in text
    assert "LedgerError: The dump holds the operation" in text


def test_what_was_not_dumped_has_no_finding(tmp_path):
    assert examine_op(FOUND, [tmp_path / "a", tmp_path / "b"]) is None
