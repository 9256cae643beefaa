"""Ledgers of schema 2: whatever is not an unedited file of frames gets one clear error."""

import json
from struct import pack

import pytest
from ledger_runs import list_batches, make_digests, make_header, write_schema_2

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format.records import End
from lightning_d9m.ledger.format.writer import LedgerWriter

LAYOUT = {"kind": "layout", "id": 0, "places": [["output", "a", 0], ["output", "b", 0]]}
END = End(status="finished")


def block(layout, count, steps, batches, body):
    return pack("<HHBB", layout, count, steps, batches) + body


def frame(number, count=1, steps=1, batches=1):
    return block(0, count, steps, batches, bytes([number]) * 32 * count)


SECOND_EPOCH = block(0, 0, 0, 0, pack("<qqq", 1, 1, -1))
RECORDS = [LAYOUT, frame(0), frame(1), make_digests("epoch", 0), SECOND_EPOCH, frame(2), END]


@pytest.fixture
def ledger(tmp_path):
    """A ledger of three batches, in two parts."""
    return write_schema_2(tmp_path / "rank-0.jsonl", make_header(), RECORDS)


def read(path):
    return list_batches(read_ledger(path))


def test_it_has_the_contents_of_a_ledger_of_today(ledger, tmp_path):
    assert [batch[:3] for batch in read(ledger)] == [(0, 0, 0), (0, 1, 1), (1, 2, 0)]
    path = tmp_path / "new.jsonl"
    with LedgerWriter(path) as writer:
        for record in (make_header(), LAYOUT):
            writer.write(record)
        probes = {"kind": "probes", "epoch": 0, "step": 0, "batch": 0, "layout": 0, "count": 2}
        writer.write(probes | {"digests": bytes(32) + bytes([1]) * 32})
        writer.write(make_digests("epoch", 0))
        writer.write(probes | {"epoch": 1, "step": 2, "count": 1, "digests": bytes([2]) * 32})
        writer.write(END)
    for one, other in ((ledger, path), (path, ledger)):
        (rank,) = compare_ledgers(read_ledger(one), read_ledger(other)).ranks
        assert (rank.equal, rank.batches, rank.places) == (True, 3, 6)


def test_it_is_continued_by_a_run_of_today(tmp_path):
    """The checkpoint was saved after two batches; what followed was trained again."""
    for number in (0, 1):
        (tmp_path / f"fit-{number}").mkdir()
    old = write_schema_2(tmp_path / "fit-0/rank-0.jsonl", make_header(), RECORDS)
    check = json.loads(old.read_text().splitlines()[2])["check"]
    resume = {"kind": "resume", "parent": "../fit-0", "epoch": 0, "step": 2, "batch": 2}
    probes = {"kind": "probes", "epoch": 0, "step": 2, "batch": 2, "layout": 0}
    with LedgerWriter(tmp_path / "fit-1/rank-0.jsonl") as writer:
        for record in (make_header(), resume | {"parent_check": check}, LAYOUT):
            writer.write(record)
        writer.write(probes | {"digests": bytes(32)})
    assert [batch[2] for batch in read(tmp_path / "fit-1")] == [0, 1, 2]


def test_any_bit(ledger):
    """Each byte of the file, changed by one bit, is noticed."""
    path = ledger.with_suffix(".frames")
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(LedgerError):
            read(ledger)


def test_a_file_that_was_cut_or_is_missing_or_is_something_else(ledger, tmp_path):
    """Or of another run, whose header starts another chain."""
    path = ledger.with_suffix(".frames")
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(LedgerError, match=r"rank-0\.frames does not fit the records beside it"):
            read(ledger)
    for other in (b"hello, world!", None):
        path.unlink() if other is None else path.write_bytes(other)
        with pytest.raises(LedgerError, match="it is missing, or was edited, cut or replaced"):
            read(ledger)
    other = write_schema_2(tmp_path / "other.jsonl", make_header(seed=7), RECORDS)
    other.with_suffix(".frames").replace(path)
    with pytest.raises(LedgerError, match="the block at byte 8: field 'check' does not fit"):
        read(ledger)


def test_each_prefix_of_a_killed_run_reads_as_its_whole_blocks(tmp_path):
    path = write_schema_2(tmp_path / "rank-0.jsonl", make_header(), [LAYOUT, *map(frame, range(3))])
    frames = path.with_suffix(".frames")
    data = frames.read_bytes()
    ends = [8 + 46 * number for number in range(1, 4)]
    for size in range(len(data)):
        frames.write_bytes(data[:size])
        with read_ledger(path).open(0) as reader:
            assert len(list(reader.records())) == 1 + sum(size >= end for end in ends)
            assert reader.truncated == (size not in (0, 8, *ends))


def test_frames_after_the_end_of_the_run(tmp_path):
    path = write_schema_2(tmp_path / "rank-0.jsonl", make_header(), [LAYOUT, END, frame(0)])
    with pytest.raises(LedgerError, match="does not fit the records"):
        read(path)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([block(1, 1, 1, 1, bytes(32))], "field 'layout' is 1, and no record before it says"),
        ([frame(0, count=2, batches=0)], "field 'batches' must be at least 1 for 2 frames"),
        ([block(0, 40_000, 1, 1, bytes(32))], "field 'count' is 40000, which makes more than 10"),
        ([frame(0, steps=0)], "field 'step' must be a whole number from 0 .*, and is -1"),
        ([frame(0, batches=0)], "field 'batch' must be a whole number from 0 .*, and is -1"),
        (
            [block(0, 0, 0, 0, pack("<qqq", 0, 2**63 - 1, 0)), frame(0)],
            "field 'step' must be .*, and is 9223372036854775808",
        ),
    ],
)
def test_a_block_that_is_malformed(tmp_path, blocks, message):
    path = write_schema_2(tmp_path / "rank-0.jsonl", make_header(), [LAYOUT, *blocks])
    with pytest.raises(LedgerError, match=f"the block at byte (8|46): {message}"):
        read(path)
