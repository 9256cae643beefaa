"""`d9m install-horovod` without a build: tools, refusals, variables and messages."""

import os
import re
import sys
from pathlib import Path

import pytest

from lightning_d9m.errors import CommandError
from lightning_d9m.integrations.strategies.horovod import build
from lightning_d9m.integrations.strategies.horovod.build import (
    build_environment,
    build_wheel,
    name_wheel,
)


@pytest.fixture
def tools(tmp_path):
    """Return a function that makes a PATH with the programs named and nothing else."""

    def make(*names):
        for name in names:
            program = tmp_path / "tools" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text("#!/bin/sh\n")
            program.chmod(0o755)
        return {"PATH": str(tmp_path / "tools")}

    return make


@pytest.fixture(autouse=True)
def no_tools_of_this_machine(monkeypatch, tmp_path):
    """Hide a cmake beside the interpreter."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))


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
    tools, monkeypatch, tmp_path, missing, package
):
    environment = tools(*{"c++", "make", "cmake", "mpicxx"} - {missing})
    environment |= {"CXX": missing} if missing == "my-compiler" else {}
    if missing == "Python.h":
        monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    words = rf"{re.escape(missing)}' is missing: install it .Debian: `apt-get install {package}"
    with pytest.raises(CommandError, match=words):
        build_environment(tmp_path, environment, mpi=True)


def test_the_users_compiler_is_wrapped(tools, tmp_path):
    """CXX may contain arguments; the standard comes last and overrides others."""
    environment = tools("ccache", "make", "cmake") | {"CXX": "ccache g++", "MAKEFLAGS": "-j1"}
    built = build_environment(tmp_path, environment, mpi=False)
    wrapper = Path(built["CXX"])
    assert wrapper.read_text().endswith('exec ccache g++ "$@" -std=c++20\n')
    assert os.access(wrapper, os.X_OK)
    assert built["MAKEFLAGS"] == "-j1"
    assert built["HOROVOD_WITHOUT_MPI"] == "1"


def test_the_cache_key_names_all_that_a_wheel_depends_on():
    releases = ("2.13.0+cpu", "2.13.0+cu130")
    names = {name_wheel(torch, mpi=mpi) for torch in releases for mpi in (False, True)}
    assert len(names) == 4
    assert f"horovod-{build.HOROVOD_VERSION}-recipe1-torch2.13.0+cpu" in "".join(names)


@pytest.mark.parametrize(
    ("said", "cause"),
    [("a.cc:3: error: no such thing\nlate", "a.cc:3: error: no such"), ("one\n two \n\n", "two")],
)
def test_a_failed_build_names_the_log_and_the_first_error(monkeypatch, tmp_path, said, cause):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho compiling error.cc.o\nprintf '{said}'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    log = tmp_path / "build.log"
    with pytest.raises(CommandError, match=f"build.log and its first error is: {cause}"):
        build_wheel(tmp_path, log, {})
    assert "compiling" in log.read_text()
