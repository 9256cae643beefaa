"""What a proof commits to: hashes that hashlib makes from the files, and choices that follow."""

import hashlib
import sys
from importlib.metadata import PathDistribution
from random import Random

import pytest
from ledger_runs import chain_lines, make_facts, make_header

from lightning_d9m.engine.ledger.format.records import (
    Checkpoint,
    Digests,
    End,
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
    assert hash_package(installed)
    (installed._path / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    assert not hash_package(installed)
    (installed._path / "direct_url.json").unlink()
    (installed._path / "RECORD").write_text("own.pth,,\n")
    assert not hash_package(installed)


def test_segments_are_chosen_by_the_bytes_of_the_proof_and_a_number(tmp_path):
    proof, other = tmp_path / "proof.json", tmp_path / "other.json"
    proof.write_text("1")
    other.write_text("2")
    known = hashlib.sha256(f"{hashlib.sha256(b'1').hexdigest()} 7".encode()).hexdigest()
    drawn = [choose_segments(file, 7, range(1000), 10) for file in (proof, other)]
    assert drawn[0] == sorted(Random(int(known, 16)).sample(range(1000), 10)) != drawn[1]
    assert choose_segments(proof, None, [1, 2], 1) == [1, 2]


def write_run(folder, *records, **end):
    folder.mkdir()
    known = [make_header(), make_facts(), *records, End(**{"status": "finished", **end})]
    (folder / "rank-0.jsonl").write_bytes(chain_lines(map(encode_record, known)))
    return RecordedRun(folder)


def test_what_a_run_did_not_record_is_named(tmp_path):
    final = Digests(moment="final", epoch=0, step=3, totals={"weights": "0" * 32}, groups={})
    run = write_run(tmp_path / "fit-000", final)
    found = make_proof(run, [], tmp_path)[1].uncommitted
    assert {"training data", "state", "program", "validation data"} <= found.keys()
    with pytest.raises(SettingError, match="no SHA-256 of its final weights"):
        make_proof(run, [tmp_path / "model.ckpt"], tmp_path)


def test_the_first_state_after_a_checkpoint_needs_a_hash(tmp_path):
    """It ends a segment; later steps are only compared."""
    totals = dict.fromkeys(("data", "weights_sha256", "state_sha256"), "0" * 32)
    place = {"epoch": 0, "entries": {}}
    saved = Checkpoint(path="a.ckpt", epoch=0, step=3, batch=3)
    first = StepDigests(step=4, totals=totals, **place)
    second = StepDigests(step=5, totals={}, **place)
    final = Digests(moment="final", epoch=0, step=5, totals=totals, groups={})
    for number, records in enumerate([(first, second), (second, first)]):
        run = write_run(tmp_path / f"fit-00{number}", saved, *records, final)
        assert ("state" in make_proof(run, [], tmp_path)[1].uncommitted) == bool(number)


def test_a_run_that_failed_is_not_proved_and_an_environment_that_changed_is_named(tmp_path):
    failed = write_run(tmp_path / "fit-000", status="failed")
    with pytest.raises(SettingError, match="has not finished"):
        make_proof(failed, [], tmp_path)
    packages = {"absent": "1.0", "numpy": "0.1"}
    changed = Sources(program={}, named={}, packages=packages, used=("absent", "numpy"))
    _, proof = make_proof(write_run(tmp_path / "fit-001", changed), [], tmp_path)
    assert proof.unread["absent"] == "it is not installed here"
    assert "the training used 0.1, and here is" in proof.unread["numpy"]


def test_the_interpreter_hashes_its_own_pytest():
    assert hash_package(PathDistribution.from_name("pytest")), sys.path
