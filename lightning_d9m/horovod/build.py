"""The build of Horovod 0.28.1 against a torch that is newer than it.

The newest release, of June 2023, comes as source only. Its sources compile with a current torch if
the compiler is set to C++20. CMake writes its own ``-std=`` after ``CXXFLAGS``, which overrides a
flag there; therefore a compiler wrapper appends the standard last. nvcc calls that wrapper as its
host compiler and needs the same standard, which it reads from ``NVCC_APPEND_FLAGS``.

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
RECIPE = 1  # raise it if a change here builds a different wheel from the same inputs
REQUIREMENTS = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi")
_CUDA_VARIABLES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
_CUDA_PREFIX = Path("/usr/local")
_MEGABYTES_PER_JOB = 1500  # the peak of one compilation of torch's headers, rounded up


@dataclass(frozen=True, kw_only=True)
class Target:
    """The properties of a wheel.

    Attributes:
        torch: The version of torch with its local tag: the wheel links libtorch's C++ ABI.
        mpi: Build the MPI controller and operations in addition to Gloo.
        nccl: Build the CUDA operations on NCCL.
        cuda: The CUDA version of torch, such as ``"13.0"``; None for a CPU build.
        capabilities: The compute capabilities to compile kernels for, such as ``("90",)``; empty
            for all that Horovod lists.
    """

    torch: str
    mpi: bool
    nccl: bool
    cuda: str | None = None
    capabilities: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name of the cache folder, made of all that the wheel's contents depend on."""
        names = ["gloo", *(["mpi"] if self.mpi else []), *(["nccl"] if self.nccl else [])]
        backends = "-".join([*names, *(f"cc{each}" for each in self.capabilities)])
        abi = sysconfig.get_config_var("SOABI") or sysconfig.get_platform()
        return f"horovod-{HOROVOD_VERSION}-recipe{RECIPE}-torch{self.torch}-{abi}-{backends}"


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The programs that a build runs.

    Attributes:
        compiler: The user's compiler command.
        cmake: The path of CMake.
        cuda_home: The folder of the CUDA toolkit; None without NCCL.
    """

    compiler: tuple[str, ...]
    cmake: str
    cuda_home: str | None = None


def find_tools(target: Target, environment: Mapping[str, str]) -> Tools:
    """Find the programs that the build runs, before it takes minutes.

    Raises:
        CommandError: A program is missing or does not fit; the message names its Debian package.
    """
    # `pip install cmake` puts cmake into the venv, which is not on PATH unless it is activated.
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
            f"Horovod is built from source and needs Python's headers, but {headers} does not "
            "exist: install them (Debian: `apt-get install python3-dev`) and run the command again."
        )
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise CommandError(
            "Horovod is built from source and needs CMake 3.13 or newer, but 'cmake' is not on "
            "PATH: install it (Debian: `apt-get install cmake`; any venv: `pip install cmake`) and "
            "run the command again."
        )
    cuda_home = _find_cuda_home(target, path, environment) if target.nccl else None
    return Tools(compiler=compiler, cmake=cmake, cuda_home=cuda_home)


def _find_cuda_home(target: Target, path: str, environment: Mapping[str, str]) -> str:
    """Find the CUDA toolkit of torch's version: the same minor version, or else the same major."""
    wanted = target.cuda or "unknown"
    major = wanted.partition(".")[0]
    homes = [environment[name] for name in _CUDA_VARIABLES if environment.get(name)][:1]
    if not homes:  # the user's choice is never overridden
        nvcc = shutil.which("nvcc", path=path)
        # If nvcc is a wrapper, the folder above it is not a toolkit and has no version.
        homes = [str(Path(nvcc).resolve().parents[1])] if nvcc else []
        homes += [str(_CUDA_PREFIX / name) for name in (f"cuda-{wanted}", "cuda")]
        homes.append(str(Path(sysconfig.get_path("purelib"), "nvidia", f"cu{major}")))
    versions = {home: version for home in homes if (version := _read_cuda_version(home))}
    for home, version in versions.items():
        if version == wanted:
            return home
    for home, version in versions.items():
        if version.partition(".")[0] == major:
            return home
    found = ", ".join(f"CUDA {version} in {home}" for home, version in versions.items())
    raise CommandError(
        f"torch {target.torch} is a CUDA build, and Horovod's NCCL operations need the compiler "
        f"nvcc of torch's CUDA version {wanted}, but there is {found or 'no CUDA toolkit'} "
        f"(searched: {', '.join(homes)}): install the toolkit, set HOROVOD_CUDA_HOME to its "
        "folder, or pass `--gpu none` for CPU training only."
    )


