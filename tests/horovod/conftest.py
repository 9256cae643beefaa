"""Skip what needs Horovod."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("horovod") is not None:
        return
    skip = pytest.mark.skip(reason="needs Horovod, which `d9m install-horovod` builds")
    for item in items:
        if item.get_closest_marker("horovod"):
            item.add_marker(skip)
