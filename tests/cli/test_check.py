"""``d9m check`` names what it cannot check, and why a segment differs; programs without torch."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ledger_program import PROGRAM
from ledger_runs import make_header
from rank_processes import has_ended

from lightning_d9m.tools.cli import check as module
from lightning_d9m.tools.output.check_text import print_check
from lightning_d9m.tools.segments.check import CheckedSegment, CheckReport
from lightning_d9m.tools.segments.segment import SavedPoint, Segment

# A run without checkpoints: its one segment is the whole of it. It marks that it came to the end.
END = '\n(checkpoints / "killed").touch()\n'


@pytest.fixture
def check(tmp_path, monkeypatch, d9m):
    """Return a function that trains, changes the program, and checks the run."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"

    def run(call, *options, first="train([7, 7], obeys=False)"):
        script.write_text(f"{PROGRAM}{first}{END}")
        variables = {**os.environ, "LIGHTNING_D9M_LEDGER_DIR": "trained"}
        subprocess.run([sys.executable, script], env=variables, check=True)
        script.write_text(f"{PROGRAM}{call}{END}")
        status, out, errors = d9m("check", "trained", *options, "--", sys.executable, script)
        return status, " ".join(out.split()), " ".join(errors.split())

    return run


AGAIN = 'ledgers.name.endswith("again")'


@pytest.mark.parametrize(
    ("value", "status", "said"),
    [
        ("[7, 7]", 0, "equal: 1 of 1 segment (100.0% of 1 step)"),
        ("[7, 8]", 1, "0 to 1 persistent epoch 1 (step 1)"),
        (f"[7, 7 if {AGAIN} else 8]", 1, "transient"),
        (f"[7, 9 if {AGAIN} else 8]", 1, "program"),
        ("[7, 7], settings={'portable': True}", 1, "refused"),
        ("[7, 8], stack={'threads.intraop': 2}", 1, "unclear"),
        (f"[7, 8], **({{'settings': {{'portable': True}}}} if {AGAIN} else {{}})", 1, "refused"),
    ],
)
def test_a_second_run_says_what_kind_a_difference_is(check, value, status, said):
    found, out, errors = check(f"train({value}, obeys=False)")
    assert (found, said in out) == (status, True), out + errors
    assert "The run saved no checkpoints, so its one segment is the whole run." in out


BY_DEVICE = """
device = os.environ.get("DEVICE")
settings = {"settings": {"portable": True}} if device == "4" else {}
train([7, {"1": 7, "2": 9}.get(device, 8)], obeys=False, **settings)
"""


@pytest.mark.parametrize(
    ("device", "verdict", "said"),
    [
        ("1", "device", "a run with DEVICE=1 is equal to it. So this device computes different"),
        ("2", "persistent", "A run with DEVICE=2 differs from them, too"),
        ("3", "persistent", "A run with DEVICE=3 agrees with them, so this device is not the"),
        ("4", "persistent", "With DEVICE=4: The program has other settings than the run"),
    ],
)
def test_a_second_device_says_whether_this_one_is_wrong(check, device, verdict, said):
    options = ("--second-device", f"DEVICE={device}", "--second-device", "known=1")
    status, out, errors = check(BY_DEVICE, *options)
    said = said.replace(f"DEVICE={device}", f"DEVICE={device} known=1")
    assert (status, verdict in out, said in out) == (1, True, True), out + errors


def test_a_job_without_a_result_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_make_job", lambda *_: ["no-such-command"])
    report = CheckReport(str(tmp_path))
    module._run_jobs(SimpleNamespace(jobs=2, submit=None), [7], report, "")
    (found,) = report.checked
    assert (found.number, found.verdict, report.verdict) == (7, "failed", "incomplete")
    assert "left no result" in found.reason
    assert "d9m: error: 'no-such-command' is not a command" in found.reason


@pytest.mark.parametrize("where", [["--jobs", "2"], ["--submit", "local,timeout_min=2"]])
def test_segments_run_in_processes_or_in_jobs_of_submitit(check, where):
    status, out, errors = check("train([7, 8], obeys=False)", *where)
    assert (status, "0 to 1 persistent" in out) == (1, True), out + errors
    assert "segment 0 (1 of 1): persistent" in errors


def test_a_job_that_is_begun_again_has_a_folder_and_the_result_counts(check, tmp_path, monkeypatch):
    (tmp_path / "out/job-000").mkdir(parents=True)
    (tmp_path / "out/job-000/check.json").write_text('{"checked": []}')
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert check("train([7, 7], obeys=False)", "-o", "out/job-000")[0] == 0
    report = CheckReport(str(tmp_path / "out"))
    monkeypatch.setattr(module, "_make_job", lambda *_: ["--version"])
    module._run_jobs(SimpleNamespace(jobs=2, submit=None), [0], report, "")
    assert [own.verdict for own in report.checked] == ["equal"]


