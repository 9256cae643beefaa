"""With DDP, exchanges of gradients overlap the backward pass, and change no bit."""

import json
from pathlib import Path

import pytest
from rank_processes import run_ranks, start_ranks

from lightning_d9m import compare

SCRIPT = Path(__file__).parents[2] / "support" / "logical_overlap.py"
WAYS = ("overlapped", "one after the other", "after an error")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("overlap")
    for count in (1, 2):
        run_ranks(SCRIPT, count, path, "steps")
    return path


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_exchange_starts_before_the_backward_pass_ends(folder, rank):
    found = json.loads((folder / f"2-{rank}.json").read_text())
    first, *others = (found[way][5:10] for way in WAYS)  # of the second step
    early, last = ["exchange"] * 2, "last gradient"
    assert first == others[1] == [*early, last, "exchange", "exchange"]
    assert others[0] == [last, "exchange", "exchange", *early]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_without_overlap_on_any_number_of_processes(folder, way, count):
    expected = folder / "one after the other" / "1"
    assert compare(expected, folder / way / str(count)).equal


def test_an_error_of_one_rank_in_the_backward_pass_ends_the_others(tmp_path):
    statuses, outputs = start_ranks(SCRIPT, 2, tmp_path, "lost")
    assert 0 not in statuses
    assert "this backward pass fails" in outputs[1]
    assert "Rank 1 ended with ValueError: this backward pass fails" in outputs[0]
