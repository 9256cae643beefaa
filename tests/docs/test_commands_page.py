"""The page of commands is what the parsers say."""

from pathlib import Path

from scripts import load_script

from lightning_d9m.cli.main import COMMANDS, build_parser

WRITER = load_script("docs/write_commands.py")


def test_the_page_is_up_to_date(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert WRITER.PAGE.read_text() == WRITER.format_page(), "run: python docs/write_commands.py"


def test_every_command_has_a_section_with_its_options():
    page = WRITER.PAGE.read_text()
    for command in COMMANDS:
        assert f"## d9m {command}" in page
    assert "| `-n, --runs RUNS` |" in page


def test_readme_names_the_commands_without_json():
    parsers = WRITER._list_commands(build_parser(*COMMANDS))
    without = [parser.prog for parser in parsers if "--json" not in parser.format_help()]
    assert without == ["d9m report", "d9m completion"]
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert "All commands but `completion` and `report` have `--json`." in readme


def test_a_long_usage_is_broken_between_options():
    page = WRITER.PAGE.read_text()
    usages = [block.partition("```")[0] for block in page.split("```text\n")[1:]]
    lines = [line for usage in usages for line in usage.splitlines()]
    assert len(lines) > len(usages)
    assert all(len(line) <= 80 for line in lines)
    assert all(line.count("[") == line.count("]") for line in lines)
