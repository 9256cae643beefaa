"""Start ranks: with horovodrun for Horovod, as separate processes for torch's DDP."""

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from forking_python import HOROVOD, shared_python

SCRIPTS = Path(__file__).parent / "scripts"
collect_ignore = ["scripts"]  # run by ranks
_LIMIT_SECONDS = 240


def _horovod_is_installed():
    try:
        importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def pytest_collection_modifyitems(items):
    """Skip tests that need Horovod if it is not installed."""
    if _horovod_is_installed():
        return
    skip = pytest.mark.skip(reason="needs Horovod, which `d9m install-horovod` builds")
    for item in items:
        if item.get_closest_marker("horovod"):
            item.add_marker(skip)


def _environment(extra=None):
    """Return the test's variables without those that would change the ranks."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("HOROVOD_", "PYTEST_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"} | (extra or {})


def _run(commands):
    """Run commands in parallel, with a time limit; return their statuses and the output."""
    processes = [
        subprocess.Popen(
            [*command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command, environment in commands
    ]
    try:
        outputs = [process.communicate(timeout=_LIMIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return [process.returncode for process in processes], "\n".join(outputs)


@pytest.fixture(scope="session")
def horovodrun():
    """Return a function that runs a script on several ranks: its status and its output."""

    def run(ranks, script, *arguments, variables=None):
        modules = HOROVOD
        if "import pytorch_lightning" in (SCRIPTS / script).read_text():
            modules = [name.replace("lightning.pytorch", "pytorch_lightning") for name in HOROVOD]
        python = shared_python(*modules)
        command = [python, "-m", "horovod.runner.launch", "-np", str(ranks), "--gloo"]
        command += [python, str(SCRIPTS / script), *map(str, arguments)]
        statuses, output = _run([(command, _environment(variables))])
        return statuses[0], output

    return run


@pytest.fixture(scope="session")
def results(horovodrun):
    """Return a function that runs a script that must succeed, and returns each rank's result."""

    def run(ranks, script, folder, *arguments):
        status, output = horovodrun(ranks, script, *arguments)
        assert status == 0, output[-4000:]
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]

    return run


@pytest.fixture(scope="session")
def ddp_run():
    """Return a function that runs a script on two ranks of torch's DDP over Gloo."""

    def run(script, folder, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        command = [shared_python(), str(SCRIPTS / script), *map(str, arguments)]
        ranks = [_environment(shared | {"NODE_RANK": "0", "LOCAL_RANK": rank}) for rank in "01"]
        statuses, output = _run([(command, environment) for environment in ranks])
        assert statuses == [0, 0], output[-4000:]
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]

    return run
