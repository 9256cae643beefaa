"""What the repository offers around the code holds together."""

from pathlib import Path

import yaml

from lightning_d9m.adapters.cli import build_parser

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


def test_contributing_is_short_and_names_the_one_command():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) < 60
    assert "python3 dev.py test" in text
