"""Measure steps per second and peak memory of eight ways to reduce gradients, alternating.

    python benchmarks/ranks/horovod_fusion.py        all workloads, about 30 minutes on two cores
    python benchmarks/ranks/horovod_fusion.py --rounds 1 --append    one more round
    python benchmarks/ranks/horovod_fusion.py --rounds 1 --workloads small --modes static ddp

Four processes on this machine, Gloo, one thread each. Each round launches every mode once, so that
load affects all modes alike, and ratios are those of one round. Horovod's own modes poll and sleep
while they wait, as ours do, except ``default-spinning``, unmodified Horovod. ``static-trimming``
(glibc returns freed memory to the system) is measured only on request.
Results go to ``benchmarks/results/horovod-fusion.json`` and, if matplotlib is installed, ``.svg``.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

try:
    import matplotlib as mpl
except ImportError:  # the measurements need no plot
    mpl = None

RESULTS = Path(__file__).parents[1] / "results"
WORKER = Path(__file__).parent / "horovod_worker.py"
# Steps per launch; fewer for the mode that is far slower, so that a round stays short.
STEPS = {"small": 200, "digits": 150, "resnet50-shapes": 12}
SLOW_STEPS = {"small": 8, "digits": 40, "resnet50-shapes": 6}
OURS = "static"
MODES = (
    *("plain", "default-spinning", "default", "threshold0", "groups"),
    *(OURS, "ddp"),
)
ON_REQUEST = ("static-trimming",)
LIMIT_SECONDS = 600


def launch(mode, workload, ranks):
    """Run one mode on all ranks; return the measurements of each."""
    steps = (SLOW_STEPS if mode == "threshold0" else STEPS)[workload]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    environment |= {"OMP_NUM_THREADS": "1"}
    if mode == "threshold0":
        environment |= {"HOROVOD_FUSION_THRESHOLD": "0"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(WORKER), mode, workload, str(steps), folder]
        if mode == "ddp":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            processes = [
                subprocess.Popen(
                    command,
                    env=environment | shared | {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
                )
                for rank in range(ranks)
            ]
            assert [process.wait(LIMIT_SECONDS) for process in processes] == [0] * ranks
        else:
            launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(ranks), "--gloo"]
            subprocess.run(
                [*launcher, *command], env=environment, check=True, timeout=LIMIT_SECONDS
            )
        return [json.loads(Path(folder, f"rank-{r}.json").read_text()) for r in range(ranks)]


def measure(workload, modes, rounds, ranks):
    """Alternate the modes; return the measurements of each."""
    found = {mode: [] for mode in modes}
    for number in range(rounds):
        for mode in modes:
            every = launch(mode, workload, ranks)
            slowest = min(rank["steps_per_second"] for rank in every)
            peak = max(rank["peak_mib"] for rank in every)
            agree = len({rank["digest"] for rank in every}) == 1
            found[mode].append(
                {
                    "steps_per_second": slowest,
                    "cpu_seconds_per_step": sum(rank["cpu_seconds_per_step"] for rank in every),
                    "page_faults_per_step": max(r["page_faults_per_step"] for r in every),
                    "peak_mib": peak,
                    "digest": every[0]["digest"],
                    "ranks_agree": agree,
                    "gradient_mib": every[0]["gradient_mib"],
                }
            )
            print(
                f"{workload:16} {number} {mode:11} {slowest:7.2f} steps/s {peak:6.0f} MiB",
                flush=True,
            )
    return found


def summarize(runs):
    """Return the median, quartiles and range of a mode, and the number of its digests."""
    speeds = [run["steps_per_second"] for run in runs]
    return {
        "median_steps_per_second": statistics.median(speeds),
        "quartiles": statistics.quantiles(speeds, n=4, method="inclusive")
        if len(speeds) > 1
        else [],
        "median_cpu_seconds_per_step": statistics.median(
            run["cpu_seconds_per_step"] for run in runs
        ),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "peak_mib": statistics.median(run["peak_mib"] for run in runs),
        "gradient_mib": runs[0]["gradient_mib"],
        "digests": len({run["digest"] for run in runs}),
        "runs": runs,
    }


def compare(modes):
    """Add the speed of ours relative to each mode: ratios within a round, with quartiles."""
    ours = modes.get(OURS, {"runs": []})["runs"]
    for name, found in modes.items():
        found.pop("ours_against_it", None)
        if name == OURS or len(found["runs"]) != len(ours) or len(ours) == 1:
            continue
        pairs = zip(ours, found["runs"], strict=True)
        ratios = [own["steps_per_second"] / other["steps_per_second"] for own, other in pairs]
        found["ours_against_it"] = {
            "median": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4, method="inclusive"),
            "rounds": len(ratios),
        }


def describe():
    """Return the machine and the versions."""
    import torch

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": os.getloadavg()[0],
        "torch": torch.__version__,
        "horovod": version("horovod"),
        "python": platform.python_version(),
    }


def plot(results, path):
    """Draw the medians with their ranges, one panel for each workload."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    workloads = results["workloads"]
    figure, panels = plt.subplots(
        1, len(workloads), figsize=(4 * len(workloads), 3.2), squeeze=False
    )
    for panel, name in zip(panels[0], workloads, strict=True):
        modes = workloads[name]
        shown = {mode: modes[mode] for mode in MODES if mode in modes and mode != "plain"}
        medians = [found["median_steps_per_second"] for found in shown.values()]
        below = [found["median_steps_per_second"] - found["slowest"] for found in shown.values()]
        above = [found["fastest"] - found["median_steps_per_second"] for found in shown.values()]
        colors = [_color(found) for found in shown.values()]
        panel.bar(list(shown), medians, yerr=[below, above], color=colors, capsize=3)
        panel.set_title(name)
        panel.set_ylabel("steps per second")
        panel.set_xticks(range(len(shown)), list(shown), rotation=40, ha="right")
    figure.suptitle("blue: one digest in all launches; red: several; grey: launched once")
    figure.tight_layout()
    figure.savefig(path)


def _color(found):
    if len(found["runs"]) == 1:
        return "#999"
    return "#c44" if found["digests"] > 1 else "#48a"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--workloads", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--modes", nargs="+", choices=[*MODES, *ON_REQUEST], default=list(MODES))
    parser.add_argument("--append", action="store_true", help="add rounds to an earlier part")
    parser.add_argument("--output", type=Path, default=RESULTS / "horovod-fusion.json")
    given = parser.parse_args()
    if mpl is None:
        print("matplotlib is not installed: no plot will be drawn.", file=sys.stderr)
    results = {"machine": describe(), "ranks": given.ranks, "workloads": {}}
    if given.append and given.output.exists():
        results = json.loads(given.output.read_text())
    given.output.parent.mkdir(parents=True, exist_ok=True)
    for workload in given.workloads:
        modes = results["workloads"].setdefault(workload, {})
        for mode, runs in measure(workload, given.modes, given.rounds, given.ranks).items():
            modes[mode] = summarize(modes.get(mode, {"runs": []})["runs"] + runs)
        compare(modes)
        given.output.write_text(json.dumps(results, indent=1) + "\n")
    if mpl is not None:
        plot(results, given.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
