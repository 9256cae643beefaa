"""Tests of Triton kernels in a process in which Triton's interpreter runs them on the CPU.

Triton reads TRITON_INTERPRET when it is imported, so all tests of a file run in one such process: a
fork of a Python that has imported torch (``forking_python.py``), which imports Triton anew. Each
test of pytest then reports the outcome of one of them.
"""

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path

import numpy as np
import pytest
import torch
from forking_python import shared_python
from triton_interpreter import spare_repetitions

from lightning_d9m.control.torch_flags import threads_pinned
from lightning_d9m.patches.triton import launch

pytest.importorskip("triton", reason="Triton has packages for Linux only")
_TESTS = Path(__file__).parents[2]
_IS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
_checks: dict[str, Callable[[], None]] = {}


def interpreted(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in the process of its file."""
    if _IS_INTERPRETER:
        _checks[test.__name__] = test
    module = f"patches.triton.{Path(test.__code__.co_filename).stem}"

    @wraps(test)
    def report() -> None:
        failure = _run_file(module)[test.__name__]
        assert failure is None, failure

    return report


@cache
def _run_file(module: str) -> dict[str, str | None]:
    run = subprocess.run(
        [shared_python(), __file__, module],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (_TESTS, *sys.path))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


def _forget_triton() -> None:
    """Remove the modules of Triton written in Python, which were imported to compile."""
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]


def _run_checks(module: str) -> dict[str, str | None]:
    warnings.simplefilter("error")  # a kernel that fails is withdrawn with a warning
    np.seterr(all="ignore")  # masked elements are computed, too
    launch._SMALL_BLOCK = 2048  # the interpreter's time grows with the number of programs
    spare_repetitions()
    importlib.import_module(module)
    outcomes: dict[str, str | None] = {}
    for name, check in sys.modules["patches.triton.interpreted"]._checks.items():
        torch.manual_seed(0)
        begin = time.perf_counter()
        try:
            with threads_pinned(1):
                check()
        except Exception:  # noqa: BLE001 - reported by the test of this name
            outcomes[name] = traceback.format_exc()
        else:
            outcomes[name] = None
        print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)  # noqa: T201
    return outcomes


@contextmanager
def kernels_on_cpu(path: str):
    """Let primitives use their kernels for tensors on the CPU; only that of a path is used."""
    used, load = set(), launch._load

    def note(wanted: str) -> object:
        used.add(wanted)
        return load(wanted)

    launch._load = note
    launch._device_types.add("cpu")
    try:
        yield
    finally:
        launch._device_types.discard("cpu")
        launch._load = load
    assert used == {path}


if __name__ == "__main__":
    _forget_triton()
    print(json.dumps(_run_checks(sys.argv[1])))  # noqa: T201 - read by _run_file
