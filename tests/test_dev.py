"""``dev.py`` runs before anything is installed, so it must need nothing but Python."""

import re
import sys
from pathlib import Path

import pytest
from scripts import list_imports, load_script

SCRIPT = Path(__file__).parents[1] / "dev.py"


def test_imports_the_standard_library_alone():
    assert list_imports(SCRIPT) <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("script", "name"),
    [("dev.py", "OLDEST_LIGHTNING_TESTS"), ("benchmarks/libraries/stacks.py", "TESTS")],
)
def test_the_tests_that_other_stacks_run_are_there(script, name):
    """If one is missing, pytest runs none of them."""
    listed = getattr(load_script(script), name)
    assert [path for path in listed if not (SCRIPT.parent / path).is_file()] == []


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


@pytest.mark.parametrize("found", [None, "unfinished", "/no/such/python", sys.executable])
def test_an_environment_is_made_once_or_again_if_it_is_not_whole(dev, monkeypatch, found):
    """``venv`` may have been interrupted; its Python may be gone, or of no environment."""
    made = []

    def make():
        made.append(dev.UNFINISHED.exists())
        dev.PYTHON.parent.mkdir(parents=True)
        dev.PYTHON.symlink_to(sys.executable)
        (dev.ENVIRONMENT / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin")

    monkeypatch.setattr(dev, "make_by_venv", make)
    monkeypatch.setattr(dev, "PIP", "sys")
    if found == "unfinished":
        make()
        dev.UNFINISHED.touch()
    elif found:
        dev.PYTHON.parent.mkdir(parents=True)
        dev.PYTHON.symlink_to(found)
    made.clear()
    dev.make_environment()
    dev.make_environment()
    assert made == [False]


@pytest.mark.parametrize("failing", [0, 1, None])
def test_a_part_that_fails_hides_no_other(dev, monkeypatch, failing):
    """All tests run, and each part's status counts."""
    commands = []

    def execute(*words, **_):
        commands.append(words)
        return int(len(commands) - 1 == failing)

    for name in ("need_tools", "install", "run"):
        monkeypatch.setattr(dev, name, lambda *_, **__: None)
    monkeypatch.setattr(dev, "execute", execute)
    dev.ENVIRONMENT.mkdir()
    with pytest.raises(SystemExit) as ended:
        dev.test([])
    assert ended.value.code == int(failing is not None)
    tests, _ = commands
    assert tests.count("-m") == 1  # it names pytest: no marker leaves a test out


def test_the_oldest_lightning_is_the_lower_bound_of_the_metadata(dev):
    metadata = SCRIPT.with_name("pyproject.toml").read_text()
    bounds = set(re.findall(r'"(?:pytorch-)?lightning>=([\d.]+)"', metadata))
    assert bounds == {dev.OLDEST_LIGHTNING.removesuffix(".0")}


@pytest.mark.parametrize("status", [0, 3])
def test_a_quiet_command_is_heard_only_if_it_fails(dev, capfd, status):
    code = f"import sys; print('tips and tables'); sys.exit({status})"
    assert dev.execute(sys.executable, "-c", code, quiet=True) == status
    assert capfd.readouterr().out == "tips and tables\n\n" * (status == 3)


def test_a_portable_digest_that_is_not_the_readmes_is_reported(dev, tmp_path, capsys):
    (tmp_path / "README.md").write_text("equal: the portable digest is 0123456789abcdef, as in")
    dev.compare_with_readme("0123456789abcdef")
    assert "equal: the portable digest is 0123456789abcdef" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is fedcba9876543210 on this machine, and 0123456789ab"):
        dev.compare_with_readme("fedcba9876543210")


def test_the_readme_has_one_portable_digest(dev):
    readme = (SCRIPT.parent / "README.md").read_text()
    assert len(re.findall(dev.README_DIGEST, readme)) == 1
