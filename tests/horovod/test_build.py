"""`d9m install-horovod` without a build: tools, refusals, variables and messages."""

import os
import sys
from pathlib import Path

import pytest

from lightning_d9m.errors import CommandError
from lightning_d9m.horovod import build
from lightning_d9m.horovod.build import Target, Tools, build_environment, build_wheel, find_tools

TARGET = Target(torch="2.13.0+cpu", mpi=False, nccl=False)
NCCL_TARGET = Target(
    torch="2.13.0+cu130", mpi=False, nccl=True, cuda="13.0", capabilities=("80", "90")
)


@pytest.fixture
def tools(tmp_path):
    """Return a function that makes a PATH with the programs named and nothing else."""

    def make(*names, cmake="3.25.1"):
        for name in names:
            program = tmp_path / name
            program.write_text(f"#!/bin/sh\necho cmake version {cmake}\n")
            program.chmod(0o755)
        return {"PATH": str(tmp_path)}

    return make


@pytest.fixture(autouse=True)
def no_tools_of_this_machine(monkeypatch, tmp_path):
    """Hide a cmake beside the interpreter, and the CUDA toolkits of this machine."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(build, "_CUDA_PREFIX", tmp_path)
    monkeypatch.setattr(build.sysconfig, "get_path", lambda _: str(tmp_path / "purelib"))


@pytest.mark.parametrize(
    ("missing", "package"), [("c++", "g++"), ("make", "make"), ("cmake", "cmake")]
)
def test_a_missing_tool_is_named_with_its_debian_package(tools, missing, package):
    environment = tools(*{"c++", "make", "cmake"} - {missing})
    with pytest.raises(CommandError, match=f"apt-get install {package.replace('+', '[+]')}"):
        find_tools(TARGET, environment)


def test_missing_headers_are_named_with_their_debian_package(tools, monkeypatch, tmp_path):
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(CommandError, match="apt-get install python3-dev"):
        find_tools(TARGET, tools("c++", "make", "cmake"))


def test_mpi_and_nccl_need_their_compilers(tools):
    environment = tools("c++", "make", "cmake")
    with pytest.raises(CommandError, match="libopenmpi-dev"):
        find_tools(Target(torch="2", mpi=True, nccl=False), environment)
    with pytest.raises(CommandError, match=r"nvcc of torch's CUDA version 13.0, but .*--gpu none"):
        find_tools(NCCL_TARGET, environment)


@pytest.fixture
def make_toolkit(tmp_path):
    """Return a function that makes a CUDA toolkit whose nvcc reports a version."""

    def make(folder, version):
        home = tmp_path / folder
        for name in ("bin", "include"):
            (home / name).mkdir(parents=True)
        (home / "include" / "cuda_runtime.h").touch()
        nvcc = home / "bin" / "nvcc"
        nvcc.write_text(
            f"#!/bin/sh\necho Cuda compilation tools, release {version}, V{version}.1\n"
        )
        nvcc.chmod(0o755)
        return str(home)

    return make


def test_the_toolkit_of_torchs_version_is_found(tools, make_toolkit, tmp_path):
    """First the same minor version, then the same major; never a folder above a wrapper."""
    environment = tools("c++", "make", "cmake", "nvcc")
    make_toolkit("cuda-12.8", "12.8")
    with pytest.raises(CommandError, match=r"but there is no CUDA toolkit \(searched: "):
        find_tools(NCCL_TARGET, environment)
    older = make_toolkit("cuda", "13.1")
    assert find_tools(NCCL_TARGET, environment).cuda_home == older
    exact = make_toolkit("cuda-13.0", "13.0")
    assert find_tools(NCCL_TARGET, environment).cuda_home == exact
    assert find_tools(TARGET, environment).cuda_home is None


def test_a_toolkit_that_the_user_chose_is_used_or_refused(tools, make_toolkit):
    environment = tools("c++", "make", "cmake")
    make_toolkit("cuda-13.0", "13.0")
    chosen = make_toolkit("mine", "13.2")
    assert find_tools(NCCL_TARGET, environment | {"CUDA_HOME": chosen}).cuda_home == chosen
    unfit = {"CUDA_HOME": chosen, "HOROVOD_CUDA_HOME": make_toolkit("old", "12.8")}
    with pytest.raises(CommandError, match=r"but there is CUDA 12.8 in .*old \(searched"):
        find_tools(NCCL_TARGET, environment | unfit)


def test_nvcc_gets_the_standard_the_toolkit_and_the_devices(tmp_path):
    """Horovod's CMake passes -std=c++11 to nvcc, and builds for twelve architectures."""
    found = Tools(compiler=("g++",), cmake="cmake", cuda_home="/opt/cuda")
    given = {"NVCC_APPEND_FLAGS": "--threads 2", "HOROVOD_NCCL_HOME": "/opt/nccl"}
    built = build_environment(NCCL_TARGET, found, tmp_path, given)
    assert built["NVCC_APPEND_FLAGS"] == "--threads 2 -std=c++20"
    assert built["CUDA_HOME"] == built["HOROVOD_CUDA_HOME"] == "/opt/cuda"
    assert built["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert built["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    everywhere = Target(torch="2.13.0+cu130", mpi=False, nccl=True, cuda="13.0")
    assert "HOROVOD_BUILD_CUDA_CC_LIST" not in build_environment(everywhere, found, tmp_path, {})
    plain = build_environment(TARGET, found, tmp_path, {})
    assert not [name for name in plain if "CUDA" in name or "NVCC" in name or "GPU" in name]


def test_the_users_compiler_is_wrapped(tools, tmp_path):
    """CXX may contain arguments; the standard comes last and overrides others."""
    environment = tools("ccache", "make", "cmake") | {"CXX": "ccache g++", "MAKEFLAGS": "-j1"}
    found = find_tools(TARGET, environment)
    assert found.compiler == ("ccache", "g++")
    built = build_environment(TARGET, found, tmp_path, environment)
    wrapper = Path(built["CXX"])
    assert wrapper.read_text().endswith('exec ccache g++ "$@" -std=c++20\n')
    assert os.access(wrapper, os.X_OK)
    assert built["MAKEFLAGS"] == "-j1"
    assert built["HOROVOD_WITHOUT_MPI"] == "1"


def test_the_cache_key_names_all_that_a_wheel_depends_on():
    others = [
        Target(torch="2.13.0+cu130", mpi=False, nccl=False),
        Target(torch="2.13.0+cpu", mpi=True, nccl=False),
        Target(torch="2.13.0+cpu", mpi=False, nccl=True),
        Target(torch="2.13.0+cpu", mpi=False, nccl=True, capabilities=("90",)),
    ]
    assert len({target.key for target in (TARGET, *others)}) == 5
    assert "torch2.13.0+cpu" in TARGET.key
    assert "recipe1" in TARGET.key


def test_a_failed_build_names_the_log_and_the_first_error(monkeypatch, tmp_path):
    program = tmp_path / "python"
    failure = "echo compiling error.cc.o\necho 'a.cc:3: error: no such thing'\nexit 1\n"
    program.write_text(f"#!/bin/sh\n{failure}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    log = tmp_path / "build.log"
    with pytest.raises(CommandError, match=r"build.log and its first error is: a.cc:3: error"):
        build_wheel(tmp_path, log, {}, lambda *_: None)
    assert "compiling" in log.read_text()


def test_the_last_line_of_a_log_skips_blank_ones(tmp_path):
    log = tmp_path / "log"
    log.write_text("one\n  two  \n\n\n")
    assert build.read_last_line(log) == "two"
    log.write_text("")
    assert build.read_last_line(log) == ""
