"""Measure sums over the GPUs of a machine: ``python benchmarks/gpu/several_gpus.py -o FOLDER``.

Each of ``several-gpus.jsonl``'s rows is about sums of one size and dtype by torch's collectives,
under the variables of a session: in how many outputs repeated calls end while the devices compete
with other work, whether all ranks have the same, and what a call takes. The last row compares two
trainings by DDP with the callback. A machine with one device has one row, which says so.

``--device cpu`` does the same with two processes and Gloo, which shows only that it runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from competitor import Competitor
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn

from lightning_d9m.engine.control import environment
from lightning_d9m.engine.hashing.digest import digest
from lightning_d9m.engine.ledger.stack import capture_stack

BYTES = (2**10, 2**20, 25 * 2**20, 2**28)
DTYPES = (torch.float32, torch.bfloat16)
_D9M = (sys.executable, "-m", "lightning_d9m")
_EXAMPLE = Path(__file__).parents[2] / "examples" / "segmentation.py"


def append(folder: Path, row: dict[str, object]) -> None:
    """Write a row at once."""
    print(json.dumps(row), flush=True)
    with (folder / "several-gpus.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def measure_sums(rank: int, ranks: int, device: str, calls: int, folder: Path, store: str) -> None:
    """Add tensors on every rank; rank 0 writes the rows."""
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    competitor = Competitor(device)
    sizes = BYTES if device == "cuda" else BYTES[:2]
    for dtype in DTYPES:
        for size in sizes:
            generator = torch.Generator("cpu").manual_seed(rank)
            source = torch.randn(size // dtype.itemsize, generator=generator).to(dtype).to(place)
            seen, times = set(), []
            for turn in range(calls):
                competitor.disturb(turn)
                values = source.clone()
                if device == "cuda":
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                dist.all_reduce(values)
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
                seen.add(digest(values))
            own = torch.tensor(bytearray.fromhex(min(seen)), dtype=torch.uint8, device=place)
            everyones = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(everyones, own)
            if rank == 0:
                row = {
                    "task": f"all_reduce of {size:,} bytes in {dtype}",
                    "ranks": ranks,
                    "outputs": len(seen),
                    "equal_ranks": all(torch.equal(own, other) for other in everyones),
                    "microseconds": round(statistics.median(times) * 1e6, 1),
                }
                append(folder, row)
    dist.destroy_process_group()


def compare_trainings(device: str, ranks: int, folder: Path) -> None:
    """Train twice with DDP and compare the ledgers."""
    words = ["--accelerator", "gpu"] if device == "cuda" else ["--accelerator", "cpu"]
    words += ["--devices", str(ranks)]
    if device == "cpu":
        words += ["--epochs", "1", "--scenes", "16"]
    command = [*_D9M, "repeat", "-n", "2", "-o", folder / "ddp", "--json", "--"]
    done = subprocess.run(
        [*map(str, command), sys.executable, str(_EXAMPLE), *words],
        check=False,
        capture_output=True,
        text=True,
    )
    row: dict[str, object] = {"task": "two trainings with DDP", "ranks": ranks}
    append(folder, {**row, "status": done.returncode, "said": done.stdout[-2000:]})
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--no-trainings", action="store_true", help="only the sums")
    words = parser.parse_args()
    words.output.mkdir(parents=True, exist_ok=True)
    (words.output / "several-gpus.jsonl").unlink(missing_ok=True)
    ranks = torch.cuda.device_count() if words.device == "cuda" else 2
    if ranks < 2:
        append(words.output, {"unsupported": f"there is {ranks} CUDA device; a sum needs two"})
        return
    os.environ.setdefault(environment.NCCL, "^NVLS,NVLSTree")
    stack = capture_stack()
    facts = {name: stack[name] for name in stack if "nccl" in name.lower() or "order" in name}
    append(words.output, {"task": "facts", "ranks": ranks, **facts})
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, words.device, words.calls, words.output, str(Path(folder) / "store"))
        spawn(measure_sums, given, nprocs=ranks)
    if not words.no_trainings:
        compare_trainings(words.device, ranks, words.output)
    lines = (words.output / "several-gpus.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    wrong = [row for row in rows if row.get("outputs", 1) != 1 or row.get("status")]
    sys.exit(bool(wrong or not all(row.get("equal_ranks", True) for row in rows)))


if __name__ == "__main__":
    main()
