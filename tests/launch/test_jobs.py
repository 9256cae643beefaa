"""Commands run at once, as many as may; a signal ends them; an absent cluster is named."""

import os
import signal
import sys

import pytest
from rank_processes import has_ended

from lightning_d9m.errors import SettingError
from lightning_d9m.tools.launch.jobs import run_jobs


def test_as_many_run_at_once_as_may_and_each_is_noted_with_its_log(tmp_path):
    code = """
import os, pathlib, sys, time
own = pathlib.Path(sys.argv[1], str(os.getpid()))
own.touch()
print(len(list(own.parent.iterdir())), flush=True)
time.sleep(0.3)
own.unlink()
"""
    noted, running = {}, tmp_path / "running"
    running.mkdir()
    commands = {number: [sys.executable, "-c", code, str(running)] for number in range(4)}
    run_jobs(commands, tmp_path, noted.__setitem__, at_once=2)
    assert [*sorted(noted)] == [0, 1, 2, 3]
    assert {log.split()[-1] for log in noted.values()} <= {"1", "2"}
    assert str(tmp_path / "job-003.log") in noted[3]


def test_a_signal_ends_the_jobs_and_keeps_what_has_ended(tmp_path):
    noted = []

    def note(number, log):
        noted.append((number, log))
        os.kill(os.getpid(), signal.SIGTERM)

    pid = "import os, pathlib; pathlib.Path(__import__('sys').argv[1]).write_text(str(os.getpid()))"
    slow = [sys.executable, "-c", f"{pid}; import time; time.sleep(60)", str(tmp_path / "pid")]
    wait = (
        "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
    )
    quick = [sys.executable, "-c", wait, str(tmp_path / "pid")]
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        with pytest.raises(SystemExit):
            run_jobs({0: slow, 1: quick, 2: quick}, tmp_path, note, at_once=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (len(received), [number for number, _ in noted]) == (1, [1])
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_a_result_ends_a_job_and_what_cannot_be_submitted_is_named(tmp_path, monkeypatch, capsys):
    noted, results = {}, tmp_path / "results"
    results.mkdir()
    has_result = lambda number: (results / str(number)).exists()  # noqa: E731 - short
    code = "import os, pathlib, sys; assert 'SLURM_NTASKS' not in os.environ\n"
    code += "pathlib.Path(sys.argv[1]).touch()"
    commands = {7: [sys.executable, "-c", code, str(results / "7")], 8: ["true"]}
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setattr("lightning_d9m.tools.launch.jobs._LATE_SECONDS", 0.2)
    run_jobs(commands, tmp_path, noted.__setitem__, has_result=has_result, submit="local")
    assert {*noted} == {7, 8}
    assert "_log.err" in capsys.readouterr().err
    import submitit

    def refuse(*_):
        raise submitit.core.utils.FailedJobError("sbatch: error: invalid partition\nmore")

    monkeypatch.setattr(submitit.AutoExecutor, "submit", refuse)
    with pytest.raises(SettingError, match="does not take 'local': sbatch: error: invalid part"):
        run_jobs(commands, tmp_path, print, submit="local")


def test_a_cluster_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    for chosen, said in (
        ("local,speed=9", "speed"),
        ("local,tasks_per_node=2", "a job has one task"),
        ("slurm,slurm_ntasks_per_node=2", "a job has one task"),
        ("debug", "the cluster is local or slurm"),
    ):
        with pytest.raises(SettingError, match=said):
            run_jobs({}, tmp_path, print, submit=chosen)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SettingError, match=r"Install 'lightning-d9m\[slurm\]'"):
        run_jobs({}, tmp_path, print, submit="slurm")