def _read_cuda_version(home: str) -> str | None:
    """Return the version of a folder's nvcc, such as ``"13.0"``; None if it is not a toolkit."""
    nvcc = Path(home, "bin", "nvcc")
    if not (nvcc.exists() and Path(home, "include", "cuda_runtime.h").exists()):
        return None
    reply = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+\.\d+)", reply)
    return found[1] if found else None


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
        "HOROVOD_CMAKE": tools.cmake,  # otherwise Horovod's setup may download one
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses Gloo's 2.8.12
        "HOROVOD_WITH_PYTORCH": "1",  # otherwise a missing torch gives an empty wheel
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        ("HOROVOD_WITH_MPI" if target.mpi else "HOROVOD_WITHOUT_MPI"): "1",
    }
    built.setdefault("LDFLAGS", "-s")  # without the debug information: 1 MB instead of 60
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    jobs = min(len(os.sched_getaffinity(0)), memory // _MEGABYTES_PER_JOB)
    built.setdefault("MAKEFLAGS", f"-j{max(1, jobs)}")
    if target.nccl:
        built["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        # Horovod's CMake passes -std=c++11 to nvcc, whose front end then rejects C++20 headers.
        flags = [*shlex.split(built.get("NVCC_APPEND_FLAGS", "")), "-std=c++20"]
        built["NVCC_APPEND_FLAGS"] = shlex.join(flags)
        if tools.cuda_home is not None:
            # torch's cpp_extension otherwise takes the folder above `which nvcc`, even if that is a
            # wrapper, and CMake does not find libcudart.
            built |= {"CUDA_HOME": tools.cuda_home, "HOROVOD_CUDA_HOME": tools.cuda_home}
        if target.capabilities:  # otherwise nvcc compiles for twelve architectures, twice
            built["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(target.capabilities)
        if "HOROVOD_NCCL_HOME" not in built and (home := _lay_out_nccl(work)):
            built |= {"HOROVOD_NCCL_HOME": str(home), "HOROVOD_NCCL_LINK": "SHARED"}
    return built


def _lay_out_nccl(work: Path) -> Path | None:
    """Link the NCCL of torch's wheel into the layout that Horovod's CMake expects.

    Torch and Horovod then load the same libnccl.so.2.
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
    """Build the wheel in ``work`` with pip, and write all output to ``log``.

    ``show`` is called about once a second with the elapsed seconds and the last line of the
    log.

    Raises:
        CommandError: The build failed; the message names the log.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"]
    # A plain `pip install horovod` succeeds without the native extension, and pip caches that
    # empty wheel; with build isolation the build does not find torch.
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
                    show(time.monotonic() - began, read_last_line(log))
        except BaseException:
            process.terminate()
            process.wait()
            raise
    wheels = sorted(work.glob("horovod-*.whl"))
    if status != 0 or len(wheels) != 1:
        lines = log.read_text(errors="replace").splitlines()
        errors = (line.strip() for line in lines if re.search(r"\berror:", line, re.IGNORECASE))
        raise CommandError(
            f"Building Horovod {HOROVOD_VERSION} failed with exit status {status}; the whole log "
            f"is in {log} and its first error is: {next(errors, read_last_line(log))}"
        )
    return wheels[0]


def read_last_line(log: Path) -> str:
    """Return the last line of a log that is not blank, or an empty string."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
