"""``d9m check`` rejects runs that a program with one thing wrong has made, and names the place.

The programs are processes; ``benchmarks/segments/`` has more kinds of wrong runs.
"""

import json
import os
import py_compile
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode
from types import SimpleNamespace

import pytest
from ledger_runs import chain_lines, make_facts, make_header, make_weights, write_rank

from lightning_d9m.engine.ledger.command import SEGMENT
from lightning_d9m.engine.ledger.folder import create_ledger_folder, rank_path, read_ledger
from lightning_d9m.engine.ledger.format.records import (
    Checkpoint,
    End,
    Resume,
    StepDigests,
    encode_record,
)
from lightning_d9m.errors import CommandError, LedgerError
from lightning_d9m.tools.launch.runs import RunResult, Runs
from lightning_d9m.tools.segments.check import (
    COMPILED,
    CheckedSegment,
    CheckReport,
    _link,
    check_segment,
    compile_again,
    follow_run,
)
from lightning_d9m.tools.segments.segment import RecordedRun, Segment

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/support/checked_training.py"
sys.path.insert(0, str(ROOT / "benchmarks/segments"))

import wrong_runs as measured  # noqa: E402 - benchmarks are not installed


@pytest.fixture(scope="module")
def made(tmp_path_factory, forking_python):
    """Return a function that returns a copy of a run that is wrong in some way; it trains once."""
    folder = tmp_path_factory.mktemp("runs")

    def make(name, copy=None):
        path = folder / (name.replace(" ", "-") or "honest")
        if not path.exists():
            measured.publish(forking_python, path, name)
        return (path if copy is None else Path(shutil.copytree(path, copy))) / "run"

    return make


@pytest.fixture
def check(d9m, forking_python, tmp_path, monkeypatch):
    """Return a function that checks a run with the honest program, and returns its segments."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)

    def run(folder, *options):
        words = ("--", forking_python, PROGRAM, tmp_path / "again")
        status, out, errors = d9m("check", folder, *options, "--json", *words)
        assert out, errors
        found = json.loads(out)
        return status, {own["number"]: own for own in found["checked"]}, found

    return run


def test_an_honest_run_is_equal_with_jobs_at_once(check, made, tmp_path):
    before = {file: file.read_bytes() for file in made("").rglob("*") if file.is_file()}
    status, segments, found = check(made(""), "--segments", "all", "--jobs", "2", "-o", "out")
    assert status == 0, found
    assert [(own["first"], own["last"]) for own in segments.values()] == [
        (0, 15), (15, 30), (30, 45), (45, 60),
    ]  # fmt: skip
    assert found["share"] == 1.0
    assert found["missed"] is None
    assert json.loads((tmp_path / "out/check.json").read_text()) == found
    # A segment writes no checkpoints, and none of the run's files.
    assert {file: file.read_bytes() for file in made("").rglob("*") if file.is_file()} == before


def test_a_flipped_bit_is_in_the_segment_of_its_step(check, made):
    status, segments, found = check(made("weight bit"), "--only", "0,1,2")
    assert status == 1
    assert [own["verdict"] for own in segments.values()] == ["equal", "persistent", "equal"]
    assert segments[1]["equal_until"] == 20
    assert segments[1]["where"] == "the state after step 31 (epoch 1)"
    assert found["steps"] == 30


@pytest.mark.parametrize("name", ["early end", "extra step"])
def test_a_run_that_ends_elsewhere_differs_in_its_last_segment(check, made, name):
    number = "4" if name == "extra step" else "3"
    status, segments, _ = check(made(name), "--only", number)
    assert (status, segments[int(number)]["verdict"]) == (1, "persistent")
    assert "step" in segments[int(number)]["where"]


@pytest.mark.parametrize(
    ("name", "number", "reason"),
    [
        ("ulp in a checkpoint", 2, "the checkpoint or this machine is wrong"),
        ("checkpoint of another run", 2, "another run has saved it"),
        ("checkpoint of another step", 2, "this one at another step"),
        ("final digest edited", 3, "the ledger, the checkpoint"),
        ("records removed", 2, "the ledger, the checkpoint"),
    ],
)
def test_changed_files_are_found(check, made, tmp_path, name, number, reason):
    folder = made("", tmp_path / "copy")
    measured.list_edits(made("rate").parent)[name](folder.parent)
    status, segments, _ = check(folder, "--only", str(number))
    assert status == 1
    assert reason in segments[number]["reason"]


def test_a_removed_checkpoint_belongs_to_the_segment_before(check, made, tmp_path):
    folder = made("", tmp_path / "copy")
    (folder / "saved/step=30.ckpt").unlink()
    status, segments, found = check(folder, "--only", "1")
    assert (status, segments[1]["first"], segments[1]["last"]) == (0, 15, 45)
    assert "step=30.ckpt" in found["limits"][0]


@pytest.mark.parametrize("wrong", ["", "gradient bit"])
def test_a_training_is_followed_while_it_runs(wrong, forking_python, d9m, tmp_path, monkeypatch):
    """A bit of a gradient that the training alone flips is in the segment of its step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    words = [forking_python, str(PROGRAM)]
    # An honest one keeps the last checkpoint alone: links hold the others until they are used.
    given = {"KEPT": "-1", "WRONG": wrong} if wrong else {"SLOW": "0.05", "KEPT": "1"}
    variables = {**os.environ, **given}
    with subprocess.Popen([*words, "run"], env=variables, stderr=subprocess.DEVNULL) as training:
        while not list(tmp_path.glob("run/fit-000/*")):
            assert training.poll() is None
        status, out, errors = d9m("check", "run", "--follow", "--json", "--", *words, "again")
    assert status == bool(wrong), errors
    found = json.loads(out)
    assert found["segments"] == len(found["checked"])
    assert found["share"] == (0.75 if wrong else 1.0)  # of what is equal
    differing = [own["first"] for own in found["checked"] if own["verdict"] != "equal"]
    assert differing == [15] * bool(wrong)
    # What is needed to examine a difference stays.
    assert bool(list(tmp_path.glob("d9m-runs/*/checkpoints"))) == bool(wrong)


