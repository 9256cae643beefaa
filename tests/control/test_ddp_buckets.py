"""The first step of DDP adds gradients in the same order as every other step."""

from pathlib import Path

from rank_processes import run_ranks

SCRIPT = Path(__file__).parents[1] / "support" / "bucket_ranks.py"


def test_the_first_step_of_three_processes_is_like_the_second(tmp_path):
    """Without a change it is not, unless parameters may be unused, which keeps the buckets."""
    run_ranks(SCRIPT, 3, tmp_path)
    found = {path.read_text() for path in tmp_path.glob("found-*")}
    assert found == {str([False, True, True, True])}
