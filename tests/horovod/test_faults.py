"""When one rank goes wrong every rank ends, says why, and leaves a readable ledger behind."""

import os
import re

import pytest

from lightning_d9m.ledger.folder import read_ledger

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
DIFFERENT = "RanksDisagreeError: The ranks are about to do different things"
# The fault, what rank 0 says, what rank 1 says; None where it is killed.
FAULTS = {
    "killed": ("RankLostError: Rank 0 waited for the backward pass", None),
    "raising": (
        r"(?s)RanksDisagreeError: .*rank 1: ends with ValueError: the third batch is bad",
        "ValueError: the third batch is bad",
    ),
    "gradients": (r"(?s)the backward pass:.*branch.weight: yes on rank 0; no on rank 1",) * 2,
    "batches": (rf"(?s){DIFFERENT}.*rank 0: training on 8 .*rank 1: training on 6 batches",) * 2,
    "stream": (rf"(?s){DIFFERENT}.*rank 0: the backward pass.*rank 1: the end of validation",) * 2,
    "settings": (r"(?s)StackDifferenceError: Rank 1 .*strategy.bucket_bytes.*actual:   1024",) * 2,
    "validation": (rf"(?s){DIFFERENT}.*rank 0: the end of validation.*rank 1: all_gather",) * 2,
    "ulp": (r"DriftError: Rank 1 differs from rank 0 .*1 of 8 weights differ, first net.0.weight",)
    * 2,
}


CASES = [*((fault, "torch") for fault in FAULTS), ("killed", "horovod"), ("raising", "horovod")]


@pytest.mark.parametrize(("fault", "transport"), CASES)
def test_every_rank_ends_with_the_cause(horovodrun, tmp_path, fault, transport):
    """The launcher returns, no process is left, and the errors name what went wrong."""
    status, output = horovodrun(2, "faults.py", tmp_path, fault, transport)
    assert status != 0
    for rank, expected in enumerate(FAULTS[fault]):
        error = tmp_path / f"error-{rank}"
        if expected is None:
            assert not error.exists()
        else:
            assert error.exists(), output[-4000:]
            assert re.search(expected, error.read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)
    if (tmp_path / "d9m").exists():
        assert read_ledger(tmp_path / "d9m") is not None
