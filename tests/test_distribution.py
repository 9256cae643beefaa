"""What is released, and what the repository offers around the code."""

import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml
from ledger_program import PROGRAM
from scripts import execute, list_imports, load_script

from lightning_d9m.tools.cli.main import build_parser
from lightning_d9m.version import __version__

ROOT = Path(__file__).parents[1]

TRAINING = f"""{PROGRAM}
import lightning_d9m
print("package:", lightning_d9m.__file__)
train()
"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    execute(sys.executable, "-m", "hatchling", "build", "-d", folder, folder=ROOT)
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    return wheel, source


def names_in(wheel):
    return sorted(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_the_package_and_nothing_else(archives):
    names = names_in(archives[0])
    expected = {"lightning_d9m", "lightning_d9m_autoload.py"}
    assert {name.split("/")[0].split("-")[0] for name in names} == expected
    assert "lightning_d9m/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    files = [path for path in (ROOT / "lightning_d9m").rglob("*.*") if path.suffix != ".pyc"]
    expected = {str(path.relative_to(ROOT)) for path in files if path.is_file()}
    assert "lightning_d9m/tools/output/templates/report.html.j2" in expected
    assert "lightning_d9m/.agents/skills/lightning-d9m/SKILL.md" in expected
    assert expected <= set(names)


def test_the_source_archive_makes_the_same_wheel(archives, tmp_path):
    wheel, source = archives
    execute("tar", "-xf", source, folder=tmp_path)
    (unpacked,) = tmp_path.iterdir()
    execute(sys.executable, "-m", "hatchling", "build", "-t", "wheel", folder=unpacked)
    (again,) = (unpacked / "dist").glob("*.whl")
    assert names_in(again) == names_in(wheel)
    assert (unpacked / "tests" / "conftest.py").exists()


def test_the_wheel_works_in_an_environment_of_its_own(archives, tmp_path):
    """Dependencies are those that are installed here; the source tree is not among them.

    ``dev.py test-wheel`` trains in a fresh environment.
    """
    environment = tmp_path / "environment"
    execute(sys.executable, "-m", "venv", "--without-pip", environment, folder=tmp_path)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    execute(*pip, "install", "--no-deps", "--no-index", archives[0], folder=tmp_path)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A line of a .pth file is a folder to search; the .pth files in it (ours is among them: an
    # editable installation) are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (tmp_path / "train.py").write_text(TRAINING)
    words = {"without": ["PYTHONPATH"], "LIGHTNING_D9M_LEDGER_DIR": "d9m"}
    said = execute(python, "train.py", folder=tmp_path, **words).stdout
    assert f"package: {packages}" in said
    d9m, ledger = python.parent / "d9m", "d9m/fit-000"
    assert "equal" in execute(d9m, "compare", ledger, ledger, folder=tmp_path).stdout
    execute(d9m, "report", ledger, ledger, "-o", "page.html", folder=tmp_path)
    assert "</html>" in (tmp_path / "page.html").read_text()


OWN = {"lightning_d9m", "lightning_d9m_autoload"}
# Imported only where their owner is installed: by an integration, or for types alone.
INTEGRATIONS = {
    *("shtab", "submitit"),
    *("flash_attn", "horovod", "lightning", "model_signing", "pytest", "transformers", "triton"),
    *("fsspec", "torchmetrics"),  # Lightning depends on them
    "markupsafe",  # jinja2 depends on it
    "typing_extensions",  # torch depends on it
}


PROJECT = (ROOT / "pyproject.toml").read_text()
(_BLOCK,) = re.findall(r"^dependencies = \[(.*?)^\]", PROJECT, re.DOTALL | re.MULTILINE)
DECLARED = dict(re.findall(r'"([\w-]+)(>=[\d.]+)"', _BLOCK))


def test_every_package_that_is_imported_is_a_dependency():
    imported = set().union(*map(list_imports, (ROOT / "lightning_d9m").rglob("*.py")))
    foreign = imported - sys.stdlib_module_names - OWN - INTEGRATIONS
    assert foreign == DECLARED.keys()


LINKS = load_script("docs/links.py")
URLS = LINKS.read_urls()


def test_the_metadata_has_absolute_links_alone(archives):
    (name,) = [one for one in names_in(archives[0]) if one.endswith("/METADATA")]
    head, _, body = zipfile.ZipFile(archives[0]).read(name).decode().partition("\n\n")
    found = dict(re.findall(r"^Project-URL: (.*), (.*)$", head, re.MULTILINE))
    assert found == URLS
    assert "Description-Content-Type: text/markdown" in head
    assert body.startswith("# lightning_d9m\n")
    links = re.findall(r"\]\(([^)\s]+)\)", body)
    assert len(links) > 9
    assert not [link for link in links if not link.startswith("https://")]
    own = [link.removeprefix(URLS["Homepage"]) for link in links if URLS["Homepage"] in link]
    for link in own:
        kind, _, path = link.removeprefix("/").partition("/main/")
        assert kind == ("raw" if Path(path).suffix in {".svg", ".png"} else "blob")
        assert (ROOT / path.partition("#")[0]).exists()


def test_one_variable_says_where_the_project_is():
    address = URLS["Homepage"].partition("://")[2]
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    texts = {name: (ROOT / name).read_bytes() for name in tracked if (ROOT / name).is_file()}
    # The README says in a line how to clone it.
    named = [name for name, text in texts.items() if address.encode() in text]
    assert named == ["README.md", "pyproject.toml"]
    assert texts["README.md"].decode().count(f"git clone {URLS['Homepage']}\n") == 1
    assert texts["README.md"].decode().count(address) == 1
    # The action is used by its owner and name, which have no address.
    assert f"uses: {address.partition('/')[2]}@" in texts["docs/testing.md"].decode()


def test_llms_txt_lists_every_page_of_the_site():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    text = LINKS.list_pages(nav)
    pages = [path for section in nav for entries in section.values() for path in entries]
    lines = re.findall(r"^- \[(.*)\]\((.*)\)$", text, re.MULTILINE)
    assert [title for title, _ in lines] == [title for page in pages for title in page]
    assert all(url.startswith(URLS["Documentation"]) and url.endswith("/") for _, url in lines)
    assert text.startswith("# lightning_d9m\n\n> Bit-exact")


def test_the_conda_recipe_needs_what_the_package_needs():
    (python,) = re.findall(r'^requires-python = "(.*)"', PROJECT, re.MULTILINE)
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    names = {"pytorch": "torch", "python-xxhash": "xxhash"}
    needed = dict(line.split() for line in recipe["requirements"]["run"])
    needed = {names.get(name, name): version for name, version in needed.items()}
    assert needed == {**DECLARED, "python": python}
    assert recipe["context"]["version"] == __version__


def test_the_changelog_has_the_version():
    assert f"\n## [{__version__}]\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_hooks_for_users_are_commands_that_we_have():
    for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text()):
        program, command = hook["entry"].split()
        assert program == "d9m"
        build_parser(command).parse_args([command, "a.py", "b.ipynb"])


def test_the_page_shows_the_hook_of_the_repository():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    page = (ROOT / "docs/scan.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(repos:.*?)^```", page, re.DOTALL | re.MULTILINE)
    (repository,) = yaml.safe_load(shown)["repos"]
    assert [hook] == [one | {"description": hook["description"]} for one in repository["hooks"]]
