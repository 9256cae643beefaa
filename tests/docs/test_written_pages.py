"""The pages that are written from the code are what the code says, and have every public name."""

import re
from inspect import isclass

import pytest
from scripts import ROOT, load_script

import lightning_d9m
from lightning_d9m.cli.main import COMMANDS, build_parser
from lightning_d9m.errors import D9mError

WRITERS = {name: load_script(f"docs/write_{name}.py") for name in ("commands", "errors", "ops")}
WRITERS["ledger_fields"] = load_script("docs/write_ledger_fields.py")


@pytest.mark.parametrize("name", WRITERS)
def test_a_page_is_up_to_date(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    page = WRITERS[name].PAGE.read_text()
    assert page == WRITERS[name].format_page(), f"run: python docs/write_{name}.py"


def test_readme_names_the_commands_without_json():
    parsers = WRITERS["commands"]._list_commands(build_parser(*COMMANDS))
    without = [parser.prog for parser in parsers if "--json" not in parser.format_help()]
    assert without == ["d9m report", "d9m completion"]
    readme = (ROOT / "README.md").read_text()
    assert "All commands but `completion` and `report` have `--json`." in readme


def test_a_long_usage_is_broken_between_options():
    page = WRITERS["commands"].PAGE.read_text()
    usages = [block.partition("```")[0] for block in page.split("```text\n")[1:]]
    lines = [line for usage in usages for line in usage.splitlines()]
    assert len(lines) > len(usages)
    assert all(len(line) <= 80 for line in lines)
    assert all(line.count("[") == line.count("]") for line in lines)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("SettingError", "allowed: a whole number from … to …"),
        ("DriftError", "This run differs from its reference in … on rank …"),
        ("InexactResumeError", "This run cannot be resumed exactly from the checkpoint"),
        ("StackDifferenceError", "nondeterminism of this program"),
        ("RanksDisagreeError", "The ranks are about to do different things"),
        ("LedgerError", "The plot … cannot be written: …"),
    ],
)
def test_messages_are_followed_to_where_their_text_is(error, words):
    """Through variables, lists of lines, attributes and functions."""
    assert any(words in text for _, text in WRITERS["errors"].read_messages()[error])


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "reference.md").read_text()
    shown = set(re.findall(r"^::: lightning_d9m\.(\w+)$", page, re.MULTILINE))
    errors = {
        name
        for name in lightning_d9m.__all__
        if isclass(value := getattr(lightning_d9m, name)) and issubclass(value, D9mError)
    }
    assert shown == {*lightning_d9m.__all__, "errors"} - errors - {"__version__"}
