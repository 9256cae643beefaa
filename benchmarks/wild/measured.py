"""Run a program again and again in one process, and write how long its ``Trainer.fit`` takes.

    python benchmarks/wild/measured.py PACKAGE PROGRAM ROUNDS FILE

PACKAGE is the Lightning package that the program uses. Each round runs the program once in each
mode: ``plain``; ``torch``, with torch's deterministic algorithms alone; and ``d9m``, with the
callback that ``LIGHTNING_D9M=1`` adds. FILE gets JSON: for each round and mode the CPU seconds of
this process and of its children, and seconds of wall time, both summed over all fits.

In the mode ``d9m`` also ``own``: the CPU seconds of the hooks and wrappers of this package alone,
without the code of torch, Lightning and the program that they call. It varies by a few percent of
itself where the time of a whole fit varies by 5 to 20 percent from run to run, in any mode.

``"first"`` has the first round, in which modules are imported and facts of the machine are read.
Objects that exist before a fit are kept out of garbage collections during it: a full collection of
half a million objects takes 0.3 s, and it is chance whether a short fit contains one.
"""

import gc
import json
import os
import resource
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lightning_d9m.engine.control.seeding import SeededHost
from lightning_d9m.integrations.lightning.callback import AddedCallback, DeterminismCallback
from lightning_d9m.integrations.lightning.resume import resumable_fit
from lightning_d9m.integrations.lightning.resume.resumable_fit import ResumableFit
from lightning_d9m.integrations.lightning.trainer_session import TrainerSession

MODES = ("plain", "torch", "d9m")
# What Lightning and the loaders call; functions that contain code of the program have no own time.
_HOOKS = [name for name in vars(DeterminismCallback) if name.startswith("on_")]
_CALLED: list[tuple[Any, list[str]]] = [
    (DeterminismCallback, ["setup", "teardown", *_HOOKS]),
    (TrainerSession, ["start_evaluation", "end_evaluation", "start_epoch", "close"]),
    (ResumableFit, ["capture", "_find_late_changes", "_begin_validation"]),
    (resumable_fit, ["remember", "make_manifest"]),
    (SeededHost, ["__enter__", "__exit__"]),
]


class OwnTime:
    """The CPU time of the main thread in the functions of ``_CALLED``, nested calls once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        for owner, names in _CALLED:
            for name in names:
                setattr(owner, name, self._measure(getattr(owner, name)))

    def _measure(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - start

        return measured


def read_cpu() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run_once(
    program: Path, trainer: Any, fit: Callable[..., Any], mode: str, own_time: OwnTime
) -> dict[str, float]:
    """Run the program in an empty folder; return the CPU and wall seconds of its fits."""
    total = {"cpu": 0.0, "wall": 0.0, "own": 0.0}

    def measured_fit(own: Any, *args: Any, **kwargs: Any) -> Any:
        if mode == "d9m":
            own.callbacks.insert(0, AddedCallback())
        gc.collect()
        gc.freeze()
        if mode == "torch":
            torch.use_deterministic_algorithms(True)
        cpu, wall = read_cpu(), time.perf_counter()
        own_time.seconds = 0.0
        try:
            return fit(own, *args, **kwargs)
        finally:
            total["cpu"] += read_cpu() - cpu
            total["wall"] += time.perf_counter() - wall
            total["own"] += own_time.seconds
            torch.use_deterministic_algorithms(False)
            gc.unfreeze()

    trainer.fit = measured_fit
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            runpy.run_path(str(program), run_name="__main__")
        finally:
            os.chdir(here)
    return total


def main() -> None:
    package, program, rounds, output = sys.argv[1:]
    trainer = import_module(package).Trainer
    fit, own_time = trainer.fit, OwnTime()
    sys.argv = [program]
    times = []
    for number in range(int(rounds) + 1):
        order = MODES if number % 2 else MODES[::-1]
        path = Path(program).resolve()
        times.append({mode: run_once(path, trainer, fit, mode, own_time) for mode in order})
    first, *others = times
    Path(output).write_text(json.dumps({"first": first, "rounds": others}))


if __name__ == "__main__":
    main()
