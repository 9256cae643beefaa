"""Measure logical ranks against DDP on two hosts, which are network namespaces of this machine.

    python benchmarks/ranks/hosts.py [--rounds N] [--bandwidths GBIT ...] [--delays MS ...]

Needs root. One process on each host, two logical ranks, Gloo over TCP: no shared memory. Bytes are
those that the interface of the first host counts, with the headers of all layers. The rounds, the
models and the ratios are those of ``logical_ranks.py``. A bandwidth of 0 is unlimited;
the others are limited by ``tc ... tbf``. ``network_delay.py`` makes a delay, and takes part of a
core; the all-reduce of one number shows it. Results go to ``benchmarks/results/hosts.json``.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from logical_ranks import WAYS, time_rounds
from torch import distributed

from lightning_d9m.integrations.strategies.sums.malloc import disable_malloc_trim
from lightning_d9m.integrations.strategies.sums.tree import Blocks

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import network_hosts
from measurement import RESULTS, describe_machine, keep, ratios
from network_delay import delayed

STEPS = {"small": 20, "large": 3}


def count_sent():
    """Return the bytes that this host has sent."""
    rows = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()]
    return next(int(row[9]) for row in rows if row[0] == f"{network_hosts.INTERFACE}:")


def work(model, rounds, path):
    """Run the process of one host, and write what it measured."""
    torch.set_num_threads(1)
    disable_malloc_trim()
    distributed.init_process_group("gloo")
    process = distributed.get_rank()
    latency = time_all_reduce()
    blocks = Blocks(2, 2)
    trainings = {name: WAYS[name](model, blocks, process) for name in WAYS}
    times = time_rounds(trainings, STEPS[model], rounds)
    sent = {}
    for name, training in trainings.items():
        distributed.barrier()
        before = count_sent()
        for _ in range(STEPS[model]):
            training.step()
        distributed.barrier()
        sent[name] = (count_sent() - before) / STEPS[model]
    size = sum(parameter.nbytes for parameter in trainings["ddp"].model.parameters())
    found = {"times": times, "sent": sent, "gradient_bytes": size, "latency": latency}
    Path(path).write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # the destruction of a Gloo group may wait for its threads


def time_all_reduce():
    """Return the median milliseconds of the all-reduce of one number."""
    number, times = torch.zeros(1), []
    for _ in range(30):
        start = time.perf_counter()
        distributed.all_reduce(number)
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times), 3)


def measure(model, bandwidth, delay, rounds):
    """Return the medians of a model on two hosts."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        hosts = stack.enter_context(network_hosts.make_hosts(2, folder))
        stack.enter_context(delayed(hosts, network_hosts.INTERFACE, delay))
        for host in hosts:
            if bandwidth:
                host.limit_bandwidth(bandwidth)
        command = [sys.executable, __file__, "--work", model, "--rounds", rounds]
        command += ["--file", "found.json"]
        ranks = [network_hosts.start_rank(hosts, rank, command) for rank in range(2)]
        statuses, outputs = network_hosts.wait_for(ranks, timeout=900)
        assert statuses == [0, 0], "\n".join(outputs)
        found = json.loads((hosts[0].folder / "found.json").read_text())
    wall = {way: [t[0] for t in times] for way, times in found["times"].items()}
    over = ratios(wall["logical"], wall["ddp"])
    return {
        "milliseconds": {way: round(1e3 * statistics.median(t), 2) for way, t in wall.items()},
        "wall_over_ddp": [round(each, 3) for each in over],
        "all_reduce_of_one_number_milliseconds": found["latency"],
        "gradient_bytes": found["gradient_bytes"],
        "bytes_of_the_interface": {way: round(sent) for way, sent in found["sent"].items()},
    }


def main():
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bandwidths", type=float, nargs="+", default=[0, 10, 1])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.1, 1])
    parser.add_argument("--work", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.work:
        work(words.work, words.rounds, words.file)
    networks = [(bandwidth, 0) for bandwidth in words.bandwidths]
    networks += [(0, delay) for delay in words.delays]
    for model in STEPS:
        for bandwidth, delay in networks:
            name = f"{model}, {f'{bandwidth:g} Gbit/s' if bandwidth else 'unlimited'}"
            name += f", delay {delay:g} ms" if delay else ""
            found = measure(model, bandwidth, delay, words.rounds)
            keep(RESULTS / "hosts.json", {"machine": describe_machine(), "networks": {name: found}})


if __name__ == "__main__":
    main()
