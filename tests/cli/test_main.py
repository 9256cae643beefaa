"""The ``d9m`` command: its help, its version and its errors."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_d9m.cli.main import COMMANDS, build_parser, main
from lightning_d9m.errors import D9mError
from lightning_d9m.version import __version__


def test_help_names_every_command_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = build_parser().format_help()
    for command in ("repeat", "compare", "ls", "doctor", "ops", "install-horovod"):
        assert re.search(rf"^  {command}\s", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", ["repeat", "compare", "ls", "doctor", "ops", "install-horovod"])
def test_each_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: d9m {command}" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"d9m {__version__}\n"


@pytest.mark.parametrize("words", [["compare", "one", "two", "three"], ["--bogus"]])
def test_misuse_ends_with_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: d9m" in capsys.readouterr().err


def test_no_command_prints_the_help_and_ends_with_2(capsys):
    assert main([]) == 2
    out = capsys.readouterr().out
    assert "Why does it differ?" in out
    assert "d9m repeat -- python train.py" in out


@pytest.mark.parametrize(
    ("word", "hint"),
    [("comapre", "Did you mean `d9m compare`?"), ("lcoate", "Did you mean `d9m locate`?")],
)
def test_a_mistyped_command_gets_the_one_that_is_alike(word, hint, capsys):
    assert main([word, "a", "b"]) == 2
    assert f"d9m: error: '{word}' is not a command. {hint}" in capsys.readouterr().err


def test_a_word_like_no_command_gets_the_list(capsys):
    assert main(["zzz"]) == 2
    error = capsys.readouterr().err
    assert "Did you mean" not in error
    assert "Commands: repeat, compare," in error


@pytest.mark.parametrize(
    "words",
    [["locate", "--bogus", "--", "true"], ["repeat", "--bogus"], ["audit", "--bogus", "ops"]],
)
def test_an_unknown_word_gets_the_usage_of_its_command(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"usage: d9m {words[0]} ")
    assert message.endswith("error: unrecognized arguments: --bogus\n")


def test_an_expected_error_is_one_line_and_2(capsys):
    assert main(["compare", "/no/such/ledger", "/no/such/ledger"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("d9m: error: There is no ledger at /no/such/ledger")
    assert "Traceback" not in captured.err


def test_an_error_on_a_terminal_cuts_no_word_and_keeps_what_is_laid_out(monkeypatch, capsys):
    laid_out = "  | " + "a log " * 20

    def fail(path):
        raise D9mError("word " * 40 + "\n" + laid_out)

    monkeypatch.setattr("lightning_d9m.cli.compare.read_ledger", fail)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    main(["compare", "a", "b"])
    *wrapped, last = capsys.readouterr().err.splitlines()
    assert last == laid_out
    assert len(wrapped) == 3
    assert {word for line in wrapped for word in line.split()} == {"d9m:", "error:", "word"}


def test_interrupting_is_no_traceback(monkeypatch, capsys):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_d9m.cli.compare.read_ledger", interrupt)
    assert main(["compare", "a", "b"]) == 130
    assert capsys.readouterr().err == "d9m: interrupted.\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "x"), "[Errno 28] No space left on device: 'x'."),
        (KeyError("name"), "KeyError: 'name'. This is a bug in d9m: please report it"),
    ],
)
def test_an_unexpected_error_is_one_line_and_2(monkeypatch, capsys, error, message):
    def fail(path):
        raise error

    monkeypatch.setattr("lightning_d9m.cli.compare.read_ledger", fail)
    assert main(["compare", "a", "b"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"d9m: error: {message}")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_an_error():
    command = f"{sys.executable} -m lightning_d9m ops > /dev/full"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line


def test_a_reader_that_leaves_early_is_no_traceback():
    command = f"{sys.executable} -m lightning_d9m ops | true"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("columns", [80, 100])
def test_an_op_is_described_within_the_width_of_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["ops", "index_put_accumulate"]) == 0
    longest = max(map(len, capsys.readouterr().out.splitlines()))
    assert columns - 15 < longest <= columns


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["repeat", "--rusn", "3"], "--rusn. Did you mean --runs?"),
        (["audit", "ops", "--devise=cpu"], "--devise=cpu. Did you mean --device?"),
        (["compare", "--xyzzy"], "--xyzzy\n"),
    ],
)
def test_a_mistyped_option_gets_the_one_that_is_alike(words, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"error: unrecognized arguments: {hint}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["audit", "modle"], ". Did you mean model?\n"),
        (["repeat", "--format", "jsn"], ". Did you mean json?\n"),
        (["repeat", "--format", "xyzzy"], ")\n"),
    ],
)
def test_a_mistyped_choice_gets_the_one_that_is_alike(words, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"invalid choice: '{words[-1]}'" in error
    assert error.endswith(hint)


@pytest.mark.parametrize("command", [*COMMANDS, "audit ops", "audit model", "audit inference"])
def test_the_usage_of_each_command_fits_80_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
