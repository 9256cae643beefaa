"""The versions of installed packages are those that ``importlib.metadata`` gives."""

import sys
import zipfile
from importlib import metadata
from types import SimpleNamespace

import pytest

from lightning_d9m.ledger import packages
from lightning_d9m.ledger.packages import read_versions
from lightning_d9m.ledger.stack import _PACKAGES

NAMES = ("my-package", "numpy", "other", "absent")


def expect(names):
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write(folder, name, version, file="METADATA", head=""):
    (folder / name).mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: x\n{head}Version: {version}\n\nVersion: 0\n"
    (folder / name / file).write_text(text)


def make_zip(folder):
    with zipfile.ZipFile(folder / "packages.zip", "w") as file:
        file.writestr("other-5.dist-info/METADATA", "Name: other\nVersion: 5\n\n")
    return [str(folder / "packages.zip"), str(folder)]


# Each makes a sys.path; and says whether the folders of metadata tell all.
CASES = {
    "beside its package": (lambda a, b: write(a, "numpy-2.0.1.dist-info", "2.0.1"), True),
    "another spelling": (lambda a, b: write(a, "My._Package-1.dist-info", "1"), True),
    "a local version": (lambda a, b: write(a, "numpy-2.0_cpu.dist-info", "2.0+cpu"), True),
    "in a later folder": (lambda a, b: write(b, "numpy-3.dist-info", "3"), True),
    "a name that begins alike": (lambda a, b: write(a, "numpy_financial-3.dist-info", "3"), True),
    "no metadata": (lambda a, b: (a / "unlike-1.dist-info").mkdir(), True),
    "a long field before": (
        lambda a, b: write(a, "numpy-3.dist-info", "3", head=f"Summary: {'x' * 5000}\n"),
        True,
    ),
    "an old format": (lambda a, b: write(a, "other-1-py3.11.egg-info", "1", "PKG-INFO"), True),
    "an old format of one file": (
        lambda a, b: (a / "other.egg-info").write_text("Name: other\nVersion: 4\n\n"),
        True,
    ),
    "two in a folder": (
        lambda a, b: (write(a, "numpy-1.dist-info", "1"), write(a, "numpy-2.dist-info", "2")),
        True,
    ),
    "two in two folders": (
        lambda a, b: (write(b, "numpy-1.dist-info", "1"), write(a, "numpy-2.dist-info", "2")),
        True,
    ),
    "a folder that is an egg": (
        lambda a, b: (
            write(a / "other-7.egg", "EGG-INFO", "7", "PKG-INFO"),
            [str(a / "other-7.egg")],
        )[1],
        False,
    ),
    "an archive": (lambda a, b: make_zip(a), False),
    "no such folder": (lambda a, b: [str(a / "nowhere"), ""], True),
}
NOT_FOUND = {"no metadata", "no such folder", "a name that begins alike"}


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_importlib(tmp_path, monkeypatch, case):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    prepare, tells_all = CASES[case]
    made = prepare(one, two)
    monkeypatch.chdir(two)
    folders = made if isinstance(made, list) else [str(one), str(two), str(one)]
    monkeypatch.setattr(sys, "path", folders)
    found = read_versions(NAMES)
    assert found == expect(NAMES)
    assert bool(found) == (case not in NOT_FOUND)
    assert (packages._find_folders(["other"]) is not None) == tells_all


def test_the_packages_of_this_environment():
    found = read_versions(_PACKAGES)
    assert found == expect(_PACKAGES)
    assert {"numpy", "lightning-d9m"} <= found.keys()


def test_one_folder_of_metadata_needs_no_search(tmp_path, monkeypatch):
    write(tmp_path, "numpy-2.dist-info", "2")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(metadata, "distribution", None)
    assert read_versions(NAMES) == {"numpy": "2"}


def test_the_finder_of_importlib_metadata_looks_in_the_same_folders(tmp_path, monkeypatch):
    """Its class has the same name; other packages import it."""
    write(tmp_path, "numpy-2.dist-info", "2")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    finder = metadata.MetadataPathFinder()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert packages._find_folders(["numpy"]) == {"numpy": [f"{tmp_path}/numpy-2.dist-info"]}
    assert read_versions(NAMES) == expect(NAMES) == {"numpy": "2"}


def test_a_finder_of_the_user_is_asked(tmp_path, monkeypatch):
    write(tmp_path, "x-9.dist-info", "9")
    own = metadata.Distribution.at(tmp_path / "x-9.dist-info")
    finder = SimpleNamespace(
        find_spec=lambda *_: None,
        find_distributions=lambda context: [own] if context.name == "absent" else [],
    )
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert read_versions(["absent"]) == {"absent": "9"}
