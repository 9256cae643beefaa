"""A training with logical ranks in this process."""

import os
from functools import partial

import logical_refusals
import pytest
import torch


@pytest.fixture
def fit(tmp_path):
    before = dict(os.environ)
    yield partial(logical_refusals.fit, tmp_path)
    for name in os.environ.keys() - before:  # Lightning's launcher sets the address of the group
        del os.environ[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
