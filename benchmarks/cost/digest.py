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

from lightning_d9m.engine.hashing.digest import digest, digest_many, locate

sys.path.insert(0, str(Path(__file__).parents[1]))
from measurement import RESULTS, alternate, describe_machine, keep, quartiles, ratios, time_call

Tensors = list[torch.Tensor]


def list_methods(tensors: Tensors) -> dict[str, Callable[[], object]]:
    """Return calls that read all tensors, by name."""
    targets = [torch.zeros_like(tensor) for tensor in tensors]

    def each(function: Callable[[torch.Tensor], object]) -> Callable[[], object]:
        return lambda: [function(tensor) for tensor in tensors]

    return {
        "digest": lambda: digest_many(tensors),
        "where the tensors are, alone": each(locate),
        "digest, one by one": each(digest),
        "memcpy (copy_ into a tensor in use)": lambda: [
            target.copy_(t) for target, t in zip(targets, tensors, strict=True)
        ],
        "memcpy (clone into new memory)": each(torch.Tensor.clone),
        "torch.sum": each(torch.Tensor.sum),
        "torch.hash_tensor": each(torch.hash_tensor),
        "torch.hash_tensor, int64 view": each(lambda t: torch.hash_tensor(t.view(torch.int64))),
        "sha256": each(lambda t: hashlib.sha256(t.numpy()).hexdigest()),
    }


def measure(tensors: Tensors, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return quartiles of the rates, and of the times over that of the digest."""
    ways = {name: partial(time_call, call) for name, call in list_methods(tensors).items()}
    seconds = alternate(ways, rounds)
    size = sum(tensor.nbytes for tensor in tensors)
    return {
        name: {
            "gigabytes_per_second": quartiles([size / second / 1e9 for second in own]),
            "times_as_long_as_digest": ratios(own, seconds["digest"]),
        }
        for name, own in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--elements", type=int, default=100_000_000, help="of the large tensor")
    parser.add_argument("--rounds", type=int, default=15)
    words = parser.parse_args()
    record = {"machine": describe_machine(), "elements": words.elements}
    record["one_tensor"] = measure([torch.rand(words.elements)], words.rounds)
    record["many_tensors"] = measure([torch.rand(1000) for _ in range(1000)], words.rounds)
    keep(RESULTS / "digest-cpu.json", record)


if __name__ == "__main__":
    main()
