"""Reading ledgers: whatever is not an unedited ledger gets one clear error."""

import json
import os

import pytest
from ledger_runs import chain_lines, write_lines

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import rank_path, read_ledger
from lightning_d9m.ledger.format import reader as rank_file


def read(path, rank=0):
    """Read a ledger to its end."""
    return list(read_ledger(path).records(rank))


class TestFinding:
    """``read_ledger`` takes a fit folder, a folder with one, or a file."""

    def test_by_any_of_its_names(self, runs, tmp_path):
        folder = runs.write()
        (tmp_path / "above").mkdir()
        folder = folder.rename(tmp_path / "above" / "fit-000")
        for path in (tmp_path, tmp_path / "above", folder, str(folder / "rank-0.jsonl")):
            assert read(path) == runs.records()[1:]
        assert read_ledger(tmp_path).path == folder

    def test_a_file_under_another_name(self, runs, tmp_path):
        """A copy may be called anything; its header knows its rank."""
        path = tmp_path / "reference.jsonl"
        rank_path(runs.write(world_size=3), 2).rename(path)
        assert list(read_ledger(path).files) == [2]

    def test_ranks_whose_files_are_elsewhere(self, runs):
        """Machines without a common disk keep their own ranks."""
        folder = runs.write(world_size=3)
        rank_path(folder, 0).unlink()
        ledger = read_ledger(folder)
        assert list(ledger.files) == [1, 2]
        with pytest.raises(LedgerError, match=r"has no file of rank 0; it has rank 1, 2\."):
            ledger.open(0)

    def test_several_fits_are_listed(self, runs, tmp_path):
        for _ in range(5):
            runs.write(epochs=1)
        with pytest.raises(LedgerError, match=r"holds 5 ledgers: .*, .*, \.\.\.\. Name one"):
            read_ledger(tmp_path)

    def test_the_ledger_that_is_being_written_does_not_count(self, runs, tmp_path):
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
    def test_what_is_none(self, tmp_path, name, message):
        (tmp_path / "circle").symlink_to(tmp_path / "circle")
        (tmp_path / "empty").mkdir()
        (tmp_path / "fit-000").mkdir()
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(LedgerError, match=message):
            read_ledger(tmp_path / name)

    def test_a_renamed_rank(self, runs):
        """Rank 1 must not be taken for rank 0."""
        folder = runs.write(world_size=2)
        rank_path(folder, 1).rename(rank_path(folder, 0))
        with pytest.raises(LedgerError, match=r"was written by rank 1, not by rank 0\. It was ren"):
            read_ledger(folder)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"seed": 43}, r"their seed differs \(42 and 43\)"),
            ({"fit": 1}, r"their fit differs \(0 and 1\)"),
            ({"world_size": 3}, r"their world_size differs \(2 and 3\)"),
        ],
    )
    def test_ranks_of_different_runs(self, runs, changes, message):
        def stray(rank, records):
            if rank == 1:
                records[0].update(changes)

        folder = runs.write(world_size=2, edit=stray)
        with pytest.raises(LedgerError, match=message):
            read_ledger(folder)


class TestNotALedger:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "is empty: the run was ended before it wrote its first record"),
            (b'{"kind":"header","sch', "ends within its first record: the run was killed while"),
            (b"hello\n", "is not a ledger: it begins with 'hello"),
            (b"\x80\x04\x95pickle\x00\xff\xfe", "is not a ledger: it begins with"),
            (b"\x00" * 100, "is not a ledger: it begins with"),
            (b"[]\n", "is not a ledger"),
            (b"{}\n", "is not a ledger"),
            (b'{"kind":"header",' + b"x" * 2**20, "first line of more than 1048576 bytes"),
            (chain_lines([b'{"kind":"end","status":"failed"}']), "is not a ledger: it begins with"),
            (chain_lines([b'{"kind":"header","schema":3}']), "required field `package`"),
            (chain_lines([b'{"kind":"header","schema":3,"package":""}']), "required field `rank`"),
            (chain_lines([b'{"kind":"header",nonsense}']), "first record that is not a header"),
            (b'{"kind":"header","\xff":1}' + b"\n" * 30, "is not a ledger"),
        ],
    )
    def test_is_said_to_be_none(self, tmp_path, data, message):
        path = tmp_path / "rank-0.jsonl"
        path.write_bytes(data)
        with pytest.raises(LedgerError, match=message) as caught:
            read_ledger(tmp_path)
        assert str(path) in str(caught.value)
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("schema", [1, 2, 4, 2**40])
    @pytest.mark.parametrize("unknown_form", [False, True])
    def test_a_schema_of_another_version(self, runs, tmp_path, schema, unknown_form):
        """The version that can read it is named, also when its header has another form."""
        record = runs.header(schema=schema, package="7.0.0").as_record()
        if unknown_form:
            del record["world_size"]
        (tmp_path / "rank-0.jsonl").write_bytes(
            chain_lines([json.dumps(record, separators=(",", ":")).encode()])
        )
        with pytest.raises(LedgerError) as caught:
            read_ledger(tmp_path)
        assert f"has schema {schema}; the lightning_d9m that is installed reads schema 3. " in str(
            caught.value
        )
        assert "It was written by lightning_d9m '7.0.0': install that version" in str(caught.value)


