"""Measures the digest against what else reads or hashes a tensor: ``python benchmarks/digest.py``.

Every method runs once in each round, so that a slow moment of the machine meets all of them; the
ratios are formed within a round. Rates are the tensor's bytes for each second: a copy of n bytes,
which reads n and writes n, counts as n. Writes digest-<device>.json. With OMP_NUM_THREADS=1, CPU
time is measured, which other programs change little.
"""

import argparse
import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch
import xxhash

from lightning_d9m.engine.hashing.digest import digest, digest_many, locate

RESULTS = Path(__file__).parents[1] / "results"
OURS = "digest"


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().numpy()).hexdigest()


def _one_tensor(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    target = torch.zeros_like(tensor)
    methods: dict[str, Callable[[], object]] = {
        OURS: lambda: digest(tensor),
        "memcpy (copy_ into a tensor in use)": lambda: target.copy_(tensor),
        "memcpy (clone into new memory)": tensor.clone,
        "torch.sum": tensor.sum,
        "torch.hash_tensor": lambda: torch.hash_tensor(tensor),
        "torch.hash_tensor, int64 view": lambda: torch.hash_tensor(tensor.view(torch.int64)),
        "sha256": lambda: _sha256(tensor),
    }
    if tensor.is_cuda:
        from lightning_d9m.engine.hashing import xxh3_cuda

        memory = [locate(tensor)]
        methods["digest's kernel alone"] = lambda: xxh3_cuda.start_hashing(memory, tensor.device)
    return methods


def _many_tensors(tensors: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    return {
        OURS: lambda: digest_many(tensors),
        "where the tensors are, alone": lambda: [locate(t) for t in tensors],
        "digest, one by one": lambda: [digest(t) for t in tensors],
        "memcpy (copy_ into a tensor in use)": lambda: [
            target.copy_(t) for target, t in zip(targets, tensors, strict=True)
        ],
        "memcpy (clone into new memory)": lambda: [t.clone() for t in tensors],
        "torch.sum": lambda: [t.sum() for t in tensors],
        "torch.hash_tensor": lambda: [torch.hash_tensor(t) for t in tensors],
        "torch.hash_tensor, int64 view": lambda: [
            torch.hash_tensor(t.view(torch.int64)) for t in tensors
        ],
        "sha256": lambda: [_sha256(t) for t in tensors],
    }


def _time(method: Callable[[], object], device: str) -> float:
    """Returns the seconds of one call, what it left running on the device included."""
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.process_time if _is_single(device) else time.perf_counter
    begin = clock()
    method()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - begin


def _is_single(device: str) -> bool:
    """Return whether one thread does all; its CPU time is then what is measured."""
    return device == "cpu" and torch.get_num_threads() == 1


def _measure(
    methods: dict[str, Callable[[], object]], size: int, repeats: int, device: str
) -> dict[str, dict[str, object]]:
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for round_ in range(repeats + 1):
        for name, method in methods.items():
            taken = _time(method, device)
            if round_:  # the first one warms up
                seconds[name].append(taken)
    return {
        name: {
            "seconds": statistics.quantiles(taken, n=4),
            "gigabytes_per_second": statistics.quantiles([size / t / 1e9 for t in taken], n=4),
            "times_as_long_as_digest": statistics.quantiles(
                [t / ours for t, ours in zip(taken, seconds[OURS], strict=True)], n=4
            ),
        }
        for name, taken in seconds.items()
    }


def _print(title: str, results: dict[str, dict[str, object]]) -> None:
    print(f"\n{title}\n{'method':<38}{'GB/s':>8}{'quartiles':>18}", end="")
    print(f"{'time / digest':>16}{'quartiles':>18}")
    for name, result in results.items():
        print(f"{name:<38}", end="")
        for field, width in (("gigabytes_per_second", 8), ("times_as_long_as_digest", 16)):
            low, middle, high = result[field]
            print(f"{middle:>{width}.2f}{f'{low:.2f} - {high:.2f}':>18}", end="")
        print()


def _name_processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--elements", type=int, default=100_000_000, help="of the large tensor")
    parser.add_argument("--repeats", type=int, default=15, help="rounds that count")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    device, repeats = arguments.device, arguments.repeats

    large = torch.rand(arguments.elements, device=device)
    small = [torch.rand(1000, device=device) for _ in range(1000)]
    record = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "xxhash": xxhash.VERSION,
        "libxxhash": xxhash.XXHASH_VERSION,
        "python": platform.python_version(),
        "processor": _name_processor(device),
        "threads": torch.get_num_threads(),
        "device": device,
        "elements": arguments.elements,
        "repeats": repeats,
        "quartiles": "each list holds the first quartile, the median and the third",
        "one_tensor": _measure(_one_tensor(large), large.nbytes, repeats, device),
        "many_tensors": _measure(_many_tensors(small), 4_000_000, repeats, device),
    }
    _print(f"one tensor of {arguments.elements:,} float32", record["one_tensor"])
    _print("1,000 tensors of 1,000 float32", record["many_tensors"])
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"digest-{device}{'-1-thread' * _is_single(device)}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