def test_segments_are_printed_for_a_scheduler(check, tmp_path):
    options = ("--print-commands", "--timeout", "9")
    status, out, _ = check("", *options)
    words = f"--timeout 9 --json -- {sys.executable} {tmp_path / 'script.py'}"
    assert (status, out) == (0, f"d9m check trained --only 0 {words}")
    assert not Path("d9m-runs").exists()


def test_wrong_input_is_named(check, d9m):
    assert check("", "--only", "4")[::2] == (
        2,
        "d9m: error: The run has no segment 4: no checkpoint of this number is there. Segments: 0.",
    )
    assert "There is no command to run" in d9m("check", "trained")[2]
    assert "cannot be opened" in d9m("check", "elsewhere", "--", "true")[2]
    assert "0 is not valid" in d9m("check", "trained", "--segments", "0", "--", "true")[2]
    assert "NAME=VALUE" in d9m("check", "trained", "--second-device", "1", "--", "true")[2]
    status, out, _ = d9m("check", "trained", "--json", "--", "no-such-program")
    assert status == 3
    found = json.loads(out)
    assert "does not start" in found["checked"][0]["reason"]


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Return a function that lets any ledger be that of a run with these segments."""
    monkeypatch.chdir(tmp_path)

    def record(there):
        facts = {"ledger": SimpleNamespace(path=tmp_path, header=make_header())}
        facts |= {
            "points": [],
            "end": None,
            "command": "",
            "last_step": there[-1].stop,
            "sources": None,
        }
        methods = {"list_segments": lambda _: there, "list_changed": lambda *_: ()}
        recorded = type("Recorded", (), methods | facts)
        monkeypatch.setattr(module, "RecordedRun", lambda _: recorded())

    return record


def test_a_choice_is_printed_and_can_be_repeated(d9m, record, tmp_path, capsys):
    record([Segment(None, 1, number) for number in range(40)])

    def choose(*options):
        out = d9m("check", "run", "--print-commands", "-o", "out", *options, "--", "true")[1]
        return [int(line.split()[4]) for line in out.splitlines()]

    assert len({tuple(choose()) for _ in range(20)}) > 15
    assert len(set(choose("--segments", "9"))) == 9
    assert choose("--segments", "all") == [*range(40)]
    assert (
        "--follow runs one at a time"
        in d9m("check", "run", "--follow", "--jobs", "2", "--", "x")[2]
    )
    checked = [CheckedSegment(number, number, number + 1) for number in range(3)]
    report = CheckReport(str(tmp_path), is_drawn=True, there=[*range(40)], checked=checked)
    assert report.missed == pytest.approx(37 / 40)
    for choice, said in ((None, "choice: --only 0,1,2\n"), (7, "choice: --choose 7\n")):
        print_check(replace(report, choice=choice), "text", ["true"])
        assert said in capsys.readouterr().out


def test_the_longest_segments_begin_first_so_that_none_runs_alone(
    d9m, record, monkeypatch, tmp_path
):
    starts = [None, *(SavedPoint(tmp_path, step) for step in (10, 30, 60))]
    record([*map(Segment, starts, (11, 31, 61, 65), range(4))])
    begun = []
    monkeypatch.setattr(module, "_run_jobs", lambda _, numbers, *__: begun.extend(numbers))
    assert d9m("check", "run", "--segments", "all", "--jobs", "2", "--", "true")[0] == 3
    assert begun == [2, 1, 0, 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_jobs_and_their_trainings(check, tmp_path, number):
    check("", "--print-commands")  # which trains
    Path("script.py").write_text(
        f"{PROGRAM}Path('started').write_text(str(os.getpid()))\ntime.sleep(60)\n"
    )
    words = ["check", "trained", "--jobs", "2", "-o", "out", "--", sys.executable, "script.py"]
    # Where tests run in the background, they have inherited that SIGINT is ignored.
    code = "import signal as s; s.signal(s.SIGINT, s.default_int_handler)\n"
    code += "import sys; from lightning_d9m.tools.cli.main import main; sys.exit(main())"
    checking = subprocess.Popen([sys.executable, "-c", code, *words])
    deadline = time.monotonic() + 60
    while not Path("started").exists() or not Path("started").read_text():
        assert checking.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    checking.send_signal(number)
    assert checking.wait(60) == 128 + number
    assert json.loads(Path("out/check.json").read_text())["verdict"] == "incomplete"
    assert has_ended(int(Path("started").read_text()))
