"""Five launches give one digest with our buckets, and another each time with Horovod's fusion."""

import pytest

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
RUNS = 5


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_buckets_give_one_digest_in_five_runs_with_jitter(results, tmp_path, ranks):
    """Static buckets and fusion off, over Horovod and over torch: every run and rank ends equal."""
    runs = [results(ranks, "fusion.py", tmp_path, tmp_path, "ours") for _ in range(RUNS)]
    for way in runs[0][0]:
        assert len({rank[way] for run in runs for rank in run}) == 1


@pytest.mark.parametrize("ranks", [3, 4])
def test_horovods_own_fusion_gives_differing_digests(results, tmp_path, ranks):
    """The negative control: the jitter that our buckets withstand shows in Horovod's own."""
    seen = set()
    for _ in range(RUNS):
        run = results(ranks, "fusion.py", tmp_path, tmp_path, "default")
        assert len({rank["default"] for rank in run}) == 1
        seen.add(run[0]["default"])
        if len(seen) > 1:
            return
    pytest.fail(f"Horovod's default fusion gave one digest in {RUNS} runs of {ranks} ranks.")
