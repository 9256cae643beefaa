"""Repeated trainings give one digest with our buckets; others give that of what they fuse."""

import pytest

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]
LAUNCHES = 2
REPETITIONS = 2  # in each launch, with different jitter


@pytest.mark.parametrize("ranks", [2, 3])
def test_buckets_give_one_digest_in_four_trainings_with_jitter(results, tmp_path, ranks):
    """Static buckets, fusion off, and messages, of Horovod and of torch: all end equal."""
    runs = [
        results(ranks, "fusion.py", tmp_path, tmp_path, "ours", REPETITIONS)
        for _ in range(LAUNCHES)
    ]
    digests = [digest for run in runs for rank in run for way in rank.values() for digest in way]
    assert len(digests) == LAUNCHES * REPETITIONS * ranks * 6
    assert len(set(digests)) == 1


def test_which_gradients_share_a_buffer_decides_the_digest(results, tmp_path):
    """The negative control: in Horovod's own fusion time decides it, and here the program does."""
    run = results(3, "fusion.py", tmp_path, tmp_path, "groups", LAUNCHES)
    assert all(rank == run[0] for rank in run)
    digests = [set(found) for found in run[0].values()]
    assert list(map(len, digests)) == [1, 1, 1]
    assert len(set.union(*digests)) == 3
