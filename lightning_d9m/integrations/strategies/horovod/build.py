"""The build of Horovod 0.28.1 against a torch that is newer than it.

The newest release, of June 2023, comes as source only. Its sources compile with a current torch if
the compiler is set to C++20. CMake writes its own ``-std=`` after ``CXXFLAGS``, which overrides a
flag there; therefore a compiler wrapper appends the standard last.

Horovod's operations on CUDA are not built: the strategy sends one address by Horovod, and all else
by torch's Gloo and NCCL.

This module needs neither torch nor Horovod at import.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from lightning_d9m.errors import CommandError

HOROVOD_VERSION = "0.28.1"
_RECIPE = 1  # raise it if a change here builds a different wheel from the same inputs
REQUIREMENTS = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi")
_MEGABYTES_PER_JOB = 1500  # the peak of one compilation of torch's headers, rounded up


def name_wheel(torch_version: str, *, mpi: bool) -> str:
    """Return the name of the cache folder, made of all that the wheel's contents depend on.

    The version of torch has its local tag: the wheel links libtorch's C++ ABI.
    """
    # The wheel links this Python's ABI, too, and the cache may be shared by several.
    abi = sysconfig.get_config_var("SOABI") or sysconfig.get_platform()
    backends = "gloo-mpi" if mpi else "gloo"
    return f"horovod-{HOROVOD_VERSION}-recipe{_RECIPE}-torch{torch_version}-{abi}-{backends}"


def build_environment(work: Path, environment: Mapping[str, str], *, mpi: bool) -> dict[str, str]:
    """Write the compiler wrapper into ``work`` and return the environment of the build.

    ``mpi`` builds the MPI controller and operations in addition to Gloo.

    Raises:
        CommandError: A program is missing; the message names its Debian package.
    """
    # `pip install cmake` puts cmake into the venv, which is not on PATH unless it is activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    compiler = shlex.split(environment.get("CXX", "")) or ["c++"]
    needed = {
        compiler[0]: ("a C++ compiler", "g++"),
        "make": ("make", "make"),
        "cmake": ("CMake 3.13 or newer", "cmake`; any venv: `pip install cmake"),
        str(Path(sysconfig.get_paths()["include"], "Python.h")): ("its headers", "python3-dev"),
    }
    if mpi:
        needed["mpicxx"] = ("MPI's compiler", "openmpi-bin libopenmpi-dev")
    for program, (what, package) in needed.items():
        if shutil.which(program, os.F_OK, path) is None:
            raise CommandError(
                f"Horovod is built from source for this Python and needs {what}, but {program!r} "
                f"is missing: install it (Debian: `apt-get install {package}`) and run the command "
                "again."
            )
    wrapper = work / "c++"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@" -std=c++20\n')
    wrapper.chmod(0o755)
    # A compiler that runs out of memory is killed, and the build fails.
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    jobs = min(len(os.sched_getaffinity(0)), memory // _MEGABYTES_PER_JOB)
    return {
        "LDFLAGS": "-s",  # without the debug information: 1 MB instead of 60
        "MAKEFLAGS": f"-j{max(1, jobs)}",
        **environment,
        "PATH": path,
        "CXX": str(wrapper),
        # Otherwise Horovod's setup may download one.
        "HOROVOD_CMAKE": shutil.which("cmake", path=path) or "cmake",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses Gloo's 2.8.12
        "HOROVOD_WITH_PYTORCH": "1",  # otherwise a missing torch gives an empty wheel
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        # Either must be set: Horovod builds with MPI if it happens to find one.
        ("HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI"): "1",
    }


def build_wheel(work: Path, log: Path, environment: Mapping[str, str]) -> Path:
    """Build the wheel in ``work`` with pip, and write all output to ``log``.

    Raises:
        CommandError: The build failed; the message names the log.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"]
    # A plain `pip install horovod` succeeds without the native extension, and pip caches that
    # empty wheel; with build isolation the build does not find torch.
    command += ["--no-cache-dir", "--no-build-isolation", "--no-binary", "horovod"]
    command += [f"horovod=={HOROVOD_VERSION}", "--wheel-dir", str(work)]
    with log.open("wb") as out:
        status = subprocess.call(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=work
        )
    wheels = sorted(work.glob("horovod-*.whl"))
    if status or len(wheels) != 1:
        lines = [*filter(None, map(str.strip, log.read_text(errors="replace").splitlines()))]
        # Later errors follow from the first one, and `make -j` mixes the output of several
        # compilers.
        errors = [line for line in lines if re.search(r"\berror:", line, re.IGNORECASE)]
        raise CommandError(
            f"Building Horovod {HOROVOD_VERSION} failed with exit status {status}; the whole log "
            f"is in {log} and its first error is: {(errors or lines[-1:] or ['none'])[0]}"
        )
    return wheels[0]
