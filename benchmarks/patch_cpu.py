"""CPU time of patched ops over torch's own, on one thread of a CPU.

    PYTHONPATH=.:tests python benchmarks/patch_cpu.py -o benchmarks/results/patch-cpu.json

The processor time of a process is counted, not the time that passes, so other programs disturb
less.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as nnf
from patches.cases import GRADIENT_CASES
from torch import Tensor

from lightning_d9m.patches.registration import patches_applied

Call = Callable[[], object]


def list_calls() -> dict[str, Call]:
    """Return a call of each op: gradients of larger inputs, and updates of 2^17 terms."""
    calls: dict[str, Call] = {}
    for case in GRADIENT_CASES:
        sides = [side * 4 for side in case.shape[1:]]
        if "-" not in case.label and "fraction" not in case.label:
            calls[case.label] = _differentiate(case.forward, torch.randn(2, *sides))
    rows, index = torch.randn(2**13, 16), torch.randint(2**10, (2**13,))
    target, wide = torch.randn(2**10, 16), index[:, None].expand(-1, 16)
    calls["index_add"] = lambda: target.index_add(0, index, rows)
    calls["scatter_add"] = lambda: target.scatter_add(0, wide, rows)
    calls["index_put"] = lambda: target.index_put((index,), rows, accumulate=True)
    calls["index_reduce mean"] = lambda: target.index_reduce(0, index, rows, "mean")
    calls["bincount"] = lambda: torch.bincount(index.repeat(16), rows.flatten())
    calls["embedding"] = _differentiate(lambda table: nnf.embedding(index, table), target)
    grid = torch.rand(2, 64, 64, 2) * 2 - 1
    calls["grid_sample 2d"] = _differentiate(
        lambda x: nnf.grid_sample(x, grid, align_corners=False), torch.randn(2, 16, 32, 32)
    )
    return calls


def _differentiate(forward: Callable[[Tensor], Tensor], image: Tensor) -> Call:
    leaf = image.clone().requires_grad_()
    output = forward(leaf)
    gradient = torch.randn(output.shape)
    return lambda: torch.autograd.grad(output, leaf, gradient, retain_graph=True)


def measure(call: Call) -> float:
    """Return milliseconds: the least of several runs."""
    call()
    best = float("inf")
    for _ in range(5):
        begin = time.process_time()
        call()
        best = min(best, time.process_time() - begin)
    return best * 1e3


def main() -> None:
    """Write the time of each op by torch and by the replacement, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    words = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for op, call in list_calls().items():
        own = measure(call)
        with patches_applied("CPU"):
            ours = measure(call)
        rows.append(
            {
                "op": op,
                "torch_ms": round(own, 3),
                "ms": round(ours, 3),
                "ratio": round(ours / own, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    facts = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "rows": rows}
    words.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
