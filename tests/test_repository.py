"""What the repository offers around the code holds together."""

import re
from pathlib import Path

import yaml

from lightning_d9m.cli.main import build_parser

ROOT = Path(__file__).parents[1]


def test_every_issue_template_asks_for_the_doctor():
    templates = [p for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config"]
    assert templates
    for template in templates:
        fields = {field["id"]: field for field in yaml.safe_load(template.read_text())["body"]}
        assert fields["doctor"]["attributes"]["label"] == "`d9m doctor --json`"
        assert fields["doctor"]["validations"]["required"]
    build_parser("doctor").parse_args(["doctor", "--json"])


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


def test_our_own_hooks_leave_out_what_the_configuration_leaves_out():
    """Ruff takes a file that is named, as pre-commit names them, even where it is excluded."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    ruff = [hook["entry"] for hook in repository["hooks"] if "bin/ruff" in hook["entry"]]
    assert len(ruff) == 2
    assert all("--force-exclude" in entry for entry in ruff)


def test_every_slow_test_that_is_listed_exists():
    lines = (ROOT / "tests/slow_tests.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert listed
    for line in listed:
        file, _, name = line.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).exists(), line
