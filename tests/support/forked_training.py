"""Cheap runs of ``gallery_training.py``: forks of one process that has imported everything.

A run of ``d9m locate`` starts an interpreter, whose imports take 5 s of CPU time; a fork
trains in 0.3 s. It has the environment variables of the new process. Only its hash seed cannot
change, because Python reads it when it starts.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

_SECONDS = 120


class TrainingServer:
    """The process that forks; a context manager that ends it."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.communicate()

    def run(self, ranks, argv, variables, log):
        """Run a training in the given number of processes; return their wait statuses."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        common |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "d9m"}
        own = (
            [{}]
            if ranks == 1
            else [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        )
        request = {"argv": argv, "log": str(log), "folder": str(Path.cwd())}
        request["variables"] = [variables | changes for changes in own]
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _serve():
    """Answer each line of standard input; end with the process that wrote it."""
    import gallery_training
    import lightning.pytorch  # noqa: F401 - for the forks

    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for variables in request["variables"]:
            children.append(os.fork())
            if not children[-1]:
                _train(gallery_training, variables, **request)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        sys.stdout.write(f"{json.dumps(statuses)}\n")
        sys.stdout.flush()


def _train(gallery_training, own, *, argv, log, folder, variables):
    """Be the process that is started as ``argv``, whose last entry is the cause."""
    from lightning_d9m.lightning.autoload import entry_points

    signal.alarm(_SECONDS)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(own)
    with Path(log).open("ab", buffering=0) as file, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = argv
    status = 1
    try:
        entry_points.load()
        gallery_training.train(argv[-1])
        status = 0
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
