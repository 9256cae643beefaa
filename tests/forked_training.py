"""Runs of a training that cost little: children of a process that has imported everything.

What a run of ``d9m locate`` starts as a new process is here a fork of a server, with the variables
that it would have; only the seed of hashes cannot change, because Python reads it when it starts.
"""

import multiprocessing
import os
import socket
import sys
import traceback
from pathlib import Path

import gallery_training
import lightning.pytorch  # noqa: F401 - for the children

from lightning_d9m.lightning.autoload import entry_points


def run(words, variables, log, folder):
    """Be the process that is started as ``words``: its last word is the cause."""
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # for workers, as in a new process
    os.environ.clear()
    os.environ.update(variables)
    with Path(log).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = list(words)
    status = 1
    try:
        entry_points.load()
        gallery_training.train(words[-1])
        status = 0
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_ranks(ranks, words, variables, log):
    """Run a training in one process, or in the given number of ranks; return the exit statuses."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forked_training"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "d9m"}
    children = []
    for rank in range(ranks):
        own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        arguments = (words, dict(variables) | own, str(log), str(Path.cwd()))
        children.append(context.Process(target=run, args=arguments))
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(120)
    finally:
        for child in children:
            child.kill()
            child.join()
    return [child.exitcode for child in children]
