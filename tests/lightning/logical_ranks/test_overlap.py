"""With DDP, exchanges of gradients overlap the backward pass, and change no bit."""

import json
from pathlib import Path

import pytest
from rank_processes import run_ranks

from lightning_d9m import compare

SCRIPT = Path(__file__).parents[2] / "support" / "logical_overlap.py"
WAYS = ("overlapped", "one after the other", "after an error", "after errors of one rank")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("overlap")
    for count in (1, 2):
        run_ranks(SCRIPT, count, path)
    return path


@pytest.fixture(scope="module")
def found(folder):
    """Return what each of two processes found."""
    return [json.loads((folder / f"2-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_exchange_starts_before_the_backward_pass_ends(found, rank):
    first, *others = (found[rank][way][5:10] for way in WAYS)  # of the second step
    early, last = ["exchange"] * 2, "last gradient"
    assert first == others[1] == others[2] == [*early, last, "exchange", "exchange"]
    assert others[0] == [last, "exchange", "exchange", *early]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_without_overlap_on_any_number_of_processes(folder, way, count):
    expected = folder / "one after the other" / "1"
    assert compare(expected, folder / way / str(count)).equal


def test_an_error_of_one_rank_ends_the_others_though_its_process_goes_on(found):
    """Both processes then train again, in the test of the bits."""
    errors = ["ValueError: this backward pass fails", "ValueError: this hook fails"]
    assert found[1]["errors"] == errors
    for text, error in zip(found[0]["errors"], errors, strict=True):
        assert text.startswith(("RuntimeError", "DistNetworkError"))
        assert text.endswith(f"Rank 1 ended with {error}.")
