"""``d9m locate`` in a training with Horovod's own fusion: the allreduce is the cause."""

import pytest

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600)]


def test_horovods_own_fusion_is_located_in_the_allreduce(results, tmp_path):
    """Each rank's local gradients are equal, and those after the allreduce differ on all ranks."""
    found, *_ = results(3, "ported.py", tmp_path, tmp_path)
    assert (found["cause"], found["ranks"]) == ("all-reduce", [0, 1, 2]), found
    assert found["kind"] == "gradient"
    assert found["name"].startswith("layers.")
