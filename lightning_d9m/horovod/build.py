"""The recipe by which Horovod 0.28.1 builds against a torch that is newer than it.

The release of June 2023 is the newest and comes as source only. Its sources compile with today's
torch once the compiler speaks C++20. CMake writes its own ``-std=`` after ``CXXFLAGS``, so that a
flag alone loses: a compiler wrapper that appends the standard last wins.

This module needs neither torch nor Horovod at import.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_d9m.errors import CommandError

HOROVOD_VERSION = "0.28.1"
RECIPE = 1  # raise it when a change here makes another wheel from the same inputs
REQUIREMENTS = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi")
_CMAKE_AT_LEAST = (3, 13)
_MEGABYTES_PER_JOB = 1500  # the peak of one compilation of torch's headers, rounded up


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a wheel is built for.

    Attributes:
        torch: The version of torch with its local tag: the wheel links libtorch's C++ ABI.
        mpi: Build the MPI controller and operations in addition to Gloo.
        nccl: Build the CUDA operations on NCCL.
    """

    torch: str
    mpi: bool
    nccl: bool

    @property
    def key(self) -> str:
        """The name of the cache folder: everything that the bits of the wheel depend on."""
        backends = "-".join(
            ["gloo", *(["mpi"] if self.mpi else []), *(["nccl"] if self.nccl else [])]
        )
        abi = sysconfig.get_config_var("SOABI") or sysconfig.get_platform()
        return f"horovod-{HOROVOD_VERSION}-recipe{RECIPE}-torch{self.torch}-{abi}-{backends}"


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The programs that a build runs: the user's compiler command, and the path of CMake."""

    compiler: tuple[str, ...]
    cmake: str


def find_tools(target: Target, environment: Mapping[str, str]) -> Tools:
    """Find what the build runs, before minutes are spent on it.

    Raises:
        CommandError: A program is missing or too old; the message names its Debian package.
    """
    # A venv that is not activated is not on PATH, yet `pip install cmake` puts cmake there.
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    compiler = tuple(shlex.split(environment.get("CXX", ""))) or ("c++",)
    needed = [(compiler[0], "a C++ compiler", "g++"), ("make", "make", "make")]
    if target.mpi:
        needed.append(("mpicxx", "MPI's compiler", "openmpi-bin libopenmpi-dev"))
    for program, what, package in needed:
        if shutil.which(program, path=path) is None:
            raise CommandError(
                f"Horovod is built from source and needs {what}, but {program!r} is not on PATH: "
                f"install it (Debian: `apt-get install {package}`) and run the command again."
            )
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if not headers.exists():
        raise CommandError(
            f"Horovod is built from source and needs Python's headers, but there is no {headers}: "
            "install them (Debian: `apt-get install python3-dev`) and run the command again."
        )
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise CommandError(
            "Horovod is built from source and needs CMake 3.13 or newer, but 'cmake' is not on "
            "PATH: install it (Debian: `apt-get install cmake`; any venv: `pip install cmake`) and "
            "run the command again."
        )
    reply = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version (\d+)\.(\d+)", reply)
    if found is None or (int(found[1]), int(found[2])) < _CMAKE_AT_LEAST:
        raise CommandError(
            f"Horovod needs CMake 3.13 or newer, but {cmake} says {reply.strip()!r}: "
            "`pip install cmake` brings a newer one into this environment."
        )
    nvcc = environment.get("HOROVOD_CUDA_HOME", "") + "/bin/nvcc"
    if target.nccl and shutil.which("nvcc", path=path) is None and not Path(nvcc).exists():
        raise CommandError(
            f"torch {target.torch} is a CUDA build and Horovod's NCCL operations need the CUDA "
            "compiler, but 'nvcc' is neither on PATH nor under HOROVOD_CUDA_HOME: install the CUDA "
            "toolkit of torch's CUDA version, or pass `--gpu none` for CPU training only."
        )
    return Tools(compiler=compiler, cmake=cmake)


def build_environment(
    target: Target, tools: Tools, work: Path, environment: Mapping[str, str]
) -> dict[str, str]:
    """Write the compiler wrapper into ``work`` and return the environment of the build."""
    wrapper = work / "c++"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(tools.compiler)} "$@" -std=c++20\n')
    wrapper.chmod(0o755)
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    built = {
        **environment,
        "PATH": path,
        "CXX": str(wrapper),
        "HOROVOD_CMAKE": tools.cmake,  # else Horovod's setup looks on PATH and may download one
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses Gloo's 2.8.12
        "HOROVOD_WITH_PYTORCH": "1",  # a torch that is not found is an error, not an empty wheel
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        ("HOROVOD_WITH_MPI" if target.mpi else "HOROVOD_WITHOUT_MPI"): "1",
    }
    built.setdefault("LDFLAGS", "-s")  # without the debug information: 1 MB instead of 60
    built.setdefault("MAKEFLAGS", f"-j{_count_jobs()}")
    if target.nccl:
        built["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        if "HOROVOD_NCCL_HOME" not in built and (home := _lay_out_nccl(work)):
            built |= {"HOROVOD_NCCL_HOME": str(home), "HOROVOD_NCCL_LINK": "SHARED"}
    return built


def _count_jobs() -> int:
    """As many compilations at once as there are cores and memory for."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    return max(1, min(cores, memory // _MEGABYTES_PER_JOB))


def _lay_out_nccl(work: Path) -> Path | None:
    """Give the NCCL that torch's wheel brought the layout that Horovod's CMake looks for.

    Torch and Horovod then load one and the same libnccl.so.2.
    """
    source = Path(sysconfig.get_path("purelib")) / "nvidia" / "nccl"
    library = source / "lib" / "libnccl.so.2"
    if not library.exists():
        return None
    home = work / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(source / "include")
    (home / "lib" / "libnccl.so").symlink_to(library)
    return home


def build_wheel(
    work: Path, log: Path, environment: Mapping[str, str], show: Callable[[float, str], None]
) -> Path:
    """Build the wheel in ``work`` with pip; the whole output goes to ``log``.

    Args:
        work: An empty folder that takes the wheel.
        log: The file that takes what pip, CMake and the compiler print.
        environment: What `build_environment` returned.
        show: Called about once a second with the seconds elapsed and the log's last line.

    Raises:
        CommandError: The build failed; the message names the log.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"]
    # A plain `pip install horovod` succeeds without the native extension, and pip caches that
    # empty wheel; with build isolation torch is not found at all.
    command += ["--no-cache-dir", "--no-build-isolation", "--no-binary", "horovod"]
    command += [f"horovod=={HOROVOD_VERSION}", "--wheel-dir", str(work)]
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=dict(environment), cwd=work
        )
        try:
            while True:
                try:
                    status = process.wait(timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    show(time.monotonic() - began, last_line(log))
        except BaseException:
            process.terminate()
            process.wait()
            raise
    wheels = sorted(work.glob("horovod-*.whl"))
    if status != 0 or len(wheels) != 1:
        raise CommandError(
            f"Building Horovod {HOROVOD_VERSION} failed with exit status {status}; the whole log "
            f"is in {log} and its first error is: {_first_error(log)}"
        )
    return wheels[0]


def last_line(log: Path) -> str:
    """The last line of a log that is not blank, or nothing."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _first_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    word = re.compile(r"\berror:", re.IGNORECASE)
    return next((line.strip() for line in lines if word.search(line)), last_line(log))
