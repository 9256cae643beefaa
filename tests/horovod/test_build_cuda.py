"""Horovod built with NCCL for a CUDA build of torch: it loads torch's NCCL, and trains on CPUs."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cuda_build, pytest.mark.horovod]

# The paths of the NCCL libraries of a process that has imported Horovod.
LIBRARIES = """
import torch, horovod.torch as hvd
assert hvd.nccl_built() and hvd.cuda_built() and hvd.gloo_built()
paths = {line.split()[-1] for line in open("/proc/self/maps") if "libnccl" in line}
print(*paths, sep="\\n")
"""


def test_torch_and_horovod_load_one_nccl():
    """Two NCCLs in one process would have two sets of variables and connections."""
    run = subprocess.run(
        [sys.executable, "-c", LIBRARIES], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    [path] = run.stdout.split()
    assert "nvidia/nccl" in path


def test_two_ranks_train_on_cpus(results, tmp_path):
    ranks = results(2, "train.py", tmp_path, "horovod_d9m", tmp_path, "plain")
    assert ranks[0] == ranks[1]
    assert ranks[0]["plain"]["steps"] > 0
