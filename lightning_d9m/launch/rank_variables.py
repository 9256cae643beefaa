"""The environment variables of a training's processes on this machine, as torchrun sets them.

Lightning's ``TorchElasticEnvironment`` and ``torch.distributed.init_process_group`` read them, so
that the Trainer starts no processes itself.
"""

import os
import socket

_ADDRESS = "127.0.0.1"


def make_rank_variables(count: int) -> list[dict[str, str]]:
    """Return the variables of each of ``count`` processes, by rank."""
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(_find_free_port()),
        # By this one torch and Lightning recognize a launch by torchrun.
        "TORCHELASTIC_RUN_ID": "d9m",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Lightning takes these as the Trainer's default arguments.
        "PL_TRAINER_DEVICES": str(count),
        "PL_TRAINER_NUM_NODES": "1",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def count_threads(processes: int) -> int:
    """Return how many threads each of several processes may use on this machine, at least 1."""
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available else os.cpu_count() or 1
    return max(1, cores // processes)


def _find_free_port() -> int:
    """Return a port that is free now; the process of rank 0 opens it."""
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port
