"""`d9m install-horovod`: build, cache, install and test Horovod for the installed torch."""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning_d9m.errors import CommandError
from lightning_d9m.integrations.strategies.horovod.build import (
    HOROVOD_VERSION,
    REQUIREMENTS,
    build_environment,
    build_wheel,
    name_wheel,
)
from lightning_d9m.tools.output.columns import print_result

_TRIAL_SECONDS = 180

# Two processes, because one reduces nothing; integers, so that every order of the sum is exact.
# `horovodrun --check-build` reports PyTorch even if the extension is missing.
_TRIAL = """\
import torch, horovod.torch as hvd
hvd.init()
assert hvd.size() == 2 and hvd.gloo_built(), (hvd.size(), hvd.gloo_built())
assert hvd.mpi_built() or not {mpi}, "built without MPI"
total = hvd.allreduce(torch.arange(5.0) * (hvd.rank() + 1), op=hvd.Sum)
assert total.tolist() == [0.0, 3.0, 6.0, 9.0, 12.0], total
hvd.shutdown()
"""

ARGUMENTS = """
--cache DIR  the folder for wheels (default: $XDG_CACHE_HOME/lightning_d9m/wheels)
--mpi  build with MPI in addition to Gloo
--rebuild  build even if a cached or installed one works
--json  print the result as JSON
"""
EXAMPLE = "d9m install-horovod --mpi"


def run(arguments: argparse.Namespace) -> int:
    """Install Horovod into this environment; keep an installed Horovod that works.

    Raises:
        CommandError: A tool is missing, the build failed, or the installed Horovod does not work.
    """
    torch_version, mpi = _find_torch(), arguments.mpi
    done, wheel = "kept", None
    if arguments.rebuild or _try_installed(mpi=mpi) is not None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = (arguments.cache or base / "lightning_d9m" / "wheels") / name_wheel(
            torch_version, mpi=mpi
        )
        wheel = next(iter(sorted(folder.glob("horovod-*.whl"))), None)
        done = "built" if wheel is None or arguments.rebuild else "installed"
        _pip(*REQUIREMENTS)  # those that are installed stay as they are
        if done == "built":
            wheel = _build_into(folder, torch_version, mpi=mpi)
        _pip("--no-index", "--no-deps", "--force-reinstall", str(wheel))
        failure = _try_installed(mpi=mpi)
        if failure is not None:
            raise CommandError(
                f"Horovod was installed from {wheel} but an allreduce of two processes failed: "
                f"{failure} Run `d9m install-horovod --rebuild` to build it again."
            )
    facts = {
        "done": done,
        "horovod": HOROVOD_VERSION,
        "torch": torch_version,
        "mpi": mpi,
        "wheel": None if wheel is None else str(wheel),
    }
    said = f"Horovod {HOROVOD_VERSION} works with torch {torch_version} ({done})."
    print_result(arguments.format, facts, [said])
    return 0


def _find_torch() -> str:
    try:
        import torch
    except ImportError as error:
        raise CommandError(
            f"Horovod is built against torch, but {sys.executable} has none: install torch first."
        ) from error
    return str(torch.__version__)


def _build_into(folder: Path, torch_version: str, *, mpi: bool) -> Path:
    """Build a wheel and move it into its cache folder, so that a partial wheel never appears."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as name:
        environment = build_environment(Path(name), os.environ, mpi=mpi)
        title = f"Building Horovod {HOROVOD_VERSION} for torch {torch_version}, some minutes"
        print(f"{title}; log: {log}", file=sys.stderr, flush=True)
        built = build_wheel(Path(name), log, environment)
        return built.replace(folder / built.name)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommandError(
            f"`{' '.join(command[1:])}` failed with exit status {done.returncode}: "
            f"{done.stderr.strip() or done.stdout.strip()}"
        )


def _try_installed(*, mpi: bool) -> str | None:
    """Reduce a tensor between two processes; return the problem, or None."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "trial.py"
        script.write_text(_TRIAL.format(mpi=mpi))
        command = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", "--gloo"]
        command += [sys.executable, str(script)]
        words: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _TRIAL_SECONDS}
        try:
            done = subprocess.run(command, check=False, cwd=folder, env=environment, **words)
        except subprocess.TimeoutExpired:
            return f"it did not finish within {_TRIAL_SECONDS} s."
    if done.returncode == 0:
        return None
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
    return f"{lines[0] if lines else f'exit status {done.returncode}'}."
