"""What a proof commits to: hashes that hashlib makes from the files, and choices that follow."""

import hashlib
import json
import sys
from importlib import invalidate_caches
from random import Random

import pytest
from ledger_runs import chain_lines, make_facts, make_header

from lightning_d9m.engine.ledger.format.records import (
    Checkpoint,
    Digests,
    End,
    Resume,
    Sources,
    StepDigests,
    encode_record,
)
from lightning_d9m.engine.recording.commitment import list_packages
from lightning_d9m.errors import SettingError
from lightning_d9m.tools.proof import training
from lightning_d9m.tools.proof.training import (
    _find_unit,
    choose_segments,
    hash_tree,
    make_proof,
    open_proof,
    read_statement,
    write_statement,
)
from lightning_d9m.tools.segments.segment import RecordedRun


def test_a_package_is_hashed_by_all_that_python_may_load_of_it(tmp_path):
    folder = tmp_path / "own"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "core.py").write_text("x = 1\n")
    (folder / "__pycache__/core.pyc").write_bytes(b"")
    core = hashlib.sha256(b"x = 1\n").hexdigest()
    known = hashlib.sha256(f"own/core.py {core}\n".encode()).hexdigest()
    assert hash_tree(folder) == known
    assert hash_tree(folder / "core.py") == hashlib.sha256(f"core.py {core}\n".encode()).hexdigest()
    (folder / "core").mkdir()
    (folder / "core/__init__.py").write_text("x = 99\n")  # which hides the file
    assert hash_tree(folder) != known


def test_segments_are_chosen_by_the_bytes_of_the_proof_and_a_number():
    proof, other = (hashlib.sha256(content).hexdigest() for content in (b"1", b"2"))
    known = hashlib.sha256(f"{proof} 7".encode()).hexdigest()
    drawn = [choose_segments(digest, 7, range(1000), 10) for digest in (proof, other)]
    assert drawn[0] == sorted(Random(int(known, 16)).sample(range(1000), 10)) != drawn[1]


def write_run(folder, *records, first=None, **end):
    folder.mkdir()
    known = [make_header(), *([first] if first else []), make_facts(), *records]
    known.append(End(**{"status": "finished", **end}))
    (folder / "rank-0.jsonl").write_bytes(chain_lines(map(encode_record, known)))
    return RecordedRun(folder)


TOTALS = dict.fromkeys(("data", "weights_sha256", "state_sha256"), "0" * 32)
PROGRAM = Sources(program={}, named={}, packages={}, used=())


def make_final(**totals):
    return Digests(moment="final", epoch=0, step=5, totals=totals, groups={})


def test_the_first_state_after_a_checkpoint_needs_a_hash_and_the_last_one(tmp_path):
    """They end a segment, also of a run that another one continues; later steps are compared."""
    saved = Checkpoint(path="a.ckpt", epoch=0, step=3, batch=3)
    first = StepDigests(step=4, totals=TOTALS, epoch=0, entries={})
    second = StepDigests(step=5, totals={}, epoch=0, entries={})
    final = make_final(**TOTALS)
    wrong = [(saved, second, first, final), (saved, first, make_final(data="0" * 32))]
    for number, records in enumerate([(saved, first, second), (saved, first, final, second)]):
        run = write_run(tmp_path / f"fit-10{number}", *records, PROGRAM)
        with pytest.raises(SettingError, match="has not finished"):
            make_proof(run, [], tmp_path)
    for number, records in enumerate(wrong):
        run = write_run(tmp_path / f"fit-00{number}", *records, PROGRAM)
        with pytest.raises(SettingError, match="was not recorded for a proof throughout"):
            make_proof(run, [], tmp_path)
    check = json.loads((tmp_path / "fit-000/rank-0.jsonl").read_text().splitlines()[-1])["check"]
    resume = Resume(parent="../fit-000", parent_check=check, epoch=0, step=5, batch=5)
    resumed = write_run(tmp_path / "fit-008", final, PROGRAM, first=resume)
    with pytest.raises(SettingError, match="was not recorded for a proof throughout"):
        make_proof(resumed, [], tmp_path)
    right = write_run(tmp_path / "fit-009", saved, first, second, final, PROGRAM)
    uncommitted = make_proof(right, [], tmp_path).predicate.uncommitted
    assert uncommitted["1 checkpoint"] == "removed or replaced since: step 3"
    assert uncommitted["program"] == "it is not in a file"


def test_a_proof_of_a_thousand_epochs_is_small(tmp_path):
    """With a checkpoint for each tenth, and all packages of a large environment."""
    packages = {f"package-{number}": "1.0.0 py3-none-any" for number in range(300)}
    used = tuple(f"package_{number}" for number in range(300))
    records = []
    for epoch in range(1000):
        place = {"epoch": epoch, "step": epoch}
        records.append(Digests(moment="epoch", totals=TOTALS, groups={}, **place))
        if epoch % 10 == 0:
            (tmp_path / f"epoch={epoch}-step={epoch}.ckpt").touch()
            path = f"../epoch={epoch}-step={epoch}.ckpt"
            records.append(Checkpoint(path=path, batch=epoch, **place))
            records.append(StepDigests(totals=TOTALS, entries={}, **place))
    sources = Sources(program={}, named={}, packages=packages, used=used)
    run = write_run(tmp_path / "fit-000", *records, make_final(**TOTALS), sources)
    write_statement(tmp_path / "proof.json", make_proof(run, [], tmp_path), None)
    assert len(read_statement(tmp_path / "proof.json", training.Proof, None).subject) == 101
    assert (tmp_path / "proof.json").stat().st_size < 100_000