def write_steps(folder, *steps, begin=(), end=()):
    """Write a ledger beside the checkpoints of some steps, each with the state of the next step."""
    records = [make_header(), *begin, make_facts()]
    for step in steps:
        (folder.parent / f"{step}.ckpt").touch()
        place = {"epoch": 0, "step": step, "batch": step}
        records.append(Checkpoint(path=f"../{step}.ckpt", **place))
        records.append(StepDigests(epoch=0, step=step + 1, totals={}, entries={}))
    folder.mkdir(exist_ok=True)
    path = rank_path(folder, 0)
    path.write_bytes(chain_lines(map(encode_record, [*records, *end])))
    return path


def test_no_step_is_left_out_if_a_checkpoint_cannot_be_linked(tmp_path, monkeypatch):
    """That of step 30 is there at first, and the run removes it later."""
    folder, removed, found = tmp_path / "fit-000", tmp_path / "30.ckpt", []

    def grow(*_):
        write_steps(folder, 15, 30, 45, end=[End(status="finished")])
        removed.unlink()

    def check(_, segment):
        found.append((segment.first, segment.stop))
        if segment.first == 15:
            grow()
        return CheckedSegment(segment.number, 0, 0)

    write_steps(folder, 15, 30)
    os.utime(removed, (2**33, 2**33))  # as if it were written again
    monkeypatch.setattr("time.sleep", grow)
    follow_run(folder, tmp_path / "links", check, None)
    assert found == [(0, 16), (15, 46), (45, 46)]


def test_the_last_segment_of_a_killed_run_is_checked_too(tmp_path):
    state = StepDigests(epoch=0, step=9, totals={}, entries={})
    write_steps(tmp_path / "fit-000", end=[state])
    found = []

    def check(_, segment):
        found.append((segment.first, segment.stop))
        return CheckedSegment(segment.number, 0, 0)

    follow_run(tmp_path / "fit-000", tmp_path / "links", check, 0.01)
    assert found == [(0, 9)]


