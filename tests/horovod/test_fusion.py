"""Repeated trainings give one digest with our buckets, and several with Horovod's own fusion."""

import pytest

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
LAUNCHES = 2
REPETITIONS = 3  # in each launch, with different jitter


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_buckets_give_one_digest_in_six_trainings_with_jitter(results, tmp_path, ranks):
    """Static buckets and fusion off, over Horovod and over torch: all trainings end equal."""
    runs = [
        results(ranks, "fusion.py", tmp_path, tmp_path, "ours", REPETITIONS)
        for _ in range(LAUNCHES)
    ]
    assert len(runs[0][0]) == 4
    for way in runs[0][0]:
        digests = [digest for run in runs for rank in run for digest in rank[way]]
        assert len(digests) == LAUNCHES * REPETITIONS * ranks
        assert len(set(digests)) == 1


@pytest.mark.parametrize("ranks", [3, 4])
def test_horovods_own_fusion_gives_differing_digests(results, tmp_path, ranks):
    """The negative control: with the same jitter, Horovod's own fusion gives several digests."""
    seen = set()
    for _ in range(LAUNCHES):
        run = results(ranks, "fusion.py", tmp_path, tmp_path, "default", REPETITIONS)
        assert all(rank == run[0] for rank in run)
        seen.update(run[0]["default"])
        if len(seen) > 1:
            return
    pytest.fail(f"Horovod's fusion gave one digest in {LAUNCHES} launches of {ranks} ranks.")
