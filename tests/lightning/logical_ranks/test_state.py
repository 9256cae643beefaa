"""Steps that change state train alike on any number of processes, and as plain DDP does."""

import json
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks

SCRIPT = Path(__file__).parents[2] / "support" / "logical_state.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what each rank found, by number of processes and rank."""
    folder = tmp_path_factory.mktemp("state")
    for count in (1, 3, 4):
        run_ranks(SCRIPT, count, folder)
    return {
        (count, rank): json.loads((folder / f"state-{count}-{rank}.json").read_text())
        for count in (1, 3, 4)
        for rank in range(count)
    }


@pytest.mark.parametrize("program", ["Keeping", "Steered"])
def test_every_number_of_processes_has_the_same_bits(found, program):
    for rank in range(3):
        state, logged, *rest = found[3, rank][program]
        expected, first, *others = found[1, 0][program]
        if rank:  # what a hook logs of a batch is the process's own, as in DDP
            logged, first = ({**values, "sample": 0} for values in (logged, first))
        assert [state, logged, *rest] == [expected, first, *others], rank


def test_the_values_are_those_of_plain_ddp_but_for_rounding(found):
    state, logged, *rest = found[1, 0]["Keeping"]
    plain_state, plain_logged, *plain_rest = found[4, 0]["Keeping"]
    assert rest == plain_rest
    assert logged == pytest.approx(plain_logged, rel=1e-4)
    assert state.keys() == plain_state.keys()
    for name, values in state.items():
        pair = map(torch.tensor, (values, plain_state[name]))
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-5, msg=name)


def test_an_error_of_one_rank_is_named_on_all_which_train_again(found):
    """The programs of the other tests come after it."""
    for (count, rank), programs in found.items():
        if count < 4 and rank == count - 1:
            assert programs["error"] == "ValueError: this step fails"
        elif count < 4:
            assert programs["error"].startswith("RankLostError: ")
            assert f"Rank {count - 1} ended with ValueError: this step fails." in programs["error"]
