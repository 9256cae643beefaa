"""Helpers of all scripts: calls that alternate, quartiles, processes, results that are kept."""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_d9m.tools.launch.processes import make_rank_variables

RESULTS = Path(__file__).parent / "results"
LIMIT_SECONDS = 1800
# Arguments of a Trainer on the CPU that prints nothing and writes nothing.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
# Portable bits must be equal under these. The first capability is the machine's own, which would
# crash with vector instructions that it has not.
PORTABLE_SETTINGS = (
    {
        "ATEN_CPU_CAPABILITY": torch.backends.cpu.get_cpu_capability().lower(),
        "OMP_NUM_THREADS": "1",
    },
    {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2", "MKL_CBWR": "COMPATIBLE"},
)
_Found = TypeVar("_Found")


def describe_machine() -> dict[str, object]:
    """Return the date, the versions, and what decides how fast this machine is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def time_call(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call."""
    start = clock()
    call()
    return clock() - start


def alternate(ways: Mapping[str, Callable[[], _Found]], rounds: int) -> dict[str, list[_Found]]:
    """Call each way once in each round; return what each returned, without the first round.

    Load meets all ways alike, because a round holds all of them, and the next one has the reverse
    order. The first round warms up.
    """
    found: dict[str, list[_Found]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            result = ways[name]()
            if number:
                found[name].append(result)
    return found


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third."""
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def ratios(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return quartiles of the ratios within each round."""
    return quartiles([a / b for a, b in zip(some, others, strict=True)])


def run_ranks(
    count: int, script: str, *words: object, horovod: bool = False, **variables: str
) -> list[dict[str, Any]]:
    """Run a script on some processes of one thread; return what each wrote by ``write_rank``.

    The script gets the words, and then the folder for ``write_rank``. Horovod's launcher starts the
    processes on request.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", script, *map(str, words), folder]
        common = {name: v for name, v in os.environ.items() if not name.startswith("HOROVOD_")}
        common |= {"OMP_NUM_THREADS": "1", **variables}
        started = make_rank_variables(count)
        if horovod:
            launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(count), "--gloo"]
            command, started = [*launcher, *command], [{}]
        ranks = [subprocess.Popen(command, env=common | own) for own in started]
        statuses = [rank.wait(LIMIT_SECONDS) for rank in ranks]
        assert not any(statuses), f"{command}: {statuses}"
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]


def run_settings(settings: Sequence[Mapping[str, str]], script: str, *words: str) -> list[Any]:
    """Run a script with ``--here`` under each setting of variables; return the JSON it prints."""
    command = [sys.executable, script, "--here", *words]
    return [
        json.loads(subprocess.check_output(command, env={**os.environ, **setting}))
        for setting in settings
    ]


def write_rank(folder: str, found: Mapping[str, object], rank: int | None = None) -> None:
    """Write what a rank measured, by default the one of the variables, for ``run_ranks``."""
    rank = int(os.environ["RANK"]) if rank is None else rank
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def read_results(path: Path) -> dict[str, Any]:
    """Return the results that a file keeps; none if it is not there."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, changes: Mapping[str, Any]) -> None:
    """Write results into a file, beside the parts that were not measured now, and print them.

    A change that is a dict replaces entries of the dict that the file has by that name.
    """
    kept = read_results(path)
    for name, change in changes.items():
        old = kept.get(name)
        kept[name] = old | change if isinstance(old, dict) and isinstance(change, dict) else change
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(changes, indent=1), flush=True)
