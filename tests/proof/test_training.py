"""What a proof commits to: hashes that hashlib makes from the files, and choices that follow."""

import hashlib
import json
import sys
from importlib.metadata import PathDistribution
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
from lightning_d9m.errors import SettingError
from lightning_d9m.tools.proof.training import choose_segments, hash_package, make_proof
from lightning_d9m.tools.segments.segment import RecordedRun


@pytest.fixture
def package(tmp_path):
    """Return an installed package, and the file that is its content."""
    folder = tmp_path / "own-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: own\nVersion: 1.0\n")
    (folder / "RECORD").write_text(
        "own.py,,\nown-1.0.dist-info/RECORD,,\n../bin/own,,\nown.pyc,,\n"
    )
    (tmp_path / "own.py").write_text("x = 1\n")
    return PathDistribution(folder), tmp_path / "own.py"


def test_a_package_is_hashed_by_its_content(package):
    installed, file = package
    own = hashlib.sha256(b"x = 1\n").hexdigest()
    assert hash_package(installed) == hashlib.sha256(f"own.py {own}\n".encode()).hexdigest()
    file.write_text("x = 2\n")
    assert hash_package(installed) != hashlib.sha256(f"own.py {own}\n".encode()).hexdigest()
    file.unlink()
    assert len(hash_package(installed)) == 64
    (installed._path / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    assert "it lists no files" in hash_package(installed)
    (installed._path / "direct_url.json").unlink()
    (installed._path / "RECORD").write_text("own-1.0.dist-info/RECORD,,\n")
    assert "it lists no files" in hash_package(installed)


def test_segments_are_chosen_by_the_bytes_of_the_proof_and_a_number(tmp_path):
    proof, other = tmp_path / "proof.json", tmp_path / "other.json"
    proof.write_text("1")
    other.write_text("2")
    known = hashlib.sha256(f"{hashlib.sha256(b'1').hexdigest()} 7".encode()).hexdigest()
    drawn = [choose_segments(file, 7, range(1000), 10) for file in (proof, other)]
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


def test_a_run_that_failed_is_not_proved_and_an_environment_that_changed_is_named(tmp_path):
    failed = write_run(tmp_path / "fit-000", status="failed")
    with pytest.raises(SettingError, match="has not finished"):
        make_proof(failed, [], tmp_path)
    changed = Sources(program={}, named={}, packages={"numpy": "0.1"}, used=("numpy",))
    run = write_run(tmp_path / "fit-001", make_final(**TOTALS), changed)
    said = make_proof(run, [], tmp_path).predicate.packages
    assert "the training used 0.1, and here is" in said["numpy"]


def test_a_broken_installation_hides_no_package(tmp_path, monkeypatch):
    (tmp_path / "pytest-0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    used = Sources(program={}, named={}, packages={"pytest": pytest.__version__}, used=("pytest",))
    run = write_run(tmp_path / "fit-001", make_final(**TOTALS), used)
    assert len(make_proof(run, [], tmp_path).predicate.packages["pytest"]) == 64


def test_the_interpreter_hashes_its_own_pytest():
    assert len(hash_package(PathDistribution.from_name("pytest"))) == 64, sys.path
