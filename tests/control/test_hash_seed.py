"""A hash seed counts as fixed only if it was there when Python started."""

import os
import subprocess
import sys

import pytest

REPORT = """
import os
os.environ["PYTHONHASHSEED"] = {inside!r} or os.environ.get("PYTHONHASHSEED", "")
from lightning_d9m.control.env_settings import describe_hash_seed_problem
print(describe_hash_seed_problem())
"""


@pytest.mark.parametrize(
    ("started_with", "inside", "options", "fixed"),
    [
        ("0", "", (), True),
        ("5", "", (), True),
        ("5", "", ("-E",), False),  # Python does not read it
        ("random", "", (), False),
        (None, "", (), False),
        (None, "0", (), False),  # too late: Python has read it
    ],
)
def test_the_hash_seed_is_judged_by_how_python_was_started(started_with, inside, options, fixed):
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if started_with is not None:
        variables["PYTHONHASHSEED"] = started_with
    code = REPORT.format(inside=inside)
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout == "None\n") == fixed
    assert fixed or "Start the program with PYTHONHASHSEED=0" in done.stdout
