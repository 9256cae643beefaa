"""A resumed run of three ranks, one of which was killed, ends as an uninterrupted run does."""

import pytest
from ledger_runs import find_breaks

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
RANKS = 3


def test_three_ranks_resume_after_one_was_killed(horovodrun, tmp_path):
    """From a checkpoint in the middle of an epoch."""
    status, output = horovodrun(RANKS, "resume.py", tmp_path, "straight", "killed")
    assert status != 0
    assert (tmp_path / "middle.ckpt").exists(), output[-4000:]
    status, output = horovodrun(RANKS, "resume.py", tmp_path, "resumed")
    assert status == 0, output[-4000:]
    straight, resumed = (
        read_ledger(tmp_path / name / "fit-000") for name in ("straight", "resumed")
    )
    comparison = compare_ledgers(straight, resumed)
    assert comparison.equal, comparison
    assert [rank.rank for rank in comparison.ranks] == list(range(RANKS))
    for file in resumed.files.values():
        (found,) = find_breaks(file)
        assert (found.epoch, found.batch, found.problem) == (1, 1, None)
