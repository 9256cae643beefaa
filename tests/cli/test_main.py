"""The ``d9m`` command: its help, its version and its errors."""

import re
import sys
from pathlib import Path

import pytest
from scripts import execute

from lightning_d9m.tools.cli.main import COMMANDS, build_parser
from lightning_d9m.version import __version__


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself_in_80_columns(command, monkeypatch, d9m):
    monkeypatch.setenv("COLUMNS", "80")
    status, text, _ = d9m(*command.split(), "--help")
    assert status == 0
    assert text.startswith(f"usage: d9m {command}")
    assert max(map(len, text.splitlines())) <= 80
    example = re.search(rf"^example: .*?d9m ({command} ?.*?)[)\"]*$", text, re.MULTILINE)[1]
    words = example.partition(" -- ")[0].split()
    assert not build_parser(command.split()[0]).parse_known_args(words)[1]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--version", 0, f"d9m {__version__}\n"),
        ("", 2, "d9m repeat -- python train.py"),
        ("--bogus", 2, "usage: d9m "),
        ("compare one two three", 2, "error: unrecognized arguments: three\n"),
        ("locate --bogus -- true", 2, "usage: d9m locate "),
        ("zzz", 2, "d9m: error: 'zzz' is not a command. Commands: repeat, compare,"),
        ("comapre a b", 2, "'comapre' is not a command. Did you mean `d9m compare`?"),
        ("repeat --rusn 3", 2, "unrecognized arguments: --rusn. Did you mean --runs?"),
        ("audit ops --devise=cpu", 2, "arguments: --devise=cpu. Did you mean --device?"),
        ("compare --xyzzy", 2, "unrecognized arguments: --xyzzy\n"),
        ("repeat --format jsn", 2, "invalid choice: 'jsn' (choose from"),
        ("repeat -n 1", 2, "--runs: 1 is not valid; allowed: a whole number from 2 to 1000."),
        ("audit ops -n 2.5", 2, "--runs: 2.5 is not valid; allowed: a whole number from 2 to "),
        ("locate --tries 0", 2, "--tries: 0 is not valid; allowed: a whole number from 1."),
        ("repeat --timeout 0", 2, "--timeout: 0 is not valid; allowed: more than 0 seconds."),
        ("repeat --timeout nan", 2, "--timeout: nan is not valid; allowed: more than 0 sec"),
        ("repeat --processes 0,1", 2, "0 is not valid; allowed: a whole number from 1 to 1024"),
        ("repeat --processes 1,two", 2, "two is not valid; allowed: a whole number from 1"),
        ("repeat --processes 1,2,1", 2, "1,2,1 is not valid; allowed: two or more different"),
        ("repeat --processes 2", 2, "2 is not valid; allowed: two or more different numbers"),
        ("repeat --processes 1,2 --interrupt", 2, "not allowed with argument --processes"),
        ("repeat --portable -n 3 -- true", 2, "not allowed with argument --portable"),
        ("repeat", 2, "no command to run. Give it after `--`: d9m repeat -n 3 -- python train.py"),
        ("bisect -- python a.py", 2, "arguments are required: GOOD..BAD"),
        ("audit ops -- train.py", 2, "audit: error: unrecognized arguments: train.py"),
        ("verify -- none.ckpt", 2, "No such file: none.ckpt."),
    ],
)
def test_what_is_typed_gets_an_answer(words, status, said, d9m):
    found, out, err = d9m(*words.split())
    assert found == status
    assert said in out + err
    assert err.count("error: ") <= 1


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (KeyboardInterrupt(), 130, "d9m: interrupted."),
        (OSError(28, "No space", "x"), 2, "d9m: error: [Errno 28] No space: 'x'."),
        (KeyError("a"), 2, "d9m: error: KeyError: 'a'. This is a bug in d9m: please report it"),
    ],
)
def test_any_error_is_one_line_and_a_status(monkeypatch, d9m, error, expected, message):
    def fail(path):
        raise error

    monkeypatch.setattr("lightning_d9m.tools.cli.compare.read_ledger", fail)
    status, out, err = d9m("compare", "a", "b")
    (line,) = err.splitlines()
    assert (status, out) == (expected, "")
    assert line.startswith(message)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_an_error():
    command = f"{sys.executable} -m lightning_d9m ops > /dev/full"
    done = execute("bash", "-c", command, fails=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line
