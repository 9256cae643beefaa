"""Several processes that train together, as torchrun would start them."""

import os
import select
import subprocess

from forking_python import shared_python

from lightning_d9m import read_ledger
from lightning_d9m.tools.launch.processes import make_rank_variables


def run_ranks(script, count, *arguments, **variables):
    """Run a script on ranks, which must succeed; return the outputs."""
    statuses, outputs = start_ranks(script, count, *arguments, **variables)
    assert statuses == [0] * count, "\n".join(outputs)
    return outputs


def start_ranks(script, count, *arguments, **variables):
    """Run a script on ranks; return their statuses and outputs."""
    common = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    processes = [
        subprocess.Popen(
            [shared_python(), script, *map(str, arguments)],
            env=common | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for own in make_rank_variables(count)
    ]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
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
