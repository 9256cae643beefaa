"""Evidence: which operation wrote what differs between two runs."""

import pytest
import torch

from lightning_d9m.engine.probes.evidence import Evidence, find_writer, read_evidence
from lightning_d9m.errors import LedgerError


def name_ops(text):
    """Return evidence of operations ``name=result``, in order; ``name<input`` only reads."""
    words = [word.replace("<", "=<").split("=") for word in text.split()]
    facts = {"backward": False, "source": "train.py:7 in hook: w.mul_(x)"}
    ops = {
        ("b", "op", n, 0): facts | {"op": n, "digests": [r, r], "writes": "<" not in r}
        for n, r in words
    }
    return {"ops": ops}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a=1 b=2 c=3", "a=1 b=2 c=3", ""),
        ("a=1 b=2 c=3", "a=1 b=9 c=8", "by b, called at train.py:7 in hook: w.mul_(x)"),
        ("a=1 x=2 c=3", "a=1 c=3", "by x, called at {}, in one of the runs only"),
        ("a=1 c=3", "a=1 x=2 c=3", "by x, called at {}, in one of the runs only"),
        ("a=1 x=2", "a=1", "by x, called at {}, in one of the runs only"),
        ("a=1 b<2 c=3", "a=1 b<3 c=4", ""),
        ("a=1 b=2", "b=2 a=1", "by a, called at {}, in another order"),
    ],
)
def test_the_operation_that_wrote_when_two_runs_began_to_differ(one, other, expected):
    line = "train.py:7 in hook: w.mul_(x)"
    assert find_writer(name_ops(one), name_ops(other), "") == expected.format(line)
    # State that is read when the batch of these operations begins is not written by them.
    assert find_writer(name_ops(one), name_ops(other), "b") == ""


def test_evidence_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(LedgerError, match=r"evidence-0\.pt cannot be written"):
        Evidence(tmp_path / "absent", 0, "loss", None).close()


def test_evidence_to_compare_with_must_be_there(tmp_path):
    with pytest.raises(LedgerError, match="has no evidence"):
        Evidence(tmp_path, 0, "loss", tmp_path / "absent")


def test_tensors_without_bytes_have_the_digest_of_their_type(tmp_path):
    evidence = Evidence(tmp_path, 0, "loss", None)
    empty = torch.empty(2, device="meta")
    content = {"args": [empty], "kwargs": {}, "outputs": [empty], "writes": False}
    evidence.take_op("::aten.neg", content | {"op": "neg", "source": "", "backward": False})
    evidence.close()
    assert len(read_evidence(tmp_path, 0)["ops"]) == 1
