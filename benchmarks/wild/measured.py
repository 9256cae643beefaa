"""Run a program as ``python PROGRAM`` does, and write how long its ``Trainer.fit`` takes.

    python benchmarks/wild/measured.py PACKAGE PROGRAM FILE [--deterministic]

PACKAGE is the Lightning package that the program uses. With --deterministic torch's deterministic
algorithms are on, as with ``Trainer(deterministic=True)``. FILE gets JSON: CPU seconds of this
process and of its children, and seconds of wall time, both summed over all fits, without imports.
Objects that exist before a fit are kept out of garbage collections during it: a full collection of
half a million objects takes 0.3 s, and it is chance whether a short fit contains one.
"""

import gc
import json
import resource
import runpy
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


def read_cpu() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    package, program, output, *options = sys.argv[1:]
    trainer = import_module(package).Trainer
    fit = trainer.fit
    total = {"cpu": 0.0, "wall": 0.0}

    def measured_fit(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        gc.freeze()
        if options == ["--deterministic"]:
            torch.use_deterministic_algorithms(True)
        cpu, wall = read_cpu(), time.perf_counter()
        try:
            return fit(*args, **kwargs)
        finally:
            total["cpu"] += read_cpu() - cpu
            total["wall"] += time.perf_counter() - wall
            gc.unfreeze()

    trainer.fit = measured_fit
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")
    Path(output).write_text(json.dumps(total))


if __name__ == "__main__":
    main()
