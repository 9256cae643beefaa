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
    Target,
    build_environment,
    build_wheel,
)
from lightning_d9m.tools.launch.progress import StatusLine
from lightning_d9m.tools.output.columns import print_result

_TRIAL_SECONDS = 180  # two processes import torch; one that cannot reach the other waits

# Two processes, because one reduces nothing; integers, so that every order of the sum is exact.
# `horovodrun --check-build` reports PyTorch even if the extension is missing.
_TRIAL = """\
import torch, horovod.torch as hvd
hvd.init()
assert hvd.size() == 2 and hvd.gloo_built(), (hvd.size(), hvd.gloo_built())
assert hvd.mpi_built() or not {mpi}, "built without MPI"
assert hvd.nccl_built() or not {nccl}, "built without NCCL"
total = hvd.allreduce(torch.arange(5.0) * (hvd.rank() + 1), op=hvd.Sum)
assert total.tolist() == [0.0, 3.0, 6.0, 9.0, 12.0], total
hvd.shutdown()
"""

ARGUMENTS = """
--cache DIR  the folder for wheels (default: $XDG_CACHE_HOME/lightning_d9m/wheels)
--mpi  build with MPI in addition to Gloo
--gpu {auto,nccl,none}  NCCL operations for CUDA; auto: when torch is a CUDA build (default: auto)
--rebuild  build even if a cached or installed one works
--json  print the result as JSON
"""
EXAMPLE = "d9m install-horovod --gpu none"
SETTINGS = {"gpu": {"default": "auto"}}


def run(arguments: argparse.Namespace) -> int:
    """Install Horovod into this environment; keep an installed Horovod that works.

    Raises:
        CommandError: A tool is missing, the build failed, or the installed Horovod does not work.
    """
    target = _find_target(mpi=arguments.mpi, gpu=arguments.gpu)
    done, wheel = "kept", None
    if arguments.rebuild or _try_installed(target) is not None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = (arguments.cache or base / "lightning_d9m" / "wheels") / target.key
        wheel = next(iter(sorted(folder.glob("horovod-*.whl"))), None)
        done = "built" if wheel is None or arguments.rebuild else "installed"
        _pip(*REQUIREMENTS)  # those that are installed stay as they are
        if done == "built":
            wheel = _build_into(folder, target)
        # Without an index: this wheel, which was built for this torch, and nothing newer.
        _pip("--no-index", "--no-deps", "--force-reinstall", str(wheel))
        failure = _try_installed(target)
        if failure is not None:
            raise CommandError(
                f"Horovod was installed from {wheel} but an allreduce of two processes failed: "
                f"{failure} Run `d9m install-horovod --rebuild` to build it again."
            )
    facts = {
        "done": done,
        "horovod": HOROVOD_VERSION,
        "torch": target.torch,
        "mpi": target.mpi,
        "nccl": target.cuda is not None,
        "wheel": None if wheel is None else str(wheel),
    }
    said = f"Horovod {HOROVOD_VERSION} works with torch {target.torch} ({done})."
    print_result(arguments.format, facts, [said])
    return 0


def _find_target(*, mpi: bool, gpu: str) -> Target:
    try:
        import torch
    except ImportError as error:
        raise CommandError(
            f"Horovod is built against torch, but {sys.executable} has none: install torch first."
        ) from error
    version, cuda = str(torch.__version__), torch.version.cuda
    if gpu == "nccl" and cuda is None:
        raise CommandError(
            f"--gpu nccl needs a CUDA build of torch, but torch {version} is a CPU "
            "build: install a CUDA build or pass --gpu none."
        )
    if gpu == "none" or cuda is None:
        return Target(torch=version, mpi=mpi)
    chosen = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "").replace(" ", "")
    devices = range(torch.cuda.device_count())
    found = {"".join(map(str, torch.cuda.get_device_capability(number))) for number in devices}
    capabilities = chosen.split(",") if chosen else sorted(found)
    return Target(torch=version, mpi=mpi, cuda=cuda, capabilities=tuple(capabilities))


def _build_into(folder: Path, target: Target) -> Path:
    """Build a wheel and move it into its cache folder, so that a partial wheel never appears."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as name:
        environment = build_environment(target, Path(name), os.environ)
        title = f"Building Horovod {HOROVOD_VERSION} for torch {target.torch}; log: {log}"
        print(title, file=sys.stderr, flush=True)
        with StatusLine() as line:
            built = build_wheel(Path(name), log, environment, line.update)
        return built.replace(folder / built.name)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommandError(
            f"`{' '.join(command[1:])}` failed with exit status {done.returncode}: "
            f"{done.stderr.strip() or done.stdout.strip()}"
        )


def _try_installed(target: Target) -> str | None:
    """Reduce a tensor between two processes; return the problem, or None."""
    # Of the user's variables one may choose another controller, and the trial would judge that.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "trial.py"
        script.write_text(_TRIAL.format(mpi=target.mpi, nccl=target.cuda is not None))
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
