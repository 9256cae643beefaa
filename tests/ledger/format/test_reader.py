"""Reading ledgers: whatever is not an unedited ledger gets one clear error.

Ledgers of resumed runs are read as one run, and say where it was interrupted.
"""

import os
from base64 import b64encode

import fuzz_ledger
import pytest
from ledger_runs import (
    LedgerWriter,
    chain_lines,
    find_breaks,
    make_facts,
    make_header,
    make_probes,
    make_weights,
    write_lines,
)

from lightning_d9m.engine.ledger.folder import rank_path, read_ledger
from lightning_d9m.engine.ledger.format import reader as rank_file
from lightning_d9m.engine.ledger.format.reader import holds_record
from lightning_d9m.engine.ledger.format.records import Digests, End
from lightning_d9m.errors import LedgerError
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.output.comparison_text import format_comparison


def read(path, rank=0):
    return list(read_ledger(path).records(rank))


def test_a_ledger_is_found_by_any_of_its_names(runs, tmp_path):
    """A fit folder, a folder with one, or a file, whose copy may be called anything."""
    folder = runs.write(world_size=3)
    (tmp_path / "above").mkdir()
    folder = folder.rename(tmp_path / "above" / "fit-000")
    for path in (tmp_path, tmp_path / "above", folder, str(folder / "rank-0.jsonl")):
        assert read(path) == runs.records(world_size=3)[1:]
    assert read_ledger(tmp_path).path == folder
    rank_path(folder, 2).rename(tmp_path / "reference.jsonl")
    assert list(read_ledger(tmp_path / "reference.jsonl").files) == [2]


def test_ranks_whose_files_are_elsewhere(runs):
    """Machines without a common disk keep their own ranks."""
    folder = runs.write(world_size=3)
    rank_path(folder, 0).unlink()
    ledger = read_ledger(folder)
    assert list(ledger.files) == [1, 2]
    with pytest.raises(LedgerError, match=r"has no file of rank 0; it has rank 1, 2\."):
        ledger.open(0)


def test_the_ledger_that_is_being_written_does_not_count(runs, tmp_path):
    """A reference may be named by the folder that the new ledger goes to."""
    older, newer = runs.write(), runs.write()
    assert read_ledger(tmp_path, ignoring=newer).path == older


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", r"The ledger .*/gone cannot be opened: No such file or directory\."),
        ("a\0b", "embedded null"),
        ("circle", "Its symbolic links lead in a circle"),
        ("empty", "holds no ledger: there is no file"),
        # The run in its fit folder was ended before it wrote.
        (".", "holds no ledger: there is no file"),
        # A pipe would block, a device would never end.
        ("pipe", "is not a regular file"),
        ("/dev/zero", "is not a regular file"),
    ],
)
def test_a_place_without_a_ledger(tmp_path, name, message):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "empty").mkdir()
    (tmp_path / "fit-000").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LedgerError, match=message):
        read_ledger(tmp_path / name)


