"""Watching the user's command: failures are named, and no process is left behind."""

import os
import select
import sys

import pytest

from lightning_d9m.adapters.process import run_watched
from lightning_d9m.errors import CommandError


@pytest.fixture
def watch(tmp_path):
    """Return a function that runs Python code as a watched command."""

    def run(code, *, timeout=60.0, program=(sys.executable, "-c")):
        log = tmp_path / "output.log"
        run_watched(
            [*program, code], environment=os.environ, log=log, timeout=timeout, tick=ticks.append
        )
        return log.read_text()

    ticks: list[float] = []
    run.ticks = ticks
    return run


def test_output_goes_to_the_log(watch):
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    assert watch(code) == "out\nerr\n"


def test_a_failure_shows_the_end_of_the_output(watch):
    with pytest.raises(CommandError, match=r"exit status 3[\s\S]*\| last words") as caught:
        watch("print('first\\n' * 50); print('last words'); raise SystemExit(3)")
    assert str(caught.value).count("|") == 20


def test_a_silent_failure_says_so(watch):
    with pytest.raises(CommandError, match="It printed nothing"):
        watch("raise SystemExit(1)")


def test_a_signal_is_named(watch):
    with pytest.raises(CommandError, match="signal SIGKILL"):
        watch("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")


def test_a_signal_without_a_name_is_numbered(watch):
    with pytest.raises(CommandError, match="signal 40"):
        watch("import os; os.kill(os.getpid(), 40)")


def test_a_missing_program_is_named(watch):
    with pytest.raises(CommandError, match="does not start: No such file"):
        watch("", program=("no-such-program",))


def test_a_hanging_command_and_its_children_are_ended(watch, tmp_path):
    child = "import signal; signal.pause()"
    code = (
        "import subprocess, sys, signal\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))\n"
        "signal.pause()"
    )
    with pytest.raises(CommandError, match="still running after 3 s"):
        watch(code, timeout=3.0)
    assert watch.ticks
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_child_that_outlives_the_command_is_ended(watch, tmp_path):
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    )
    watch(code)
    assert gone(int((tmp_path / "pid").read_text()))


def gone(pid):
    """Return whether a process ends within 10 s (a killed one takes a moment)."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)
