"""Measure the speed and memory with which ``d9m compare`` compares two ledgers.

    python benchmarks/compare.py -o benchmarks/results/compare-cpu.json

Each case is a synthetic pair that is compared by a process of its own, so that its peak of resident
memory is that of the case alone. What is counted is digests, each with its place: a record has as
many as its batch has places, or its epoch weights. Times are the best of several, in CPU time of
the one thread that compares, so that other programs change them little. They include reading, the
check of every line and the parsing of what must be parsed; the files are in the page cache.
"""

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.records import Digests, End, Evaluation, Header, RunFacts
from lightning_d9m.engine.ledger.format.writer import LedgerWriter
from lightning_d9m.tools.comparison.ledgers import compare_ledgers

# Places a batch, for the modules of a small network and of a large one; share of all places.
SHAPES = {
    "one place": (1, 0.1),
    "tiny batches (4 places)": (4, 0.4),
    "small batches (64 places)": (64, 4.0),
    "large batches (2,048)": (2_048, 4.0),
}
WEIGHTS = 16


def write_trace(path, places, batches, *, turned=False, other_from=None, others=None):
    """Write a trace; from a batch on, ``others`` of the places have other digests.

    Args:
        path: The file.
        places: Places in each batch.
        batches: Number of batches.
        turned: Whether the places come in another order.
        other_from: The first batch that differs; None for none.
        others: How many places differ from there on.
    """
    names = [["output", f"encoder.layers.{n // 8}.block.{n % 8}", 0] for n in range(places)]
    order = list(range(places))
    if turned:
        order[0::2], order[1::2] = order[1::2], order[0::2]
    draw = random.Random(0)  # noqa: S311 - any digits do
    pool = [[draw.randbytes(16) for _ in range(places)] for _ in range(7)]
    with LedgerWriter(path) as writer:
        begin(writer)
        writer.write({"kind": "layout", "id": 0, "places": [names[n] for n in order]})
        same = [b"".join(drawn[n] for n in order) for drawn in pool]
        other = [
            digests[: 16 * (places - (others or 0))] + b"f" * 16 * (others or 0) for digests in same
        ]
        for number in range(batches):
            digests = (same if other_from is None or number < other_from else other)[number % 7]
            record = {"kind": "probes", "epoch": 0, "step": number, "batch": number, "layout": 0}
            writer.write(record | {"digests": digests})
        writer.write(End(status="finished"))


def write_epochs(path, epochs, *, other_from=None):
    """Write the digests of many epochs of a model with a few weights."""
    with LedgerWriter(path) as writer:
        begin(writer)
        for epoch in range(epochs):
            other = other_from is not None and epoch >= other_from
            weights = {f"layers.{n}.weight": f"{epoch * 31 + n:032x}" for n in range(WEIGHTS)}
            if other:
                weights["layers.3.weight"] = "f" * 32
            digests = Digests(
                moment="epoch", epoch=epoch, step=epoch, totals={}, groups={"weights": weights}
            )
            writer.write(digests)
        writer.write(End(status="finished"))


def write_small_records(path, count):
    """Write evaluations, of one digest each."""
    with LedgerWriter(path) as writer:
        begin(writer)
        for step in range(count):
            words = {"name": "test", "epoch": 0, "step": step, "batches": 1}
            writer.write(Evaluation(**words, outputs=f"{step:032x}"))
        writer.write(End(status="finished"))


def begin(writer):
    """Write what every ledger begins with."""
    created = str(time.time_ns())  # as in real runs, no two headers are equal
    header = Header(
        rank=0, world_size=1, fit=0, seed=0, created=created, settings={}, stack={}, package="0"
    )
    writer.write(header)
    writer.write(RunFacts(model="m", parameters=1, train=()))


def measure_here(paths, repeats):
    """Compare two files in this process; return seconds, verdict, counts and peak memory."""
    seconds = []
    for _ in range(repeats):
        begun = time.process_time()
        comparison = compare_ledgers(*(read_ledger(path) for path in paths))
        seconds.append(time.process_time() - begun)
    (rank,) = comparison.ranks
    return {
        "verdict": comparison.verdict,
        "records": rank.records,
        "places": rank.places,
        "differing": rank.differing + rank.differing_places,
        "seconds": min(seconds),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def size_of(path):
    """Return the bytes of a ledger's files."""
    return path.stat().st_size


def measure(name, write, other, count, repeats):
    """Write a pair, compare it in a process of its own, and say the rate."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "expected.jsonl", Path(folder) / "actual.jsonl"]
        write(paths[0])
        (other or write)(paths[1])
        command = [sys.executable, __file__, "--pair", *map(str, paths), "-r", str(repeats)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        result |= {
            "case": name,
            "per_second": round(count / result["seconds"]),
            "bytes_per_digest": round(size_of(paths[0]) / count, 2),
        }
    print(
        f"{name:<52} {result['per_second']:>12,}/s {result['peak_rss_mb']:6.0f} MB "
        f"{result['bytes_per_digest']:6.2f} B  {result['verdict']}",
        flush=True,
    )
    return result


def run_cases(places, epochs, repeats):
    """Measure every case."""
    cases = []
    for shape, (size, share) in SHAPES.items():
        batches = int(places * share) // size
        half = batches // 2
        pairs = {
            "equal": {},
            "one place differs from the middle on": {"other_from": half, "others": 1},
            "all places differ from the first on": {"other_from": 0, "others": size},
            "another order of places": {"turned": True},
        }
        if size == 1:
            del pairs["another order of places"], pairs["all places differ from the first on"]
        for name, change in pairs.items():
            cases.append(
                measure(
                    f"{shape}: {name}",
                    partial(write_trace, places=size, batches=batches),
                    partial(write_trace, places=size, batches=batches, **change),
                    batches * size,
                    repeats,
                )
            )
    cases.append(
        measure(
            "epoch digests (16 weights): equal",
            lambda path: write_epochs(path, epochs),
            None,
            epochs * WEIGHTS,
            repeats,
        )
    )
    cases.append(
        measure(
            "epoch digests (16 weights): half differ",
            lambda path: write_epochs(path, epochs),
            lambda path: write_epochs(path, epochs, other_from=epochs // 2),
            epochs * WEIGHTS,
            repeats,
        )
    )
    small = 5 * epochs
    cases.append(
        measure(
            "records of one digest each: equal",
            lambda path: write_small_records(path, small),
            None,
            small,
            repeats,
        )
    )
    return cases


def main():
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("-n", "--places", type=int, default=5_000_000)
    parser.add_argument("-e", "--epochs", type=int, default=100_000)
    parser.add_argument("-r", "--repeats", type=int, default=2)
    parser.add_argument("--pair", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pair:
        print(json.dumps(measure_here(arguments.pair, arguments.repeats)))
        return
    facts = {"python": platform.python_version(), "processors": os.cpu_count()}
    facts["places"] = arguments.places
    cases = run_cases(arguments.places, arguments.epochs, arguments.repeats)
    if arguments.output:
        arguments.output.write_text(json.dumps({**facts, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