def test_several_fits_are_listed(runs, tmp_path):
    for _ in range(5):
        runs.write(epochs=1)
    with pytest.raises(LedgerError, match=r"holds 5 ledgers: .*, .*, \.\.\.\. Name one"):
        read_ledger(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, r"was written by rank 0, not by rank 1\. It was renamed"),
        ({"seed": 43}, r"their seed differs \(42 and 43\)"),
        ({"fit": 1}, r"their fit differs \(0 and 1\)"),
        ({"world_size": 3}, r"their world_size differs \(2 and 3\)"),
    ],
)
def test_ranks_of_different_runs(runs, changes, message):
    folder = runs.write(
        world_size=2, edit=lambda rank, records: rank and records[0].update(changes)
    )
    with pytest.raises(LedgerError, match=message):
        read_ledger(folder)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends within its first record"),
        (b'{"kind":"header","sch', "ends within its first record: the run was killed while"),
        (b"hello\n", "is not a ledger: it begins with 'hello"),
        (b"\x80\x04\x95pickle\x00\xff\xfe", "is not a ledger: it begins with"),
        (b"[]\n", "is not a ledger"),
        (b'{"kind":"header","x":' + b"[" * 100_000 + b"\n", "is not a ledger"),
        (b'{"kind":"header",' + b"x" * 2**20, "first line of more than 1048576 bytes"),
        (chain_lines([b'{"kind":"end","status":"failed"}']), "is not a ledger: it begins with"),
        (chain_lines([b'{"kind":"header","schema":1}']), "required field `package`"),
        (chain_lines([b'{"kind":"header","schema":1,"package":""}']), "required field `rank`"),
        (chain_lines([b'{"kind":"header",nonsense}']), "first record that is not a header"),
        (b'{"kind":"header","\xff":1}' + b"\n" * 30, "is not a ledger"),
    ],
)
def test_a_file_that_is_no_ledger(tmp_path, data, message):
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(data)
    with pytest.raises(LedgerError, match=message) as caught:
        read_ledger(tmp_path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("schema", [2, 2**40])
@pytest.mark.parametrize("unknown_form", [False, True])
def test_a_schema_of_another_version(runs, tmp_path, schema, unknown_form):
    """The version that can read it is named, also when its header has another form."""
    record = runs.header(schema=schema, package="7.0.0").as_record()
    if unknown_form:
        del record["world_size"]
    write_lines(tmp_path / "rank-0.jsonl", [record])
    with pytest.raises(LedgerError) as caught:
        read_ledger(tmp_path)
    assert (
        f"has schema {schema}; the lightning_d9m that is installed reads schema 1. It was written "
        "by lightning_d9m '7.0.0': install that version" in str(caught.value)
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: lines.pop(2), "line 3 does"),
        (lambda lines: lines.insert(3, lines.pop(4)), "line 4 does"),
        (lambda lines: lines.pop(0), "is not a ledger"),
        (lambda lines: lines.__setitem__(-1, lines[-1].replace(b"finish", b"fail")), "line 8 "),
        (
            lambda lines: lines.__setitem__(4, lines[4].replace(b'"step":46', b'"step":47')),
            "line 5 ",
        ),
    ],
    ids=["removed", "swapped", "no header", "last", "digit"],
)
def test_a_record_that_was_changed_removed_added_or_moved_is_named(runs, change, line):
    path = rank_path(runs.write(), 0)
    lines = path.read_bytes().splitlines(keepends=True)
    change(lines)
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError) as caught:
        read(path)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # The error of a text with an escape sequence is printable.
        ({"moment": "\x1b[31m", "epoch": -1}, r"rank-0.jsonl, line 7: field 'epoch' does"),
        # The version that knows a kind or a field is named.
        ({"kind": "later"}, r"line 7: .*later.* it names '7\.0\.0', and this"),
        ({"later": 1}, r"line 7: .*later.* it names '7\.0\.0', and this"),
        ("header", "line 7: field 'kind' is 'header' a second time"),
        ({"later": "x" * 3000}, "line 7 is longer than 2000 bytes"),
    ],
)
def test_a_wrong_record_with_a_valid_check(runs, tmp_path, monkeypatch, change, message):
    """File, line and field are named; a line that is too long is not read to its end."""
    records = [record.as_record() for record in runs.records(package="7.0.0")]
    records[-2] = records[0] if change == "header" else records[-2] | change
    monkeypatch.setattr(rank_file, "MAX_LINE", 2000)
    path = write_lines(tmp_path / "rank-0.jsonl", records)
    with pytest.raises(LedgerError, match=message) as caught:
        read(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": 1}, "line 3: field 'layout' is 1, and no record before it"),
        ({"digests": b64encode(bytes(32)).decode()}, "must be 1 digests of 16 .* has 32 bytes"),
    ],
)
def test_probes_that_do_not_fit_their_layout(tmp_path, change, message):
    layout, probes = make_probes([("loss", "loss")], [(1,)])
    probes |= {"digests": b64encode(probes["digests"]).decode()} | change
    path = tmp_path / "rank-0.jsonl"
    with pytest.raises(LedgerError, match=message):
        read(write_lines(path, [make_header().as_record(), layout, probes]))


