"""Processes of the user's command: failures are named, no process is left, two run at once."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rank_processes import has_ended

from lightning_d9m.errors import CommandError, LedgerError
from lightning_d9m.tools.launch import processes as launched
from lightning_d9m.tools.launch.processes import run_beside, run_once, tail
from lightning_d9m.tools.launch.progress import RunProgress

PAUSE = "import signal; signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
# Starts `child`, writes its PID to a file once it runs, and continues.
START = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import os; os.write(1, b'.'); " + {child!r}],
                         stdout=subprocess.PIPE, start_new_session={apart})
child.stdout.read(1)
open({pid!r}, "w").write(str(child.pid))
"""
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has subreapers")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(launched, "_SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(launched, "_GRACE_SECONDS", 0.2)


class Quiet(RunProgress):
    def _print(self, text):
        pass


@pytest.fixture
def watch(tmp_path):
    """Return a function that runs Python code as a watched command."""

    def run(code, *, timeout=60.0):
        progress = Quiet("", tmp_path)
        progress.tick = ticks.append
        run_once([sys.executable, "-c", code], tmp_path, progress=progress, timeout=timeout)
        return (tmp_path / "output.log").read_text()

    run.ticks = ticks = []
    return run


@linux
def test_a_command_leaves_this_process_as_it_was(watch):
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    with subprocess.Popen([sys.executable, "-c", PAUSE]) as other:
        assert watch(code) == "out\nerr\n"
        assert other.poll() is None
        other.kill()
    found = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(launched._GET_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    assert found.value == 0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(1)", "It printed nothing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
        (
            "print('first\\n' * 50); print('last words'); raise SystemExit(3)",
            r"exit status 3[\s\S]*\| last words",
        ),
    ],
)
def test_a_failure_is_named_with_the_end_of_the_output(watch, code, message):
    with pytest.raises(CommandError, match=message) as caught:
        watch(code)
    assert str(caught.value).count("|") in (0, 20)


@linux
def test_a_hanging_command_and_its_children_are_ended(watch, tmp_path, monkeypatch):
    """The time passes at once when the child runs."""
    pid = tmp_path / "pid"

    def read_clock():
        return 4.0 if watch.ticks and pid.exists() and pid.read_text() else 0.0

    monkeypatch.setattr(launched, "_read_clock", read_clock)
    with pytest.raises(CommandError, match="still running after 3 s"):
        watch(START.format(child=STUBBORN, apart=True, pid=str(pid)) + PAUSE, timeout=3.0)
    assert has_ended(int(pid.read_text()))


@pytest.mark.parametrize(
    ("child", "apart"), [(PAUSE, False), pytest.param(STUBBORN, True, marks=linux)]
)
def test_a_child_that_outlives_the_command_is_ended_and_named(
    watch, tmp_path, capsys, child, apart
):
    pid = tmp_path / "pid"
    watch(START.format(child=child, apart=apart, pid=str(pid)))
    assert has_ended(int(pid.read_text()))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("d9m: the command left 1 process running, ended now: python")


# Runs a command like `d9m` does, in a process that can be signaled.
WATCHER = """
import os, signal, sys
from pathlib import Path
from lightning_d9m.tools.launch import processes as run
# A test run in the background may ignore these signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
run._GRACE_SECONDS = 0.2
folder = Path({folder!r})
progress = run.RunProgress("run", folder)
run.run_once([sys.executable, "-c", {code!r}], folder, progress=progress, timeout=None)
"""


