"""Several processes that train together, as torchrun or horovodrun would start them.

As a script this is one of them: it calls a function of a file, and writes what that returns.
"""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from forking_python import TRAINING, shared_python
from scripts import load_script

from lightning_d9m import read_ledger
from lightning_d9m.tools.launch.processes import make_rank_variables

RANK = int(os.environ.get("HOROVOD_RANK") or os.environ.get("RANK", "0"))


def call_on_ranks(function, count, *arguments, fails=False, **words):
    """Call a function of a file on ranks; return what each returns, which JSON can hold.

    They run in a temporary folder.

    With ``fails`` the ranks need not succeed; return their statuses and outputs instead.
    """
    modules, file = [], function.__code__.co_filename
    if "pytorch_lightning" in Path(file).read_text():
        modules = [name.replace("lightning.pytorch", "pytorch_lightning") for name in TRAINING]
    with tempfile.TemporaryDirectory() as folder:
        given = json.dumps(arguments, default=str)
        call = (start_ranks if fails else run_ranks)(
            *(__file__, count, file, function.__name__, folder, given),
            folder=folder,
            modules=modules,
            **words,
        )
        if fails:
            return call
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(count)]


def run_ranks(script, count, *arguments, **words):
    """Run a script on ranks, which must succeed; return the outputs."""
    statuses, outputs = start_ranks(script, count, *arguments, **words)
    assert not any(statuses), "\n".join(outputs)[-8000:]
    return outputs


def start_ranks(
    script, count, *arguments, folder=None, horovod=False, modules=(), python=None, **variables
):
    """Run a script on ranks; return their statuses and outputs, with Horovod the launcher's.

    Args:
        script: The path.
        count: The number of ranks; 0 for one process that starts them.
        arguments: Those of the script.
        folder: The folder in which they run.
        horovod: Whether horovodrun starts them.
        modules: What the processes find imported, besides what all do.
        python: Another Python than the shared one.
        variables: Those of the environment.
    """
    python = python or shared_python(*modules)
    command = [python, script, *map(str, arguments)]
    ranks = make_rank_variables(count) if count else [{}]
    if horovod:
        command = [python, "-m", "horovod.runner.launch", "-np", str(count), "--gloo", *command]
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        ranks = [{"PATH": os.pathsep.join(path)}]
    common = {n: v for n, v in os.environ.items() if not n.startswith(("HOROVOD_", "PYTEST_"))}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"} | variables
    processes = [
        subprocess.Popen(
            command,
            env=common | own,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for own in ranks
    ]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return [process.returncode for process in processes], outputs


def read_records(path, kinds):
    """Return the records of some kinds in a run's ledger, by rank."""
    ledger, records = read_ledger(path), {}
    for rank in ledger.files:
        with ledger.open(rank) as reader:
            records[rank] = [record for record in reader.records() if isinstance(record, kinds)]
    return records


def has_ended(pid, seconds=60):
    """Return whether a process ends in time; one that is not yet reaped has ended, too."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def main():
    file, name, folder, given = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    result = getattr(load_script(file), name)(*json.loads(given))
    Path(folder, str(RANK)).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
