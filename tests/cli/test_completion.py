"""``d9m completion`` prints a script for a shell, with every command."""

import sys

from scripts import execute


def test_bash_reads_it(tmp_path, d9m):
    script = tmp_path / "d9m.bash"
    script.write_text(d9m("completion", "bash")[1])
    code = f'. {script}; COMP_WORDS=(d9m rep); COMP_CWORD=1; _shtab_d9m; echo "${{COMPREPLY[@]}}"'
    assert set(execute("bash", "-c", code).stdout.split()) == {"repeat", "report"}


def test_without_the_package_the_error_says_what_to_install(monkeypatch, d9m):
    monkeypatch.setitem(sys.modules, "shtab", None)
    status, _, err = d9m("completion", "bash")
    assert status == 2
    assert "Run: pip install shtab" in err


def test_fish_too_if_the_package_knows_it(monkeypatch, d9m):
    status, script, _ = d9m("completion", "fish")
    assert (status, "complete -c d9m" in script) == (0, True)
    monkeypatch.setattr("shtab.SUPPORTED_SHELLS", ["bash"])
    status, _, err = d9m("completion", "fish")
    assert (status, "does not know fish. Run: pip install --upgrade shtab" in err) == (2, True)
