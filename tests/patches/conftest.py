"""Patches run on a CPU here, by the text of their kernels, whatever other tests have loaded."""

from unittest.mock import patch

import pytest

from lightning_d9m.ops.patches.triton.launch import natives


@pytest.fixture(autouse=True)
def _no_natives():
    with patch.dict(natives, clear=True):
        yield
