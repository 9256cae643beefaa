"""A part of a run that runs again: where it begins and ends, and what its comparison says."""

import json
import shlex
from pathlib import Path

import pytest
from ledger_runs import LedgerWriter, make_digests, make_facts, make_header

from lightning_d9m.engine.ledger.command import MAX_COMMAND
from lightning_d9m.engine.ledger.format.records import Checkpoint, End, Resume, StepDigests
from lightning_d9m.errors import CommandError, SettingError
from lightning_d9m.tools.cli.main import main
from lightning_d9m.tools.comparison.ledgers import compare
from lightning_d9m.tools.launch.runs import Runs
from lightning_d9m.tools.segments.segment import (
    RecordedRun,
    Segment,
    name_other_command,
    run_segment,
)

TOTALS = {"weights": 32 * "a"}


def step(number, **totals):
    return StepDigests(epoch=number // 23, step=number, totals=TOTALS | totals, entries={})


def write(folder, *records, program=None, **header):
    """Write a ledger; return its folder, and the chain hash of its last record."""
    folder = folder / "fit-000"
    folder.mkdir(parents=True)
    with LedgerWriter(folder / "rank-0.jsonl") as writer:
        writer.write(make_header(program=program or {}, **header))
        first = [record for record in records if isinstance(record, Resume)]
        for record in (*first, make_facts()):
            writer.write(record)
        for record in records:
            if not isinstance(record, Resume):
                writer.write(record)
        return folder, writer.chain_hash


def saved(number):
    path = f"../../step-{number}.ckpt"
    return Checkpoint(path=path, epoch=number // 23, step=number, batch=number % 23)


@pytest.fixture
def run(tmp_path):
    """Return the ledger of a run of 69 steps that saves at steps 20, 30 and 60."""
    return write(
        tmp_path / "run",
        make_digests("initial", 0),
        saved(20),
        step(21),
        make_digests("epoch", 0),
        saved(30),
        step(31),
        make_digests("epoch", 1),
        saved(60),
        step(61),
        make_digests("epoch", 2),
        make_digests("final", 2),
        End(status="finished", epoch=2, step=69),
    )[0]


def write_part(folder, *records, **words):
    """Write a segment from step 20, whose parent is not there."""
    begin = Resume(parent="gone", parent_check="0" * 16, epoch=0, step=20, batch=20)
    end = End(status="stopped", epoch=1, step=31, reason="the segment ends after step 31")
    words = {"program": {"segment": "until 31"}} | words
    return write(folder, begin, *records, end, **words)[0]


PART = (step(21), make_digests("epoch", 0), step(31))


def test_a_part_is_equal_to_its_steps(tmp_path, run, capsys):
    part = write_part(tmp_path / "part", *PART)
    for pair in ((run, part), (part, run)):
        assert main(["compare", *map(str, pair)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert said.startswith("equal: steps 20 to 31 of 0 to 69, 4 records bit for bit the same")


DIFFERENT = {
    "a state after a save": (step(21, weights=32 * "b"), *PART[1:]),
    "an epoch": (step(21), make_digests("epoch", 0, loss=(0.5).hex()), step(31)),
    "a record is missing within": (step(21), step(31)),
    "a record is added": (*PART[:2], make_digests("epoch", 1, step=30), step(31)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_part_that_differs(tmp_path, run, name):
    part = write_part(tmp_path / "part", *DIFFERENT[name])
    assert compare(run, part).verdict == compare(part, run).verdict == "different"


def test_a_part_of_which_nothing_was_compared_proves_nothing(tmp_path, run):
    assert compare(run, write_part(tmp_path / "part", step(22))).verdict == "not comparable"


def test_batches_that_only_the_part_has_do_not_extend_it(tmp_path, run):
    """A trace has probes of a step that the run has not recorded."""
    layout = {"kind": "layout", "id": 0, "places": [["weight", "a", 0]]}
    batch = {"kind": "probes", "epoch": 1, "step": 35, "batch": 12, "layout": 0}
    records = (*PART, layout, {**batch, "digests": b"x" * 16})
    part = write_part(tmp_path / "part", *records)
    assert compare(run, part).ranks[0].segment == (20, 31)


def test_a_run_that_was_cut_off_is_no_segment(tmp_path, run):
    part = write_part(tmp_path / "part", *PART, program={"command": "python train.py"})
    assert compare(run, part).verdict == "different"


def test_runs_with_different_probes_are_compared_in_what_both_have(tmp_path):
    probes = {"probes": "weight", "probe_modules": "*", "probe_steps": ""}
    settings = {"seed": 42, "per_sample_rng": False, "threads": None}
    layout = {"kind": "layout", "id": 0, "places": [["weight", "a", 0]]}
    batch = {"kind": "probes", "epoch": 0, "step": 0, "batch": 0, "layout": 0, "digests": b"x" * 16}
    first, *rest = make_digests("initial", 0), make_digests("final", 0), End(status="finished")
    one, _ = write(tmp_path / "a", first, *rest)
    words = {"settings": settings | probes}
    other, _ = write(tmp_path / "b", first, layout, batch, *rest, **words)
    assert compare(one, other).verdict == compare(other, one).verdict == "equal"


def test_segments_are_between_the_checkpoints_that_are_there(tmp_path, run):
    recorded = RecordedRun(run)
    assert [(own.step, own.is_there) for own in recorded.points] == [
        (20, False), (30, False), (60, False),
    ]  # fmt: skip
    assert recorded.list_segments() == [Segment(None, 70)]
    for number in (20, 60):
        (tmp_path / f"run/../step-{number}.ckpt").resolve().write_text("")
    recorded = RecordedRun(run)
    found = [(own.first, own.stop) for own in recorded.list_segments()]
    assert found == [(0, 21), (20, 61), (60, 70)]
    assert recorded.find_start(19) is None
    assert recorded.find_start(59).step == 20


def test_a_checkpoint_that_was_replaced_before_a_resume_from_an_earlier_step_is_gone(tmp_path):
    """Its file has the state of a step that the resumed run has left."""

    def save(number, name):
        return Checkpoint(path=f"../../{name}.ckpt", epoch=0, step=number, batch=number)

    saves = (save(5, "other"), save(10, "last"), save(20, "last"))
    first, check = write(tmp_path / "one", make_digests("initial", 0), *saves)
    begin = Resume(parent="../../one/fit-000", parent_check=check, epoch=0, step=15, batch=15)
    resumed, _ = write(tmp_path / "two", begin, step(16))
    for name in ("other", "last"):
        (tmp_path / f"{name}.ckpt").touch()
    found = [(own.step, own.is_there) for own in RecordedRun(resumed).points]
    assert found == [(5, True), (10, False)]
    assert RecordedRun(first).find_start(30).step == 20


def test_the_second_fit_of_a_program_cannot_be_run_in_parts(tmp_path):
    folder, _ = write(tmp_path / "run", make_digests("initial", 0), fit=1)
    with pytest.raises(SettingError, match="only the first fit can be run in parts"):
        RecordedRun(folder)


@pytest.mark.parametrize(
    ("ran", "given", "is_named"),
    [
        (["python", "a b.py", "x"], ["/usr/bin/python3", "a b.py", "x"], False),
        (["python", "a.py", "--lr", "1"], ["python", "a.py", "--lr", "10"], True),
        (["python", "a.py", "x" * 2000], ["python", "a.py", "x" * 2000], False),
        (["python", "a.py", "x" * 2000], ["python", "b.py", "x" * 2000], True),
    ],
)
def test_another_command_than_that_of_the_ledger_is_named(tmp_path, ran, given, is_named):
    """Its words may hold blanks, and a ledger has the beginning of a long one."""
    program = {"command": shlex.join(ran)[:MAX_COMMAND]}
    folder, _ = write(tmp_path / "run", make_digests("initial", 0), program=program)
    assert bool(name_other_command(RecordedRun(folder), given)) == is_named


COPY = """
import json, os, shutil, sys
from pathlib import Path
what = json.loads(sys.argv[1])
target = Path(os.environ["LIGHTNING_D9M_LEDGER_DIR"], "fit-000")
assert os.environ["LIGHTNING_D9M_INTERRUPT"] == "stop:31"
if what["ledger"]:
    shutil.copytree(what["ledger"], target)
for name in what["marks"]:
    Path(os.environ["LIGHTNING_D9M_CHECKPOINT_DIR"], name).write_text("")
"""


@pytest.mark.parametrize(
    ("ledger", "marks", "begin", "error"),
    [
        ("part", ["killed"], 20, None),
        ("part", [], 20, "its first fit did not reach step 31"),
        ("part", ["killed", "several"], 20, "Two processes of the command begin a first fit"),
        ("run", ["killed"], 20, "The program did not resume from"),
        ("", ["killed"], 20, "wrote no ledger"),
        ("part", ["killed"], 0, "The program resumed from a checkpoint by itself"),
    ],
)
def test_a_program_that_does_not_run_the_segment_is_an_error(
    tmp_path, run, forking_python, ledger, marks, begin, error
):
    paths = {"": "", "run": str(run), "part": str(write_part(tmp_path / "part", *PART))}
    what = json.dumps({"ledger": paths[ledger], "marks": marks})
    (tmp_path / "copy.py").write_text(COPY)
    (tmp_path / "out").mkdir()
    start = (tmp_path / "step-20.ckpt").resolve()
    start.write_text("")
    point = RecordedRun(run).find_start(begin)
    assert point is None or point.path == Path(start)
    runs = Runs([forking_python, str(tmp_path / "copy.py"), what], tmp_path / "out")
    if error is None:
        done = run_segment(runs, Segment(point, 31), "segment", "segment")
        assert RecordedRun(run).compare(done).verdict == "equal"
        return
    with pytest.raises(CommandError, match=error):
        run_segment(runs, Segment(point, 31), "segment", "segment")
