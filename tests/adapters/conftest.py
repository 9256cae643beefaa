"""A callback that was built and never run gives its variables back when it is collected."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forgotten_callbacks_collected() -> Iterator[None]:
    """Collect them within the test that forgot them, not in a later one."""
    yield
    gc.collect()
