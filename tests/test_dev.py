"""``dev.py`` runs before anything is installed, so it must need nothing but Python."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import list_imports, load_script

SCRIPT = Path(__file__).parents[1] / "dev.py"


def test_imports_the_standard_library_alone():
    assert list_imports(SCRIPT) <= sys.stdlib_module_names


@pytest.fixture
def dev(tmp_path, monkeypatch):
    """Return ``dev.py`` as a module whose environment is elsewhere."""
    module = load_script("dev.py")
    environment = tmp_path / ".venv"
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "ENVIRONMENT", environment)
    monkeypatch.setattr(module, "PYTHON", environment / "bin" / "python")
    monkeypatch.setattr(module, "UNFINISHED", environment / "unfinished")
    return module


@pytest.fixture
def made(dev, monkeypatch):
    """Let ``venv`` be quick: it makes an environment with a pip of one empty module."""
    calls, original = [], subprocess.run
    monkeypatch.setattr(dev, "PIP", "pip")

    def run(command, **words):
        if command[1:3] != ["-m", "venv"] or len(command) != 4:
            return original(command, **words)
        calls.append(dev.UNFINISHED.exists())
        environment = Path(command[-1])
        original([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        (site,) = environment.glob("lib/python*/site-packages")
        (site / "pip.py").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(dev.subprocess, "run", run)
    return calls


@pytest.mark.parametrize(
    ("program", "unfinished"),
    [(None, False), (sys.executable, False), (sys.executable, True), ("/no/such/python", False)],
)
def test_an_environment_is_made_once_or_heals_if_it_is_not_whole(dev, made, program, unfinished):
    """``venv`` may have been interrupted before pip is there."""
    if program:
        (dev.ENVIRONMENT / "bin").mkdir(parents=True)
        (dev.ENVIRONMENT / "bin" / "python").symlink_to(program)
    if unfinished:
        dev.UNFINISHED.touch()
    dev.make_environment()
    dev.make_environment()
    assert made == [True]
    assert dev.works("pip")
    assert not dev.UNFINISHED.exists()


@pytest.mark.parametrize("failing", [0, 1, 2, None])
def test_a_part_that_fails_hides_no_other(dev, tmp_path, monkeypatch, failing):
    """Each test is in one of the parts, and each part's status counts."""
    commands = []

    def execute(*words, **_):
        commands.append(words)
        return int(len(commands) - 1 == failing)

    for name in ("need_tools", "install", "run"):
        monkeypatch.setattr(dev, name, lambda *_, **__: None)
    monkeypatch.setattr(dev, "execute", execute)
    dev.ENVIRONMENT.mkdir()
    (tmp_path / "tests" / "folder").mkdir(parents=True)
    alone = tmp_path / "tests" / "folder" / "test_race.py"
    alone.write_text("pytestmark = pytest.mark.alone")
    alone.with_name("test_other.py").write_text("pytestmark = pytest.mark.slow")
    with pytest.raises(SystemExit) as ended:
        dev.test([])
    assert ended.value.code == int(failing is not None)
    first, second, _ = commands
    marker, *files = second[second.index("-m", 3) + 1 :]
    assert first[first.index("-m", 3) + 1] == f"not ({marker})"
    assert files == [alone]


def test_the_oldest_lightning_is_the_lower_bound_of_the_metadata(dev):
    metadata = SCRIPT.with_name("pyproject.toml").read_text()
    bounds = set(re.findall(r'"(?:pytorch-)?lightning>=([\d.]+)"', metadata))
    assert bounds == {dev.OLDEST_LIGHTNING.removesuffix(".0")}


def test_a_portable_digest_that_is_not_the_readmes_is_reported(dev, tmp_path, capsys):
    (tmp_path / "README.md").write_text("equal: the portable digest is 0123456789abcdef, as in")
    dev.compare_with_readme("0123456789abcdef")
    assert "equal: the portable digest is 0123456789abcdef" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is fedcba9876543210 on this machine, and 0123456789ab"):
        dev.compare_with_readme("fedcba9876543210")


def test_the_readme_has_one_portable_digest(dev):
    readme = (SCRIPT.parent / "README.md").read_text()
    assert len(re.findall(dev.README_DIGEST, readme)) == 1
