"""Steps per second and peak memory of ways to reduce gradients on four processes, alternating.

    python benchmarks/ranks/horovod_fusion.py        all workloads, about 30 minutes on two cores
    python benchmarks/ranks/horovod_fusion.py --rounds 1 --workloads small --modes static ddp

Four processes on this machine, Gloo, one thread each. Each round launches every mode once, so that
load affects all modes alike, and ratios are those of one round. Horovod's own modes poll and sleep
while they wait, as ours do, except ``default-spinning``, unmodified Horovod. ``static-trimming``
(glibc returns freed memory to the system) is measured only on request.
Results go to ``benchmarks/results/horovod-fusion.json``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from measurement import (
    LIMIT_SECONDS,
    RESULTS,
    alternate,
    describe_machine,
    keep,
    quartiles,
    ratios,
    run_ranks,
)

WORKER = Path(__file__).with_name("horovod_worker.py")
# Steps of a launch; fewer for the mode that is far slower, so that a round stays short.
STEPS = {"small": 200, "digits": 150, "resnet50-shapes": 12}
SLOW_STEPS = {"small": 8, "digits": 40, "resnet50-shapes": 6}
OURS = "static"
MODES = ("default-spinning", "default", "threshold0", OURS, "ddp")
ON_REQUEST = ("static-trimming",)
RANKS = 4


def launch(mode, workload):
    """Run one mode on all ranks; return its measurements."""
    steps = (SLOW_STEPS if mode == "threshold0" else STEPS)[workload]
    words = (mode, workload, steps)
    every = run_ranks(RANKS, WORKER, *words) if mode == "ddp" else run_horovod(*words)
    found = {
        "steps_per_second": min(rank["steps_per_second"] for rank in every),
        "cpu_seconds_per_step": sum(rank["cpu_seconds_per_step"] for rank in every),
        "page_faults_per_step": max(rank["page_faults_per_step"] for rank in every),
        "peak_mib": max(rank["peak_mib"] for rank in every),
        "digest": every[0]["digest"],
        "ranks_agree": len({rank["digest"] for rank in every}) == 1,
    }
    print(f"{workload:16} {mode:16} {found['steps_per_second']:7.2f} steps/s", flush=True)
    return found


def run_horovod(mode, workload, steps):
    """Run the worker under Horovod's launcher; return what each rank wrote."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    environment |= {"OMP_NUM_THREADS": "1"}
    if mode == "threshold0":
        environment |= {"HOROVOD_FUSION_THRESHOLD": "0"}
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(RANKS), "--gloo"]
        command = [sys.executable, str(WORKER), mode, workload, str(steps), folder]
        subprocess.run([*launcher, *command], env=environment, check=True, timeout=LIMIT_SECONDS)
        return [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(RANKS)]


def summarize(runs, ours):
    """Return quartiles of a mode, the number of its digests, and the speed of ours over it."""
    speeds = [run["steps_per_second"] for run in runs]
    own = [run["steps_per_second"] for run in ours]
    return {
        "median_steps_per_second": statistics.median(speeds),
        "quartiles": quartiles(speeds),
        "peak_mib": statistics.median(run["peak_mib"] for run in runs),
        "digests": len({run["digest"] for run in runs}),
        "ours_against_it": ratios(own, speeds) if own else None,
        "runs": runs,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--modes", nargs="+", choices=[*MODES, *ON_REQUEST], default=list(MODES))
    parser.add_argument("--output", type=Path, default=RESULTS / "horovod-fusion.json")
    words = parser.parse_args()
    for workload in words.workloads:
        ways = {mode: partial(launch, mode, workload) for mode in words.modes}
        runs = alternate(ways, words.rounds)
        found = {mode: summarize(own, runs.get(OURS, [])) for mode, own in runs.items()}
        keep(words.output, {"machine": describe_machine(), "workloads": {workload: found}})


if __name__ == "__main__":
    main()
