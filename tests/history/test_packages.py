"""``d9m bisect --packages`` with wheels of a temporary folder, without a network."""

import json
import os
import subprocess
import sys
import zipfile

import pytest
from ledger_program import BROKEN, OTHER, SAME, TRAIN
from uv import find_uv_bin

from lightning_d9m.history import packages
from lightning_d9m.history.packages import install_packages, read_packages

WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder, name, version, code=""):
    """Write a wheel with one module."""
    metadata = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{metadata}/WHEEL": WHEEL,
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{metadata}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in {**files, f"{metadata}/RECORD": record}.items():
            archive.writestr(file, text)


@pytest.fixture
def installer(request, tmp_path_factory, monkeypatch):
    """Choose uv, or pip as where uv is not installed."""
    program = None if getattr(request, "param", "uv") == "pip" else find_uv_bin()
    monkeypatch.setattr(packages.shutil, "which", lambda _: program)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("uv")))


BOTH = pytest.mark.parametrize("installer", ["uv", "pip"], indirect=True)


@pytest.fixture
def bisect(tmp_path, monkeypatch, d9m, installer):
    """Return a function that searches between two lists; it gives (status, facts, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    # The trainings take lightning_d9m and what it imports from here.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "wheels").mkdir()

    def run(old, new, *words):
        for name, lines in (("old.txt", old), ("new.txt", new)):
            source = ["--no-index", f"--find-links {tmp_path / 'wheels'}", "# a comment"]
            (tmp_path / name).write_text("\n".join([*source, *lines, ""]))
        output = tmp_path / f"output-{len(list(tmp_path.iterdir()))}"
        lists = ("--packages", "old.txt", "new.txt")
        status, out, err = d9m(
            "bisect", "--json", "-o", output, *words, *lists, "--", "python", "train.py"
        )
        return status, json.loads(out or "{}"), err

    return run


def test_the_package_that_changes_bits_is_named(tmp_path, bisect):
    wheels = tmp_path / "wheels"
    for name in ("alpha", "gamma"):
        for version in (1, 2):
            write_wheel(wheels, name, version)
    write_wheel(wheels, "added", 1)
    write_wheel(wheels, "values", 1, SAME)
    write_wheel(wheels, "values", 2, OTHER)
    write_wheel(wheels, "zeta", 1, SAME)
    old = ["alpha==1", "gamma==1", "values==1", "zeta==1"]
    status, facts, _ = bisect(old, ["added==1", "alpha==2", "gamma==2", "Values==2"])
    assert status == 1
    assert [found["subject"] for found in facts["candidates"]] == ["values==1 -> Values==2"]
    assert facts["commits"] == 5
    assert facts["comparison"]["verdict"] == "different"
    # Twice the old list, once the new one, and at most three of the four between them.
    assert len(facts["trials"]) <= 6
    # The user's folder has only what the command wrote.
    names = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert names == {"left", "new.txt", "old.txt", "output", "train.py", "wheels"}


def test_lists_that_do_not_train_hide_the_package(tmp_path, bisect):
    wheels = tmp_path / "wheels"
    write_wheel(wheels, "helper", 1)
    write_wheel(wheels, "helper", 2, "VALUES = [1, 9, 8]")
    write_wheel(wheels, "values", 1, SAME)
    write_wheel(wheels, "values", 2, "from helper import VALUES")
    # In between, `values` 1 has its numbers still; helper 3 cannot be installed.
    status, facts, _ = bisect(["helper==1", "values==1"], ["helper==2", "values==2"])
    assert (status, [one["subject"] for one in facts["candidates"]]) == (
        1,
        ["values==1 -> values==2"],
    )
    write_wheel(wheels, "another", 1)
    write_wheel(wheels, "another", 2)
    write_wheel(wheels, "values", 3, "import another\nVALUES = [1, 9, 8]")
    status, facts, errors = bisect(["values==1"], ["values==4"])
    assert status == 2
    assert "The bad package list new.txt must train, and it does not: The packages cannot" in errors


def test_equal_lists_of_bits_and_wrong_words_are_one_clear_error(tmp_path, bisect):
    for version in (1, 2):
        write_wheel(tmp_path / "wheels", "values", version, SAME)
    write_wheel(tmp_path / "wheels", "values", 3, BROKEN)
    status, _, errors = bisect(["values==1"], ["values==2"])
    assert status == 2
    assert "bad package list new.txt is equal to the good one. Give a later" in errors
    assert "The command must start the python of PATH" in errors
    status, _, errors = bisect(["values==3"], ["values==2"])
    assert "The good package list old.txt must train" in errors
    status, _, errors = bisect(["values==1"], ["values==1"])
    assert "hold the same packages, so none of them" in errors
    status, _, errors = bisect(["values>=1"], ["values==1"])
    assert "old.txt holds 'values>=1', not a package with its version" in errors
    status, _, errors = bisect(["values==1"], ["values==2"], "--link", "data")
    assert "--link and --golden are for commits" in errors


def test_a_missing_list_is_named(tmp_path, monkeypatch, d9m):
    monkeypatch.chdir(tmp_path)
    status, _, err = d9m("bisect", "--packages", "none.txt", "new.txt", "--", "python", "a.py")
    assert status == 2
    assert "The list of packages none.txt cannot be read: [Errno 2] No such file" in err


def test_the_text_names_the_package(tmp_path, bisect, d9m):
    write_wheel(tmp_path / "wheels", "values", 1, SAME)
    write_wheel(tmp_path / "wheels", "values", 2, OTHER)
    bisect(["values==1"], ["values==2"])
    words = ["--packages", "old.txt", "new.txt", "-o", "text", "--", "python", "train.py"]
    status, text, _ = d9m("bisect", *words)
    assert status == 1
    assert text.startswith("first package that differs: values==1 -> values==2\n")
    assert "trained: 3 times for 1 package\n" in text
    assert "git show" not in text
    assert "d9m report " in text


def test_a_list_is_read_as_pip_reads_it(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text(
        "# made by pip\n--index-url https://host/simple\nTorch_Vision==0.1 \\\n"
        "    --hash=sha256:00\nfast[all]===2+cpu  # why\nlocal @ file:///a/b.whl\n-e ./here\n\n"
    )
    found, sources = read_packages(path)
    assert found == {
        "torch-vision": "Torch_Vision==0.1      --hash=sha256:00",
        "fast": "fast[all]===2+cpu",
        "local": "local @ file:///a/b.whl",
        "-/here": "-e ./here",
    }
    assert sources == ["--index-url https://host/simple"]


@BOTH
def test_what_a_list_does_not_hold_is_removed(tmp_path, installer):
    for name in ("alpha", "beta"):
        write_wheel(tmp_path, name, 1)
    lists = [["alpha==1", "beta==1"], ["beta==1"]]
    found = []
    for lines in lists:
        source = ["--no-index", f"--find-links {tmp_path}"]
        (tmp_path / "list.txt").write_text("\n".join([*source, *lines, ""]))
        install_packages(tmp_path / "environment", tmp_path / "list.txt")
        code = "from importlib import metadata as m; print(*(d.name for d in m.distributions()))"
        python = tmp_path / "environment/bin/python"
        printed = subprocess.check_output([python, "-I", "-c", code], text=True)
        found.append(sorted(printed.split()))
    assert found == [["alpha", "beta"], ["beta"]]
