"""Several processes that train together, as torchrun would start them."""

import os
import socket
import subprocess
import sys

from forking_python import shared_python

from lightning_d9m.launch.processes import make_rank_variables


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


def start_agents(script, variables, *arguments):
    """Run a script by agents of torchrun, one for each dict of variables, with a worker each.

    The first one has the rendezvous, and starts its worker also without the others. A worker finds
    the process of its agent in AGENT_PID.

    Returns:
        The statuses of the agents, and their outputs.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["sh", "-c", 'export AGENT_PID=$$; exec "$0" "$@"']
    command += [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{len(variables)}"]
    command += ["--no-python", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run"]
    command += ["--local-addr=127.0.0.1"]
    timeouts = "last_call_timeout=1,keep_alive_interval=3,keep_alive_max_attempt=4"
    # An agent that joins a round after the first one waits forever for the address of a shared
    # store (torch 2.13): `next_rendezvous` publishes it in the round that made it.
    shared = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [
        subprocess.Popen(
            [
                *command,
                f"--rdzv-conf=is_host={str(number == 0).lower()},{timeouts}",
                shared_python(),
                script,
                *map(str, arguments),
            ],
            env=os.environ | shared | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, own in enumerate(variables)
    ]
    try:
        outputs = [agent.communicate(timeout=400)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its workers too
    return [agent.returncode for agent in agents], outputs
