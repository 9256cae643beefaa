"""Evidence: which operation wrote what differs between two runs."""

import pytest

from lightning_d9m.engine.probes.evidence import find_writer


def name_ops(text):
    """Return evidence of operations ``name=result``, in order."""
    words = [word.split("=") for word in text.split()]
    facts = {"backward": False, "source": "train.py:7 in hook: w.mul_(x)"}
    ops = {("b", "op", n, 0): facts | {"op": n, "digests": [r]} for n, r in words}
    return {"ops": ops}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a=1 b=2 c=3", "a=1 b=2 c=3", ""),
        ("a=1 b=2 c=3", "a=1 b=9 c=8", "by b, called at train.py:7 in hook: w.mul_(x)"),
        ("a=1 x=2 c=3", "a=1 c=3", "by x, called at {}, in one of the runs only"),
        ("a=1 c=3", "a=1 x=2 c=3", "by x, called at {}, in one of the runs only"),
    ],
)
def test_the_operation_that_wrote_when_two_runs_began_to_differ(one, other, expected):
    line = "train.py:7 in hook: w.mul_(x)"
    assert find_writer(name_ops(one), name_ops(other), "") == expected.format(line)