def test_mutations_are_refused_or_judged_right(tmp_path, monkeypatch):
    """Some of those of fuzz_ledger.py, which finds a wrong verdict."""
    outcomes, failures = fuzz_ledger.fuzz(120, 3, tmp_path)
    assert failures == []
    kinds = {(how, outcome) for how, outcome in outcomes}
    assert {("bytes", "refused"), ("forged", "refused"), ("forged", "different")} <= kinds
    equal = type("Comparison", (), {"verdict": "equal"})
    monkeypatch.setattr(fuzz_ledger, "compare_ledgers", lambda *_: equal)
    (tmp_path / "wrong").mkdir()
    _, failures = fuzz_ledger.fuzz(20, 3, tmp_path / "wrong")
    assert {failure["wrong"] for failure in failures} == {"different contents are called equal"}


BEGIN, FACTS, END = make_header(), make_facts(), End(status="finished")


def digests(moment, epoch, digit=0):
    value = f"{epoch + digit:032x}"
    return make_weights(moment, epoch, {"w": value}, step=6 * epoch, totals={"weights": value})


def write(folder, records):
    """Write one rank's file; return the check of each record."""
    folder.mkdir(parents=True)
    with LedgerWriter(folder / "rank-0.jsonl") as writer:
        return [(writer.write(record), writer.chain_hash)[1] for record in records]


def resume(parent, check, *, epoch, batch=0, **extra):
    where = {"epoch": epoch, "step": 6 * epoch + batch, "batch": batch}
    return {"kind": "resume", "parent": parent, "parent_check": check, **where, **extra}


def moments(folder):
    return [
        (record.moment, record.epoch)
        for record in read_ledger(folder).records(0)
        if isinstance(record, Digests)
    ]


STRAIGHT = [("initial", 0), ("epoch", 0), ("epoch", 1), ("epoch", 2), ("final", 2)]


@pytest.fixture
def chain(tmp_path):
    """Write a straight run, and one that was interrupted in epoch 1 and again after it."""
    write(tmp_path / "fit-000", [BEGIN, FACTS, *(digests(*place) for place in STRAIGHT), END])
    first = [BEGIN, FACTS, digests("initial", 0), digests("epoch", 0), digests("epoch", 1, 7)]
    checks = write(tmp_path / "fit-001", first)
    second = [BEGIN, resume("../fit-001", checks[3], epoch=1, batch=3), FACTS]
    second += [digests("epoch", 1), digests("final", 1), End(status="failed")]
    checks = write(tmp_path / "fit-002", second)
    third = [BEGIN, resume("../fit-002", checks[4], epoch=2), FACTS]
    write(tmp_path / "fit-003", [*third, digests("epoch", 2), digests("final", 2), END])
    return tmp_path


def test_a_chain_is_read_as_one_run(chain):
    """What the first run did beyond its checkpoint was done again, and counts for nothing."""
    assert moments(chain / "fit-003") == STRAIGHT
    comparison = compare_ledgers(*(read_ledger(chain / name) for name in ("fit-000", "fit-003")))
    assert comparison.equal
    breaks, problem = find_breaks(chain / "fit-003" / "rank-0.jsonl")
    assert ([(one.epoch, one.batch) for one in breaks], problem) == ([(1, 3), (2, 0)], "")
    assert find_breaks(chain / "fit-000" / "rank-0.jsonl") == ((), "")


def test_an_epoch_that_was_recorded_after_the_checkpoint_counts(tmp_path):
    """A callback before ours saved at the end of the epoch, before it was recorded."""
    checks = write(tmp_path / "fit-000", [BEGIN, FACTS, digests("initial", 0), digests("epoch", 0)])
    second = [BEGIN, resume("../fit-000", checks[2], epoch=1), FACTS, digests("epoch", 1)]
    write(tmp_path / "fit-001", second)
    assert moments(tmp_path / "fit-001") == [("initial", 0), ("epoch", 0), ("epoch", 1)]


