"""Start ranks with horovodrun."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forking_python import TRAINING, shared_python

SCRIPTS = Path(__file__).parent / "scripts"
collect_ignore = ["scripts"]  # run by ranks
_LIMIT_SECONDS = 240


def pytest_collection_modifyitems(items):
    """Skip tests that need Horovod if it is not installed."""
    if importlib.util.find_spec("horovod") is not None:
        return
    skip = pytest.mark.skip(reason="needs Horovod, which `d9m install-horovod` builds")
    for item in items:
        if item.get_closest_marker("horovod"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def horovodrun():
    """Return a function that runs a script on several ranks: its status and its output."""

    def run(ranks, script, *arguments):
        modules = []
        if "import pytorch_lightning" in (SCRIPTS / script).read_text():
            modules = [name.replace("lightning.pytorch", "pytorch_lightning") for name in TRAINING]
        python = shared_python(*modules)
        command = [python, "-m", "horovod.runner.launch", "-np", str(ranks), "--gloo"]
        command += [python, str(SCRIPTS / script), *map(str, arguments)]
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("HOROVOD_", "PYTEST_"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
        process = subprocess.Popen(
            command,
            env=kept | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=_LIMIT_SECONDS)[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        return process.returncode, output

    return run


@pytest.fixture(scope="session")
def results(horovodrun):
    """Return a function that runs a script that must succeed, and returns each rank's result."""

    def run(ranks, script, folder, *arguments):
        status, output = horovodrun(ranks, script, *arguments)
        assert status == 0, output[-4000:]
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]

    return run
