"""`d9m install-horovod` without a build: tools, refusals, variables and messages."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from lightning_d9m.errors import CommandError
from lightning_d9m.integrations.strategies.horovod import build
from lightning_d9m.integrations.strategies.horovod.build import (
    Target,
    build_environment,
    build_wheel,
)

TARGET = Target(torch="2.13.0+cpu", mpi=False)
CUDA_TARGET = Target(torch="2.13.0+cu130", mpi=False, cuda="13.0", capabilities=("80", "90"))


def write_program(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def tools(tmp_path):
    """Return a function that makes a PATH with the programs named and nothing else."""
    folder = tmp_path / "tools"

    def make(*names):
        for name in names:
            write_program(folder / name)
        return {"PATH": str(folder)}

    return make


@pytest.fixture
def describe(tmp_path_factory):
    """Return a function that returns the variables of a build, given target and variables."""
    make_folder = tmp_path_factory.mktemp
    return lambda target, variables: build_environment(target, make_folder("work"), variables)


@pytest.fixture(autouse=True)
def no_tools_of_this_machine(monkeypatch, tmp_path):
    """Hide a cmake beside the interpreter, and the CUDA toolkits of this machine."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(build, "_CUDA_PREFIX", tmp_path)
    monkeypatch.setattr(build.sysconfig, "get_path", lambda _: str(tmp_path / "purelib"))


@pytest.mark.parametrize(
    ("missing", "package"),
    [
        ("c++", "g[+][+]"),
        ("my-compiler", "g[+][+]"),
        ("make", "make"),
        ("cmake", "cmake`; any venv"),
        ("mpicxx", "openmpi-bin"),
        ("Python.h", "python3-dev"),
    ],
)
def test_what_is_missing_is_named_with_its_debian_package(
    tools, describe, monkeypatch, tmp_path, missing, package
):
    environment = tools(*{"c++", "make", "cmake", "mpicxx"} - {missing})
    environment |= {"CXX": missing} if missing == "my-compiler" else {}
    if missing == "Python.h":
        monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    words = rf"{re.escape(missing)}' is missing: install it .Debian: `apt-get install {package}"
    with pytest.raises(CommandError, match=words):
        describe(Target(torch="2", mpi=True), environment)


@pytest.fixture
def make_toolkit(tmp_path):
    """Return a function that makes a CUDA toolkit whose nvcc reports a version."""

    def make(folder, version):
        home = tmp_path / folder
        (home / "include").mkdir(parents=True)
        (home / "include" / "cuda_runtime.h").touch()
        said = f"Cuda compilation tools, release {version}, V{version}.1"
        write_program(home / "bin" / "nvcc", f"echo {said}")
        return str(home)

    return make


def test_the_toolkit_of_torchs_version_is_found(tools, describe, make_toolkit):
    """First the same minor version, then the same major; never a folder above a wrapper."""
    describe = partial(describe, variables=tools("c++", "make", "cmake", "nvcc"))
    make_toolkit("cuda-12.8", "12.8")
    words = (
        r"nvcc of torch's CUDA version 13.0, but there is no CUDA toolkit \(searched: .*--gpu no"
    )
    with pytest.raises(CommandError, match=words):
        describe(CUDA_TARGET)
    older = make_toolkit("cuda", "13.1")
    assert describe(CUDA_TARGET)["CUDA_HOME"] == older
    exact = make_toolkit("cuda-13.0", "13.0")
    assert describe(CUDA_TARGET)["CUDA_HOME"] == exact


def test_a_toolkit_that_the_user_chose_is_used_or_refused(tools, describe, make_toolkit):
    environment = tools("c++", "make", "cmake")
    make_toolkit("cuda-13.0", "13.0")
    chosen = make_toolkit("mine", "13.2")
    built = describe(CUDA_TARGET, environment | {"CUDA_HOME": chosen})
    assert built["HOROVOD_CUDA_HOME"] == chosen
    unfit = {"CUDA_HOME": chosen, "HOROVOD_CUDA_HOME": make_toolkit("old", "12.8")}
    with pytest.raises(CommandError, match=r"but there is CUDA 12.8 in .*old \(searched"):
        describe(CUDA_TARGET, environment | unfit)


