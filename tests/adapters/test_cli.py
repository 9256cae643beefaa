"""``d9m`` itself: its help, its version, and what it makes of misuse."""

import re
import subprocess
import sys

import pytest

from lightning_d9m import __version__
from lightning_d9m.adapters.cli import build_parser, main


def test_help_names_every_command_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = build_parser().format_help()
    for command in ("repeat", "compare", "doctor", "ops", "install-horovod"):
        assert re.search(rf"^    {command}\s", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", ["repeat", "compare", "doctor", "ops", "install-horovod"])
def test_each_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: d9m {command}" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"d9m {__version__}\n"


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["compare", "only one"]])
def test_misuse_ends_with_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: d9m" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_2(capsys):
    assert main(["compare", "/no/such/ledger", "/no/such/ledger"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("d9m: error: There is no ledger at /no/such/ledger")
    assert "Traceback" not in captured.err


def test_interrupting_is_no_traceback(monkeypatch, capsys):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_d9m.adapters.compare.read_ledger", interrupt)
    assert main(["compare", "a", "b"]) == 130
    assert capsys.readouterr().err == "d9m: interrupted.\n"


def test_a_reader_that_leaves_early_is_no_traceback():
    command = f"{sys.executable} -m lightning_d9m ops | true"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
