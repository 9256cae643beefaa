"""Rates of the digest, beside those of what else reads or hashes a tensor.

    python benchmarks/cost/digest.py

Every method runs once in each round, and ratios are formed within a round. Rates are the tensor's
bytes for each second: a copy of n bytes, which reads n and writes n, counts as n. On CUDA the part
"digest" of gpu_suite.sh measures this.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lightning_d9m.engine.hashing.digest import digest

sys.path.insert(0, str(Path(__file__).parents[1]))
from measurement import RESULTS, alternate, describe_machine, keep, quartiles, ratios, time_call


def list_methods(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return calls that read a tensor, by name."""
    target = torch.zeros_like(tensor)
    return {
        "digest": lambda: digest(tensor),
        "memcpy (copy_ into a tensor in use)": lambda: target.copy_(tensor),
        "torch.sum": tensor.sum,
        "torch.hash_tensor": lambda: torch.hash_tensor(tensor),
        "torch.hash_tensor, int64 view": lambda: torch.hash_tensor(tensor.view(torch.int64)),
        "sha256": lambda: hashlib.sha256(tensor.numpy()).hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    words = parser.parse_args()
    tensor = torch.rand(words.elements)
    ways = {name: partial(time_call, call) for name, call in list_methods(tensor).items()}
    seconds = alternate(ways, words.rounds)
    found = {
        name: {
            "gigabytes_per_second": quartiles([tensor.nbytes / second / 1e9 for second in own]),
            "times_as_long_as_digest": ratios(own, seconds["digest"]),
        }
        for name, own in seconds.items()
    }
    record = {"machine": describe_machine(), "elements": words.elements, "one_tensor": found}
    keep(RESULTS / "digest-cpu.json", record)


if __name__ == "__main__":
    main()
