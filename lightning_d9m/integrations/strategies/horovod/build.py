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
        cuda: The CUDA version of torch, such as ``"13.0"``, for operations on NCCL; None without.
        capabilities: The compute capabilities to compile kernels for, such as ``("90",)``; empty
            for all that Horovod lists.
    """

    torch: str
    mpi: bool
    cuda: str | None = None
    capabilities: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name of the cache folder, made of all that the wheel's contents depend on."""
        names = ["gloo", *["mpi"] * self.mpi, *["nccl"] * (self.cuda is not None)]
        backends = "-".join([*names, *(f"cc{each}" for each in self.capabilities)])
        # The wheel links this Python's ABI, too, and the cache may be shared by several.
        abi = sysconfig.get_config_var("SOABI") or sysconfig.get_platform()
        return f"horovod-{HOROVOD_VERSION}-recipe{RECIPE}-torch{self.torch}-{abi}-{backends}"


def build_environment(target: Target, work: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Write the compiler wrapper into ``work`` and return the environment of the build.

    Raises:
        CommandError: A program is missing or does not fit; the message names its Debian package.
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
    if target.mpi:
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
        **(_describe_cuda(target, work, path, environment) if target.cuda else {}),
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
        ("HOROVOD_WITH_MPI" if target.mpi else "HOROVOD_WITHOUT_MPI"): "1",
    }


def _describe_cuda(
    target: Target, work: Path, path: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the operations on NCCL."""
    # torch's cpp_extension otherwise takes the folder above `which nvcc`, even if that is a
    # wrapper, and CMake does not find libcudart.
    home = _find_cuda_home(target, path, environment)
    # Horovod's CMake passes -std=c++11 to nvcc, whose front end then rejects C++20 headers.
    flags = [*shlex.split(environment.get("NVCC_APPEND_FLAGS", "")), "-std=c++20"]
    built = {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "NVCC_APPEND_FLAGS": shlex.join(flags),
        "CUDA_HOME": home,
        "HOROVOD_CUDA_HOME": home,
    }
    if target.capabilities:  # otherwise nvcc compiles for twelve architectures, twice
        built["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(target.capabilities)
    # The NCCL of torch's wheel in the layout that Horovod's CMake expects, so that both load the
    # same libnccl.so.2.
    source = Path(sysconfig.get_path("purelib")) / "nvidia" / "nccl"
    library = source / "lib" / "libnccl.so.2"
    if "HOROVOD_NCCL_HOME" not in environment and library.exists():
        nccl = work / "nccl"
        (nccl / "lib").mkdir(parents=True)
        (nccl / "include").symlink_to(source / "include")
        (nccl / "lib" / "libnccl.so").symlink_to(library)
        built |= {"HOROVOD_NCCL_HOME": str(nccl), "HOROVOD_NCCL_LINK": "SHARED"}
    return built


def _find_cuda_home(target: Target, path: str, environment: Mapping[str, str]) -> str:
    """Find the CUDA toolkit of torch's version: the same minor version, or else the same major."""
    wanted = str(target.cuda)
    major = wanted.partition(".")[0]
    homes = [environment[name] for name in _CUDA_VARIABLES if environment.get(name)][:1]
    if not homes:  # the user's choice is never overridden
        nvcc = shutil.which("nvcc", path=path)
        # If nvcc is a wrapper, the folder above it is not a toolkit and has no version.
        homes = [str(Path(nvcc).resolve().parents[1])] if nvcc else []
        homes += [str(_CUDA_PREFIX / name) for name in (f"cuda-{wanted}", "cuda")]
        homes.append(str(Path(sysconfig.get_path("purelib"), "nvidia", f"cu{major}")))
    versions = {home: version for home in homes if (version := _read_cuda_version(home))}
    fitting = [home for home, version in versions.items() if version.partition(".")[0] == major]
    # CUDA is compatible within a major version, so another minor one serves if the exact one is
    # missing.
    for home in sorted(fitting, key=lambda home: versions[home] != wanted):
        return home
    described = ", ".join(f"CUDA {version} in {home}" for home, version in versions.items())
    raise CommandError(
        f"torch {target.torch} is a CUDA build, and Horovod's NCCL operations need the compiler "
        f"nvcc of torch's CUDA version {wanted}, but there is {described or 'no CUDA toolkit'} "
        f"(searched: {', '.join(homes)}): install the toolkit, set HOROVOD_CUDA_HOME to its "
        "folder, or pass `--gpu none` for CPU training only."
    )


def _read_cuda_version(home: str) -> str | None:
    """Return the version of a folder's nvcc, such as ``"13.0"``; None if it is not a toolkit."""
    nvcc = Path(home, "bin", "nvcc")
    if not (nvcc.exists() and Path(home, "include", "cuda_runtime.h").exists()):
        return None
    reply = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+\.\d+)", reply)
    return release[1] if release else None


def build_wheel(
    work: Path, log: Path, environment: Mapping[str, str], show: Callable[[str], None]
) -> Path:
    """Build the wheel in ``work`` with pip, and write all output to ``log``.

    ``show`` is called with each line of it.

    Raises:
        CommandError: The build failed; the message names the log.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"]
    # A plain `pip install horovod` succeeds without the native extension, and pip caches that
    # empty wheel; with build isolation the build does not find torch.
    command += ["--no-cache-dir", "--no-build-isolation", "--no-binary", "horovod"]
    command += [f"horovod=={HOROVOD_VERSION}", "--wheel-dir", str(work)]
    first_error, last = "", ""
    with (
        log.open("wb") as out,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=work
        ) as process,
    ):
        try:
            for data in process.stdout or ():
                out.write(data)
                if line := data.decode(errors="replace").strip():
                    show(line)
                    last = line
                    # Later errors follow from the first one, and `make -j` mixes the output of
                    # several compilers.
                    if not first_error and re.search(r"\berror:", line, re.IGNORECASE):
                        first_error = line
        except BaseException:
            process.terminate()
            raise
    wheels = sorted(work.glob("horovod-*.whl"))
    if process.returncode or len(wheels) != 1:
        raise CommandError(
            f"Building Horovod {HOROVOD_VERSION} failed with exit status {process.returncode}; the "
            f"whole log is in {log} and its first error is: {first_error or last}"
        )
    return wheels[0]
