"""Two processes that train together, as a launcher would start them."""

import os
import socket
import subprocess

from forking_python import shared_python


def train_on_two_ranks(script, folder):
    """Run a script with a folder on two ranks, which must succeed."""
    statuses, output = start_two_ranks(script, folder)
    assert statuses == [0, 0], output


def start_two_ranks(script, folder):
    """Run a script with a folder on two ranks; return their statuses and the output."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "d9m",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [shared_python(), script, folder],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(outputs)
