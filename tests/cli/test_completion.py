"""``d9m completion`` prints a script for a shell, with every command."""

import shutil
import subprocess
import sys

import pytest

from lightning_d9m.cli.main import COMMANDS, main


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_the_script_has_every_command(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)


def test_bash_reads_it(tmp_path, capsys):
    main(["completion", "bash"])
    script = tmp_path / "d9m.bash"
    script.write_text(capsys.readouterr().out)
    code = f'. {script}; COMP_WORDS=(d9m rep); COMP_CWORD=1; _shtab_d9m; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        [shutil.which("bash"), "-c", code], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {"repeat", "report"}


def test_without_the_package_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "Run: pip install shtab" in capsys.readouterr().err