def test_nvcc_gets_the_standard_the_toolkit_and_the_devices(tools, describe, make_toolkit):
    """Horovod's CMake passes -std=c++11 to nvcc, and builds for twelve architectures."""
    given = {"NVCC_APPEND_FLAGS": "--threads 2", "CUDA_HOME": make_toolkit("mine", "13.0")}
    given |= tools("c++", "make", "cmake")
    built = describe(CUDA_TARGET, given)
    assert built["NVCC_APPEND_FLAGS"] == "--threads 2 -std=c++20"
    assert built["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert built["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert "HOROVOD_NCCL_HOME" not in built
    library = Path(build.sysconfig.get_path("purelib"), "nvidia/nccl/lib/libnccl.so.2")
    library.parent.mkdir(parents=True)
    library.touch()
    everywhere = describe(Target(torch="2.13.0+cu130", mpi=False, cuda="13.0"), given)
    assert "HOROVOD_BUILD_CUDA_CC_LIST" not in everywhere
    assert Path(everywhere["HOROVOD_NCCL_HOME"], "lib/libnccl.so").resolve() == library
    added = describe(TARGET, given).keys() - given
    assert not [name for name in added if "CUDA" in name or "NVCC" in name or "GPU" in name]


def test_the_users_compiler_is_wrapped(tools, describe):
    """CXX may contain arguments; the standard comes last and overrides others."""
    environment = tools("ccache", "make", "cmake") | {"CXX": "ccache g++", "MAKEFLAGS": "-j1"}
    built = describe(TARGET, environment)
    wrapper = Path(built["CXX"])
    assert wrapper.read_text().endswith('exec ccache g++ "$@" -std=c++20\n')
    assert os.access(wrapper, os.X_OK)
    assert built["MAKEFLAGS"] == "-j1"
    assert built["HOROVOD_WITHOUT_MPI"] == "1"


def test_the_cache_key_names_all_that_a_wheel_depends_on():
    others = [
        Target(torch="2.13.0+cu130", mpi=False),
        Target(torch="2.13.0+cpu", mpi=True),
        Target(torch="2.13.0+cpu", mpi=False, cuda="13.0"),
        Target(torch="2.13.0+cpu", mpi=False, cuda="13.0", capabilities=("90",)),
    ]
    assert len({target.key for target in (TARGET, *others)}) == 5
    assert TARGET.key.startswith(f"horovod-{build.HOROVOD_VERSION}-recipe1-torch2.13.0+cpu")


@pytest.mark.parametrize(
    ("said", "cause"),
    [("a.cc:3: error: no such thing\nlate", "a.cc:3: error: no such"), ("one\n two \n\n", "two")],
)
def test_a_failed_build_names_the_log_and_the_first_error(monkeypatch, tmp_path, said, cause):
    lines = "echo compiling error.cc.o", f"printf '{said}'", "exit 1"
    monkeypatch.setattr(sys, "executable", write_program(tmp_path / "python", *lines))
    log, shown = tmp_path / "build.log", []
    with pytest.raises(CommandError, match=f"build.log and its first error is: {cause}"):
        build_wheel(tmp_path, log, {}, shown.append)
    assert "compiling" in log.read_text()
    assert shown[0] == "compiling error.cc.o"


# The paths of the NCCL libraries of a process that has imported Horovod.
LIBRARIES = """
import torch, horovod.torch as hvd
assert hvd.nccl_built() and hvd.cuda_built() and hvd.gloo_built()
paths = {line.split()[-1] for line in open("/proc/self/maps") if "libnccl" in line}
print(*paths, sep="\\n")
"""


@pytest.mark.cuda_build
@pytest.mark.horovod
def test_torch_and_horovod_load_one_nccl(monkeypatch):
    """Two NCCLs in one process would have two sets of variables and connections."""
    monkeypatch.undo()
    output = subprocess.check_output([sys.executable, "-c", LIBRARIES], text=True)
    assert "nvidia/nccl" in output
    assert output.count("\n") == 1
