"""Arguments that several commands share: values outside their bounds are refused."""

import pytest

from lightning_d9m.cli.main import main

COMMAND = ["--", "true"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["repeat", "-n", "1"], "--runs: 1 is not valid; allowed: a whole number from 2 to 1000."),
        (["repeat", "-n", "0"], "--runs: 0 is not valid; allowed: a whole number from 2 to 1000."),
        (["repeat", "-n", "-3"], "--runs: -3 is not valid; allowed: a whole number from 2 to "),
        (["repeat", "-n", "1000000000"], "--runs: 1000000000 is not valid; allowed: a whole "),
        (["repeat", "-n", "2.5"], "--runs: 2.5 is not valid; allowed: a whole number from 2 to "),
        (["audit", "model", "-n", "1"], "--runs: 1 is not valid; allowed: a whole number from 2 "),
        (["locate", "--tries", "0"], "--tries: 0 is not valid; allowed: a whole number from 1."),
        (["repeat", "--timeout", "0"], "--timeout: 0 is not valid; allowed: more than 0 seconds."),
        (["locate", "--timeout", "nan"], "--timeout: nan is not valid; allowed: more than 0 sec"),
        (["audit", "model", "--timeout", "x"], "--timeout: x is not valid; allowed: more than 0"),
        (["audit", "ops", "--runs", "1"], "--runs: 1 is not valid; allowed: a whole number from 2"),
        (["audit", "ops", "--threads", "0"], "--threads: 0 is not valid"),
        (["audit", "ops", "--timeout", "0"], "--timeout: 0 is not valid"),
        (["scan", "--jobs", "0"], "--jobs: 0 is not valid; allowed: a whole number from 1."),
    ],
)
def test_a_value_outside_its_bounds_is_refused(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main([*argv, *COMMAND])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["repeat", "locate", "audit model"])
@pytest.mark.parametrize("argv", [[], ["--"]])
def test_a_command_is_required(name, argv, capsys):
    assert main([*name.split(), *argv]) == 2
    said = f"There is no command to run. Give it after `--`: d9m {name} -- python train.py"
    assert said in " ".join(capsys.readouterr().err.split())
