"""Long tables that steps change are put back; that a change was missed for some steps is said."""

from types import SimpleNamespace

import pytest
from torch import nn

from lightning_d9m.logical_ranks.sandbox import _THOROUGH, Sandbox


class Tokenizer:
    """Stands for an object of a library with a vocabulary."""

    __module__ = "json.tokenizer"

    def __init__(self):
        self.vocabulary = dict.fromkeys(map(str, range(2000)), 0)


@pytest.fixture
def run():
    """Return a function that runs steps of two logical ranks; each calls a function."""
    module = nn.Linear(1, 1)
    module.tokenizer = Tokenizer()
    blocks = SimpleNamespace(logical_ranks=2)
    sandbox = Sandbox(module, SimpleNamespace(block=range(2), blocks=blocks), lambda *_: False)

    def steps(count, change):
        for _ in range(count):
            sandbox.begin("train")
            for rank in range(2):
                change(module.tokenizer.vocabulary, rank)
                sandbox.end(rank, last=rank == 1)
            sandbox.finish("train")
        sandbox.close()
        return module.tokenizer.vocabulary

    return steps


def count(vocabulary, rank):
    assert vocabulary["7"] == vocabulary["8"]  # as at the start of the step
    vocabulary["7"] = vocabulary["8"] = vocabulary["7"] + 1


def test_what_the_first_steps_change_is_compared_in_each_step(run):
    assert run(9, count)["7"] == 9


def test_what_is_added_is_merged_in_each_step(run):
    run(9, lambda *_: None)
    found = run(2, lambda own, rank: own.setdefault(f"new {rank} {len(own)}", rank))
    assert [*found][2000:] == ["new 0 2000", "new 1 2000", "new 0 2002", "new 1 2002"]


@pytest.mark.parametrize("steps", [1, _THOROUGH])
def test_what_later_steps_change_first_is_said_once(run, steps):
    run(5, lambda *_: None)
    with pytest.warns(UserWarning, match=r"tokenizer\.vocabulary', which has 2000 items, has ch"):
        run(steps, count)
    before = run(1, count)["7"]
    assert run(9, count)["7"] == before + 9