class TestChain:
    """A record that was changed, removed, added or moved is named."""

    def test_an_edited_digest_is_named(self, runs):
        path = rank_path(runs.write(), 0)
        lines = path.read_bytes().splitlines(keepends=True)
        lines[4] = lines[4].replace(b'"layers.0.bias":"', b'"layers.0.bias":"0', 1)
        path.write_bytes(b"".join(lines))
        with pytest.raises(LedgerError, match="line 5 does not fit its check"):
            read(path)
        lines = path.read_bytes().splitlines(keepends=True)
        lines[4] = lines[4].replace(b'bias":"0', b'bias":"', 1).replace(b'"step":46', b'"step":47')
        path.write_bytes(b"".join(lines))
        with pytest.raises(LedgerError) as caught:
            read(path)
        assert f"{path}, line 5 (digests) does not fit" in str(caught.value)
        assert "was edited, or a record before it was removed, added or moved" in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "line"),
        [
            (lambda lines: lines.pop(2), 3),
            (lambda lines: lines.insert(3, lines[3]), 5),
            (lambda lines: lines.insert(3, lines.pop(4)), 4),
            (lambda lines: lines.pop(0), 1),
            (lambda lines: lines.insert(2, b"\n"), 3),
            (lambda lines: lines.insert(2, b"{}\n"), 3),
            (lambda lines: lines.__setitem__(-1, lines[-1].replace(b"finish", b"fail")), 8),
            (lambda lines: lines.__setitem__(2, lines[2].replace(b"\n", b"\r\n")), 3),
        ],
        ids=["removed", "doubled", "swapped", "no header", "blank", "added", "last", "crlf"],
    )
    def test_a_changed_order(self, runs, change, line):
        path = rank_path(runs.write(), 0)
        lines = path.read_bytes().splitlines(keepends=True)
        change(lines)
        path.write_bytes(b"".join(lines))
        with pytest.raises(LedgerError, match=rf"line {line}\b|is not a ledger"):
            read(path)


class TestUntrusted:
    """A record with a valid check and a wrong value: file, line and field are named."""

    def test_a_wrong_value(self, runs, tmp_path):
        records = [record.as_record() for record in runs.records()]
        records[-2].update(moment="\x1b[31m", epoch=-1)
        path = write_lines(tmp_path / "rank-0.jsonl", records)
        with pytest.raises(
            LedgerError, match=r"rank-0.jsonl, line 7: field 'epoch' does"
        ) as caught:
            read(path)
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("change", [{"kind": "later"}, {"later": 1}])
    def test_a_kind_or_a_field_of_another_version(self, runs, tmp_path, change):
        """The version that knows it is named."""
        records = [record.as_record() for record in runs.records(package="7.0.0")]
        records[-2].update(change)
        path = write_lines(tmp_path / "rank-0.jsonl", records)
        with pytest.raises(LedgerError, match=r"line 7: .*later.* it names '7\.0\.0', and this"):
            read(path)

    def test_a_second_header(self, runs, tmp_path):
        records = [record.as_record() for record in runs.records()]
        path = write_lines(tmp_path / "rank-0.jsonl", [*records[:2], records[0]])
        with pytest.raises(LedgerError, match="line 3: field 'kind' is 'header' a second time"):
            read(path)

    def test_a_line_beyond_the_bound(self, runs, tmp_path, monkeypatch):
        """Memory is bounded: the line is not read to its end."""
        monkeypatch.setattr(rank_file, "MAX_LINE", 2000)
        header = runs.header().as_record()
        path = write_lines(tmp_path / "rank-0.jsonl", [header, {"kind": "x" * 3000}])
        with pytest.raises(LedgerError, match="line 2 is longer than 2000 bytes"):
            read(path)
