"""Measure logical ranks against DDP on two hosts, which are network namespaces of this machine.

    python benchmarks/ranks/hosts.py [--rounds N] [--bandwidths GBIT ...] [--delays MS ...]

Needs root. One process on each host, two logical ranks, Gloo over TCP: no shared memory. Each host
runs a setting of ``logical_ranks.py``. A bandwidth of 0 is unlimited; the others are limited by
``tc ... tbf``. ``network_delay.py`` makes a delay, and takes part of a core.
Results go to ``benchmarks/results/hosts.json``.
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import network_hosts
from measurement import RESULTS, describe_machine, keep, ratios
from network_delay import delayed

SCRIPT = Path(__file__).with_name("logical_ranks.py")
SETTINGS = {"small": "small-2-of-2", "large": "large-2-of-2"}


def measure(model, bandwidth, delay, rounds):
    """Return the medians of a model on two hosts."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        hosts = stack.enter_context(network_hosts.make_hosts(2, folder))
        stack.enter_context(delayed(hosts, network_hosts.INTERFACE, delay))
        for host in hosts:
            if bandwidth:
                host.limit_bandwidth(bandwidth)
        # Each host writes into its own working folder.
        command = [sys.executable, SCRIPT, "--work", SETTINGS[model], rounds, "."]
        ranks = [network_hosts.start_rank(hosts, rank, command) for rank in range(2)]
        statuses, outputs = network_hosts.wait_for(ranks, timeout=900)
        assert statuses == [0, 0], "\n".join(outputs)
        found = json.loads((hosts[0].folder / "0.json").read_text())
    wall = {way: [t[0] for t in times] for way, times in found["times"].items()}
    return {
        "milliseconds": {way: round(1e3 * statistics.median(t), 2) for way, t in wall.items()},
        "wall_over_ddp": [round(each, 3) for each in ratios(wall["logical"], wall["ddp"])],
        "gradient_bytes": found["gradient_bytes"],
        "bytes_sent": found["bytes_sent"],
    }


def main():
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--bandwidths", type=float, nargs="*", default=[0, 10, 1])
    parser.add_argument("--delays", type=float, nargs="*", default=[0.1, 1])
    words = parser.parse_args()
    networks = [(bandwidth, 0) for bandwidth in words.bandwidths]
    networks += [(0, delay) for delay in words.delays]
    for model in words.models:
        for bandwidth, delay in networks:
            name = f"{model}, {f'{bandwidth:g} Gbit/s' if bandwidth else 'unlimited'}"
            name += f", delay {delay:g} ms" if delay else ""
            found = measure(model, bandwidth, delay, words.rounds)
            keep(RESULTS / "hosts.json", {"machine": describe_machine(), "networks": {name: found}})


if __name__ == "__main__":
    main()