def test_a_run_that_failed_is_not_proved_and_an_environment_that_changed_is_named(tmp_path):
    failed = write_run(tmp_path / "fit-000", status="failed")
    with pytest.raises(SettingError, match="has not finished"):
        make_proof(failed, [], tmp_path)
    changed = Sources(
        program={}, named={}, packages={"numpy": "0.1"}, used=("numpy",), gaps={"a": "b"}
    )
    run = write_run(tmp_path / "fit-001", make_final(**TOTALS), changed)
    said = make_proof(run, [], tmp_path).predicate
    assert "the training used 0.1, and here is" in said.packages["numpy"]
    assert said.uncommitted["a"] == "b"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a package of two files with a version and a tag."""
    folder = tmp_path / "site-packages"
    (folder / "own").mkdir(parents=True)
    (folder / "broken-0.dist-info").mkdir()
    monkeypatch.syspath_prepend(folder)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/own").write_text("a command of the package")
    monkeypatch.syspath_prepend(tmp_path / "bin")

    def install(version, tag, text="x = 1"):
        info = folder / "own-1.dist-info"
        info.mkdir(exist_ok=True)
        (folder / "own/__init__.py").write_text(text)
        (info / "METADATA").write_text(f"Name: own\nVersion: {version}\n")
        (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")
        (info / "RECORD").write_text("own/__init__.py,,\n")
        list_packages.cache_clear()

    yield install
    list_packages.cache_clear()


def test_what_a_segment_has_loaded_is_compared_with_the_run(tmp_path):
    """Of a file that the run has changed nothing is known, and of no record nothing is right."""
    one, two = "1" * 64, "2" * 64
    known = {
        "program": {"a.py": one},
        "named": {"b": one},
        "gaps": {"file log": "", "file a.py": ""},
    }
    run = write_run(tmp_path / "fit-000", Sources(**known, packages={}, used=()))
    for number, (program, named, other) in enumerate(
        (
            ({"a.py": one}, {"b": one, "log": two}, []),
            ({"a.py": two}, {"b": two}, ["a.py", "b"]),
            ({"a.py": one, "c.py": one}, {"a.py": one}, ["c.py"]),
        )
    ):
        own = Sources(program=program, named=named, packages={}, used=("whole",))
        part = write_run(tmp_path / f"fit-01{number}", own).ledger
        assert run.list_other_code(part) == other
    assert run.list_other_code(write_run(tmp_path / "fit-020").ledger) == ["it has no record of it"]
    assert write_run(tmp_path / "fit-021").list_other_code(part) == []


def test_a_package_is_found_as_python_finds_it(tmp_path, monkeypatch):
    """A folder without __init__.py hides nothing, and a package hides a module."""
    for name in ("first/own/log.txt", "first/a/x", "second/own/__init__.py", "second/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "second/space/inner").mkdir(parents=True)
    (tmp_path / "second/space/inner/__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / own) for own in ("first", "second")])
    found = {name: _find_unit(name) for name in ("own", "a.py", "space/inner", "space", "..", "")}
    expected = {"own": "own", "a.py": "a.py", "space/inner": "space/inner"}
    known = {name: tmp_path / "second" / own for name, own in expected.items()}
    assert found == known | dict.fromkeys(("space", "..", ""))
    (tmp_path / "first/a/__init__.py").touch()
    invalidate_caches()
    assert _find_unit("a.py") == tmp_path / "first/a"


def test_a_package_counts_for_the_platform_that_its_wheel_names(tmp_path, monkeypatch, installed):
    """Not for one kernel, as a stack names it: that of a stranger is another one."""
    installed("1.0", "py3-none-linux")
    known = list_packages(tuple(sys.path))
    assert known["own"] == "1.0 py3-none-linux"
    run = write_run(
        tmp_path / "fit-000",
        make_final(**TOTALS),
        Sources(program={}, named={}, packages=known, used=("own", "../own", "/", "gone")),
    )
    proof = make_proof(run, [], tmp_path)
    assert proof.predicate.packages["own"] == hash_tree(tmp_path / "site-packages/own")
    none = dict.fromkeys(("../own", "/", "gone"), "it is not here")
    assert proof.predicate.packages == {"own": proof.predicate.packages["own"], **none}
    write_statement(tmp_path / "proof.json", proof, None)
    stack = training.capture_stack()
    monkeypatch.setattr(training, "capture_stack", lambda: {**stack, "os.release": "other"})

    def check():
        report = open_proof(tmp_path / "proof.json", None)[1]
        return report.problems, report.notes[0]

    assert check()[0] == []
    installed("1.0", "py3-none-linux", "x = 2")
    assert check()[0] == ["The package own is not here as the proof has it."]
    for other in (("1.0", "py3-none-mac"), ("1.1", "py3-none-linux")):
        installed(*other)
        problems, note = check()
        assert problems == []
        said = f"own: the training used 1.0 py3-none-linux, and here is {' '.join(other)}"
        assert note.startswith(f"Results here may differ, as the stack does: {said}")