@pytest.mark.parametrize("error", [CommandError, LedgerError])
def test_what_ends_one_segment_is_its_result(error):
    def fail(*_, **__):
        raise error("No space left on device.")

    known, recorded = CheckedSegment(3, 0, 1), SimpleNamespace(run=fail, sources=None)
    found = check_segment(recorded, None, Segment(None, 1), known, 1, "segment 3")
    assert (found.number, found.verdict) == (3, "failed")
    assert found.reason == "No space left on device."


def test_a_segment_of_a_provable_run_compiles_its_own_code(monkeypatch, tmp_path):
    """All segments of a check share it, also those in its jobs."""
    given = []

    def run(*_, variables, **__):
        given.append(variables.get("PYTHONPYCACHEPREFIX"))
        raise CommandError("")

    known = CheckedSegment(3, 0, 1)
    for sources in (None, *[SimpleNamespace(used=())] * 2):
        recorded = SimpleNamespace(run=run, sources=sources)
        check_segment(recorded, Runs([], tmp_path), Segment(None, 1), known, 1, "segment 3")
        monkeypatch.setenv(COMPILED, "shared" * len(given[1:]))
    assert given == [None, str(tmp_path / "compiled"), "shared"]
    assert (tmp_path / "compiled").exists()
    with CheckReport(str(tmp_path)).kept(tmp_path / "links", lambda: None):
        pass
    assert not (tmp_path / "compiled").exists()


