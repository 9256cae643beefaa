"""A scan of a few lines."""

import textwrap

import pytest

from lightning_d9m.tools.lint.rules import RULES
from lightning_d9m.tools.lint.scanner import scan_file

collect_ignore_glob = ["corpus/*"]  # source to be scanned, not run


@pytest.fixture
def scan(tmp_path):
    """Return a function from source to (line, rule) pairs, or to whole findings."""

    def run(text, name="program.py", whole=False):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text if isinstance(text, bytes) else textwrap.dedent(text).encode()
        path.write_bytes(data)
        found = scan_file(str(path), frozenset(RULES)).findings
        return found if whole else [(finding.line, finding.rule) for finding in found]

    return run
