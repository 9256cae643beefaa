"""Fixtures for loops. Imported here, after both of Lightning's packages: see tests/conftest.py."""

from interruptions import begin_run  # noqa: F401 - a fixture