@pytest.mark.parametrize(
    "mode", [PycInvalidationMode.UNCHECKED_HASH, PycInvalidationMode.TIMESTAMP]
)
@pytest.mark.parametrize("name", ["own.py", "site-packages/package/__init__.py"])
def test_compiled_code_that_a_source_does_not_give_is_not_run(tmp_path, monkeypatch, name, mode):
    """Neither of the program nor of a package; and what one segment compiles, the next one uses."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), f"{tmp_path}/site-packages"]))
    source = tmp_path / name
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("x = 11\n")
    module = source.parent.name if source.name == "__init__.py" else source.stem
    other = tmp_path / "other"
    other.write_text("x = 99\n")
    os.utime(other, ns=(source.stat().st_mtime_ns,) * 2)
    py_compile.compile(
        str(other), cache_from_source(str(source)), str(source), invalidation_mode=mode
    )

    def run(variables):
        words = [sys.executable, "-c", f"import {module} as own; print(own.x, own.__cached__)"]
        environment = {**os.environ, **variables}
        said = subprocess.check_output(words, env=environment, text=True, cwd=tmp_path)
        return said.split()

    assert run({})[0] == "99"
    variables = compile_again(tmp_path, [module, "../other"])
    value, compiled = run(variables)
    assert (value, tmp_path / "compiled" in Path(compiled).parents) == ("11", True)
    Path(compiled).write_bytes(Path(cache_from_source(str(source))).read_bytes())
    assert run(variables)[0] == "99"


def test_what_is_compiled_of_an_installed_package_is_used(tmp_path, monkeypatch):
    """If its source is as it was; not what a wheel may have brought, or a link leads to."""
    root = tmp_path / "installed"
    monkeypatch.setattr("site.getsitepackages", lambda: [str(root)])
    monkeypatch.setenv("PYTHONPATH", str(root))
    (tmp_path / "other").write_text("x = 99\n")
    modes = PycInvalidationMode
    for name, mode in (
        ("own/a.py", modes.TIMESTAMP),
        ("own/b.py", modes.CHECKED_HASH),
        ("own/c.py", modes.UNCHECKED_HASH),
        ("own/d.py", modes.TIMESTAMP),
        ("loose.py", modes.TIMESTAMP),
        ("unused/a.py", modes.TIMESTAMP),
        ("../published/a.py", modes.TIMESTAMP),
    ):
        source = root / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("x = 11\n")
        text = source if mode == modes.TIMESTAMP else tmp_path / "other"
        cached = cache_from_source(str(source))
        py_compile.compile(str(text), cached, str(source), invalidation_mode=mode)
    (root / "linked").symlink_to(tmp_path / "published")
    (root / "own/d.py").write_text("x = 111\n")
    used = ["own", "loose.py", "linked", "../published"]
    variables = compile_again(tmp_path, used)
    code = "from own import a, b, c, d; import loose, linked.a, unused.a\n"
    code += "print(a.x, b.x, c.x, d.x)\n"
    code += "for own in (a, b, c, d, loose, linked.a, unused.a): print(own.__cached__)"
    before = {own: own.stat().st_ino for own in (tmp_path / "compiled").rglob("*.pyc")}
    words = [sys.executable, "-c", code]
    said = subprocess.check_output(words, env={**os.environ, **variables}, text=True)
    values, *files = said.splitlines()
    assert values == "11 11 11 111"
    compiled = [Path(own) for own in files]
    kept = [before.get(own) == own.stat().st_ino for own in compiled]
    assert kept == [True, False, False, False, True, False, False]


def test_runs_of_a_segment_that_end_at_different_steps_do_not_agree(tmp_path, monkeypatch):
    """Each of them ends before the run, and the first end is named."""

    def write(epochs, **words):
        states = [make_weights("epoch", epoch, {"w": "0" * 32}) for epoch in range(epochs)]
        records = [make_facts(), *states, make_weights("final", epochs - 1, {"w": "0" * 32})]
        return write_rank(create_ledger_folder(tmp_path), records, **words)

    parts = (read_ledger(write(epochs, program={SEGMENT: "until 28"})) for epochs in (1, 2))
    runs = (RunResult({"fit-000": part}) for part in parts)
    name = "lightning_d9m.tools.segments.segment.run_segment"
    monkeypatch.setattr(name, lambda *_, **__: next(runs))
    recorded, known = RecordedRun(write(3)), CheckedSegment(0, 0, 27)
    found = check_segment(recorded, None, Segment(None, 28), known, 27, "segment 0")
    assert found.where == "the end of the fit (epoch 0, step 9)"
    assert found.verdict == "program"


def test_checkpoints_before_a_difference_are_kept_and_others_removed(tmp_path):
    """Each is a file or a folder; a folder that nothing is left in goes, too."""
    folder = tmp_path / "links"
    for name in ("15-last.ckpt", "30-step=[30].ckpt", "45-last.ckpt/rank-0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    report = CheckReport(str(tmp_path))
    for verdict, left in (("persistent", ["30-step=[30].ckpt"]), ("equal", [])):
        place = str(folder / "30-step=[30].ckpt")
        report.checked = [CheckedSegment(1, 30, 45, verdict, checkpoint=place)]
        with report.kept(folder, lambda: None):
            pass
        assert [path.name for path in folder.glob("*")] == left
    assert not folder.exists()


def test_a_check_that_ends_before_its_first_segment_is_shown(tmp_path):
    report, shown = CheckReport(str(tmp_path)), []
    with pytest.raises(KeyboardInterrupt), report.kept(tmp_path / "links", lambda: shown.append(1)):
        raise KeyboardInterrupt
    assert (shown, report.verdict) == ([1], "incomplete")


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_file_that_may_be_of_a_later_checkpoint_is_not_linked(tmp_path, is_folder):
    """Its record is still to come when the ledger was last written before it."""
    path, target = tmp_path / "last.ckpt", tmp_path / "links/20-last.ckpt"
    file = path / "rank-0" if is_folder else path
    file.parent.mkdir(exist_ok=True)
    file.touch()
    os.utime(file, ns=(2000, 2000))
    assert not _link(path, target, 1999)
    assert not target.exists()
    for before in (2000, None):
        assert _link(path, target, before)
        assert (target / "rank-0" if is_folder else target).samefile(file)
        shutil.rmtree(tmp_path / "links")


def test_what_a_resumed_run_has_left_is_not_part_of_it(tmp_path):
    """Its first part had come to step 60 when it was killed, and it resumed from step 40."""
    first = write_steps(tmp_path / "fit-000", 20, 40, 60)
    check = json.loads(first.read_text().splitlines()[5])["check"]
    begin = Resume(parent="../fit-000", parent_check=check, epoch=0, step=40, batch=40)
    recorded = RecordedRun(write_steps(tmp_path / "fit-001", 55, begin=[begin]).parent)
    found = [(own.first, own.stop) for own in recorded.list_segments()]
    assert found == [(0, 21), (20, 41), (40, 56), (55, 56)]
    assert (recorded.last_step, recorded.end) == (56, None)
