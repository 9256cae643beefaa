"""If one rank fails, every rank ends, names the cause, and leaves a readable ledger."""

import re

import pytest
from rank_processes import has_ended

from lightning_d9m.engine.ledger.folder import read_ledger

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
DIFFERENT = "RanksDisagreeError: The ranks are about to do different things"
LOST = "RankLostError: Rank 0 waited for the backward pass"
# The fault, the error of rank 0 and that of rank 1; None for a rank that is killed, which comes
# last: after it, nothing can follow.
FAULTS = {
    "batches": (rf"(?s){DIFFERENT}.*rank 0: training on 8 .*rank 1: training on 6 batches",) * 2,
    "stream": (rf"(?s){DIFFERENT}.*rank 0: the backward pass.*rank 1: the end of validation",) * 2,
    "settings": (r"(?s)StackDifferenceError: Rank 1 .*strategy.bucket_bytes.*this run:  1024",) * 2,
    "validation": (rf"(?s){DIFFERENT}.*rank 0: the end of validation.*rank 1: all_gather",) * 2,
    "ulp": (r"DriftError: Ranks 0 and 1 differ from each other .*1 of 6 weights differ, first net",)
    * 2,
    "raising": (
        r"RankLostError: .*Rank 1 ended with ValueError: the third batch is bad",
        "ValueError: the third batch is bad",
    ),
    "killed": (rf"{LOST}.*Rank 1 \(process \d+\) was killed or exited\.", None),
}


def test_every_rank_ends_with_the_cause(horovodrun, tmp_path):
    """The launcher returns, no process is left, and the errors name the fault."""
    status, output = horovodrun(2, "faults.py", tmp_path, *FAULTS)
    assert status != 0
    for fault, errors in FAULTS.items():
        for rank, expected in enumerate(errors):
            error = tmp_path / fault / f"error-{rank}"
            if expected is None:
                assert not error.exists()
            else:
                assert error.exists(), output[-4000:]
                assert re.search(expected, error.read_text()), error.read_text()
        if fault != "settings":  # which is found before the fit
            ledger = read_ledger(tmp_path / fault / "d9m")
            assert [len(list(ledger.records(rank))) > 0 for rank in range(2)] == [True, True]
    for rank in range(2):
        assert has_ended(int((tmp_path / f"pid-{rank}").read_text()))