@pytest.mark.parametrize(("number", "child"), [(signal.SIGTERM, STUBBORN), (signal.SIGINT, PAUSE)])
def test_a_signal_ends_the_command_first(tmp_path, number, child):
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    code = START.format(child=child, apart=sys.platform.startswith("linux"), pid=str(fifo)) + child
    watcher = WATCHER.format(code=code, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", watcher], stderr=subprocess.PIPE) as watching:
        pid = int(fifo.read_text())
        watching.send_signal(number)
        try:
            _, err = watching.communicate(timeout=60)
        finally:
            watching.kill()
    assert watching.returncode == -number
    assert f"{number.name} received; the command was ended.".encode() in err
    assert has_ended(pid)


def test_ignored_signals_stay_ignored_and_handlers_are_restored(watch):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code = "import os, signal; os.kill(os.getppid(), signal.SIGHUP); print('done')"
        assert watch(code) == "done\n"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert {number: signal.getsignal(number) for number in numbers} == before


def test_the_end_of_the_output_is_as_a_terminal_shows_it(watch):
    code = (
        r"print('\r'.join(f'{n}%' for n in range(100)), '\x1b[31mred\x1b[0m', sep='\n');"
        "print('long' * 5000); print('a ' * 200, 'remedy'); raise SystemExit(1)"
    )
    with pytest.raises(CommandError) as caught:
        watch(code)
    first, second, third, last = str(caught.value).splitlines()[-4:]
    assert (first, second) == ("  | 99%", "  | red")
    assert third.endswith("long ...")
    assert len(third) < 220
    assert last.endswith("remedy")  # of an error, whose last line is shown whole


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    log = tmp_path / "output.log"
    log.touch()
    assert tail(log) == " It printed nothing."
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert tail(log).startswith(f" The disk of {tmp_path} is full, so what it wrote there is not")


def test_a_log_that_cannot_be_created_is_named(tmp_path):
    folder = tmp_path / "none"
    with pytest.raises(LedgerError, match=r"log .* cannot be made: No such file or directory"):
        run_once(["true"], folder, progress=Quiet("", folder), timeout=None)


# It has a ledger, and then meets the other run twice.
MEETS = """
import os, time
from pathlib import Path
own = Path(os.environ["LIGHTNING_D9M_LEDGER_DIR"])
other = own.with_name("ab".replace(own.name, ""))
(own / "fit-000").mkdir()
(own / "fit-000/rank-0.jsonl").write_text("x")
for name in ("once", "twice"):
    (own / name).touch()
    while not (other / name).exists():
        time.sleep(0.01)
print(os.environ["OMP_WAIT_POLICY"])
raise SystemExit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture
def beside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()

    def run(code, *, killed_when=lambda: False, variables=({}, {}), timeout=60.0):
        words = {"progress": Quiet("", folders[0]), "timeout": timeout, "variables": variables}
        return run_beside([sys.executable, "-c", code], folders, killed_when=killed_when, **words)

    return run


def test_programs_that_run_at_once_share_the_cores(beside, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert beside(MEETS) == [None, None]
    assert (tmp_path / "a/output.log").read_text() == "PASSIVE\n"


def test_the_second_run_follows_if_the_memory_is_short(beside, tmp_path, monkeypatch):
    monkeypatch.setattr(launched, "_MEMORY", 1e9)
    code = "import os\nown = os.environ['LIGHTNING_D9M_LEDGER_DIR']\nos.mkdir(own + '/fit-000')\n"
    code += "open(own + '/fit-000/rank-0.jsonl', 'w').write('x')\nimport time; time.sleep(0.5)\n"
    code += "print(time.monotonic())"
    assert beside(f"import time; print(time.monotonic())\n{code}") == [None, None]
    (_, end), (begin, _) = ((tmp_path / n / "output.log").read_text().split() for n in "ab")
    assert float(begin) > float(end)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_run_that_fails_beside_another_lets_it_end(beside, failing):
    variables = [{}, {}]
    variables[failing] = {"STATUS": "3"}
    found = beside(MEETS, variables=variables)
    assert "ended with exit status 3" in str(found[failing])
    assert found[1 - failing] is None


def test_both_runs_end_where_they_differ_or_hang(beside, tmp_path):
    hangs = MEETS + "time.sleep(60)"
    assert beside(hangs.replace("raise", "#"), killed_when=(tmp_path / "b/twice").exists) == [
        None,
        None,
    ]
    found = beside("import time; time.sleep(60)", timeout=0.3)
    assert "was still running after 0.6 s" in str(found[0])
