"""Reading ledgers: whatever is not an unedited ledger gets one clear error."""

import os

import pytest
from ledger_runs import chain_lines, write_lines

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import rank_path, read_ledger
from lightning_d9m.ledger.format import reader as rank_file


def read(path, rank=0):
    """Read a ledger to its end."""
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
        (b"", "is empty: the run was ended before it wrote its first record"),
        (b'{"kind":"header","sch', "ends within its first record: the run was killed while"),
        (b"hello\n", "is not a ledger: it begins with 'hello"),
        (b"\x80\x04\x95pickle\x00\xff\xfe", "is not a ledger: it begins with"),
        (b"[]\n", "is not a ledger"),
        (b'{"kind":"header",' + b"x" * 2**20, "first line of more than 1048576 bytes"),
        (chain_lines([b'{"kind":"end","status":"failed"}']), "is not a ledger: it begins with"),
        (chain_lines([b'{"kind":"header","schema":3}']), "required field `package`"),
        (chain_lines([b'{"kind":"header","schema":3,"package":""}']), "required field `rank`"),
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


@pytest.mark.parametrize("schema", [1, 2, 4, 2**40])
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
        f"has schema {schema}; the lightning_d9m that is installed reads schema 3. It was written "
        "by lightning_d9m '7.0.0': install that version" in str(caught.value)
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: lines.pop(2), "line 3 (digests)"),
        (lambda lines: lines.insert(3, lines[3]), "line 5 (digests)"),
        (lambda lines: lines.insert(3, lines.pop(4)), "line 4 (digests)"),
        (lambda lines: lines.pop(0), "is not a ledger"),
        (lambda lines: lines.insert(2, b"{}\n"), "line 3 does"),
        (lambda lines: lines.__setitem__(-1, lines[-1].replace(b"finish", b"fail")), "line 8 "),
        (lambda lines: lines.__setitem__(2, lines[2].replace(b"\n", b"\r\n")), "line 3 "),
        (
            lambda lines: lines.__setitem__(4, lines[4].replace(b'"step":46', b'"step":47')),
            "line 5 ",
        ),
    ],
    ids=["removed", "doubled", "swapped", "no header", "added", "last", "crlf", "digit"],
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