def test_a_parent_that_is_beside_it_is_found(chain):
    checks = write(chain / "x" / "fit-000", [BEGIN, FACTS, digests("initial", 0)])
    second = [BEGIN, resume("/gone/fit-000", checks[-1], epoch=0), FACTS, digests("epoch", 0)]
    write(chain / "x" / "fit-001", second)
    assert moments(chain / "x" / "fit-001") == STRAIGHT[:2]


@pytest.mark.parametrize(
    ("parent", "check", "problem"),
    [
        ("", "0" * 16, "it is not there"),
        ("../" + "x/" * 2000, "0" * 16, "it is not there"),
        ("a\0b", "0" * 16, "it is not there"),
        ("../fit-001", "0" * 16, "it does not hold the record at which the checkpoint was saved"),
        (".", "0" * 16, "it continues itself"),
    ],
)
def test_a_parent_that_cannot_be_read_is_said_and_left_out(chain, parent, check, problem):
    write(chain / "fit-009", [BEGIN, resume(parent, check, epoch=1), FACTS, digests("epoch", 1)])
    (_,), found = find_breaks(chain / "fit-009" / "rank-0.jsonl")
    assert found == problem
    assert moments(chain / "fit-009") == [("epoch", 1)]


def test_a_parent_that_was_edited_is_said(chain):
    path = chain / "fit-001" / "rank-0.jsonl"
    path.write_text(path.read_text().replace('"step":0', '"step":1'))
    breaks, problem = find_breaks(chain / "fit-003" / "rank-0.jsonl")
    assert len(breaks) == 2
    assert "does not fit its check" in problem


def test_reasons_that_are_found_late_belong_to_the_break(chain):
    """Unless the batches after which they were found were trained again."""
    first = (chain / "fit-001" / "rank-0.jsonl").read_text().splitlines()[3][-18:-2]
    records = [BEGIN, resume("../fit-001", first, epoch=1, inexact=["Early."]), FACTS]
    records += [resume("", "", epoch=1, inexact=["Late."]), digests("epoch", 1)]
    records += [resume("", "", epoch=2, inexact=["Again."]), digests("epoch", 2, 7)]
    checks = write(chain / "fit-007", records)
    records = [BEGIN, resume("../fit-007", checks[4], epoch=2), FACTS, digests("epoch", 2)]
    records += [digests("final", 2), resume("", "", epoch=2, inexact=["Last."]), END]
    write(chain / "fit-008", records)
    breaks, _ = find_breaks(chain / "fit-008" / "rank-0.jsonl")
    assert [found.inexact for found in breaks] == [("Early.",), ("Late.",), (), ("Last.",)]
    assert moments(chain / "fit-008") == STRAIGHT
    comparison = compare_ledgers(*(read_ledger(chain / name) for name in ("fit-000", "fit-008")))
    assert comparison.equal
    said = [line.partition(": this run was ")[2] for line in format_comparison(comparison)[-5:]]
    assert said == [
        "interrupted and resumed at epoch 1, batch 0 (step 6).",
        "not resumed exactly there: Early.",
        "not resumed exactly there: Late.",
        "interrupted and resumed at epoch 2, batch 0 (step 12).",
        "not resumed exactly there: Last.",
    ]


def test_a_record_is_found_anywhere_in_the_chain(chain):
    file = chain / "fit-003" / "rank-0.jsonl"
    first = (chain / "fit-001" / "rank-0.jsonl").read_text().splitlines()[4]
    assert holds_record(file, first[-18:-2])
    assert not holds_record(chain / "fit-000" / "rank-0.jsonl", first[-18:-2])
    assert not holds_record(file, "0" * 16)


def test_a_folder_of_its_parents_name_is_not_its_own_parent(tmp_path):
    file = rank_path(tmp_path / "fit-000", 1)
    file.parent.mkdir()
    for rank in (0, 1):
        rank_path(file.parent, rank).touch()
    assert rank_file.find_parent(file, "../gone/fit-000") is None
