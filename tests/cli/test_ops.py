"""The catalog as ``d9m ops`` and the documentation show it."""

import argparse
import json
from pathlib import Path

import pytest

from lightning_d9m.cli import ops as command
from lightning_d9m.cli.arguments import declare_command
from lightning_d9m.errors import SettingError
from lightning_d9m.output.op_listing import render_markdown
from lightning_d9m.patches.catalog.catalog import OPS

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def run(*words: str) -> int:
    """Run the command in this process."""
    parser = argparse.ArgumentParser()
    declare_command(parser, command)
    return command.run(parser.parse_args(words))


def test_the_page_is_current() -> None:
    """Made from the catalog as it is; `d9m ops --markdown > docs/ops.md` brings it up to date."""
    assert PAGE.read_text(encoding="utf-8") == render_markdown(OPS)


def test_the_table_has_a_line_for_each_op(capsys: pytest.CaptureFixture[str]) -> None:
    """Name, status, what is done."""
    assert run() == 0
    titles, *lines = capsys.readouterr().out.splitlines()
    assert titles.split()[:2] == ["op", "status"]
    assert [line.split()[:2] for line in lines] == [[op.name, op.status] for op in OPS]


def test_one_op_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    """What torch does, why, what is done, since when: all in 100 columns."""
    assert run("put_") == 0
    shown = capsys.readouterr().out
    for label in ("with the flag on, torch:", "why:", "instead:", "bits:", "needed:"):
        assert f"\n{label}" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_json_is_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """A list, or one object for one op."""
    run("--json")
    records = json.loads(capsys.readouterr().out)
    assert [record["name"] for record in records] == [op.name for op in OPS]
    run("--json", "cumsum")
    assert json.loads(capsys.readouterr().out)["status"] == "exempt"


def test_unknown_names_are_misuse() -> None:
    """The error names similar ops."""
    with pytest.raises(SettingError, match="Similar: index_put, index_put_accumulate, put_"):
        run("put")
