"""Reading frames: whatever is not an unedited file of frames gets one clear error."""

import os
from struct import pack

import pytest
from ledger_runs import list_batches, write_lines
from xxhash import xxh3_64_intdigest

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format.frames import frames_path
from lightning_d9m.ledger.format.records import End
from lightning_d9m.ledger.format.writer import LedgerWriter

PLACES = [["output", "a", 0], ["output", "b", 0]]


def probes(batch, **changes):
    record = {"kind": "probes", "epoch": 0, "step": batch, "batch": batch, "layout": 0}
    return record | {"digests": bytes([batch]) * 32} | changes


@pytest.fixture
def ledger(runs, tmp_path):
    """Write a ledger of four batches, two in each of its files' parts."""
    path = tmp_path / "rank-0.jsonl"
    with LedgerWriter(path) as writer:
        writer.write(runs.header())
        writer.write({"kind": "layout", "id": 0, "places": PLACES})
        for batch in (0, 1):
            writer.write(probes(batch))
        writer.write(runs.digests("epoch", 0))
        for batch in (0, 1):
            writer.write(probes(batch, epoch=1, step=2 + batch))
        writer.write(End(status="finished"))
    return path


def read(path):
    return list_batches(read_ledger(path))


def forge(path, *blocks):
    """Replace the frames by blocks: (layout, count, steps, batches, body), with valid checks."""
    with read_ledger(path).open(0) as reader:
        check = int(reader.chain_hash, 16)
    data = b"d9mprb2\n"
    for *head, body in blocks:
        block = pack("<HHBB", *head) + body
        check = xxh3_64_intdigest(block, check)
        data += block + pack("<Q", check)
    frames_path(path).write_bytes(data)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))  # as if the run had been killed


def test_frames_are_read_in_order(ledger):
    where = [batch[:3] for batch in read(ledger)]
    assert where == [(0, 0, 0), (0, 1, 1), (1, 2, 0), (1, 3, 1)]
    kinds = [type(record).__name__ for record in read_ledger(ledger).records(0)]
    frames = ["Frames", "Frames", "FramesEnd"]
    assert kinds == ["ProbeLayout", *frames, "Digests", *frames, "End"]


def test_any_bit(ledger):
    """Each byte of the file, changed by one bit, is noticed."""
    path = frames_path(ledger)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(LedgerError):
            read(ledger)


def test_a_file_that_is_missing(ledger):
    frames_path(ledger).unlink()
    with pytest.raises(
        LedgerError, match=r"line 3 refers to 100 bytes .* and rank-0\.frames is not beside"
    ):
        read(ledger)


def test_a_file_that_is_something_else(ledger):
    frames_path(ledger).write_bytes(b"hello, world!")
    with pytest.raises(LedgerError, match=r"begins with 68656c6c6f2c2077.*Copy it again together"):
        read(ledger)
    frames_path(ledger).unlink()
    os.mkfifo(frames_path(ledger))
    with pytest.raises(LedgerError, match="is not a regular file"):
        read(ledger)


def test_frames_of_another_run(ledger, runs, tmp_path):
    """The chain starts from the header of the records."""
    other = tmp_path / "other.jsonl"
    with LedgerWriter(other) as writer:
        writer.write(runs.header(seed=7))
        writer.write({"kind": "layout", "id": 0, "places": PLACES})
        writer.write(probes(0))
    frames_path(other).replace(frames_path(ledger))
    with pytest.raises(LedgerError, match="the block at byte 8 does not fit its check: it was edi"):
        read(ledger)


def test_frames_after_the_end_of_the_run(ledger, runs):
    header = [record.as_record() for record in runs.records()[:1]]
    forge(ledger, (0, 1, 1, 1, bytes(32)))
    layout = {"kind": "layout", "id": 0, "places": PLACES}
    write_lines(ledger, [*header, layout, {"kind": "end", "status": "finished"}])
    with pytest.raises(LedgerError, match=r"continues after byte 8, and rank-0\.jsonl ends with"):
        read(ledger)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ((1, 1, 1, 1, bytes(32)), "field 'layout' is 1, and no record before it says"),
        ((0, 2, 1, 0, bytes(64)), "field 'batches' must be at least 1 for 2 frames, and is 0"),
        ((0, 40_000, 1, 1, bytes(32)), "field 'count' is 40000, which makes more than 1048576"),
        ((1, 0, 0, 0, bytes(24)), "field 'count' is 0, and the rest of its head is not"),
        ((0, 0, 0, 1, bytes(24)), "field 'count' is 0, and the rest of its head is not"),
        ((0, 1, 0, 1, bytes(32)), "field 'step' must be a whole number from 0 .*, and is -1"),
        ((0, 1, 1, 0, bytes(32)), "field 'batch' must be a whole number from 0 .*, and is -1"),
    ],
)
def test_a_block_that_is_malformed(ledger, block, message):
    forge(ledger, block)
    with pytest.raises(LedgerError, match=f"the block at byte 8: {message}"):
        read(ledger)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ((-1, 0, 0), "field 'epoch' must be a whole number from 0 .*, and is -1"),
        ((0, 2**63 - 1, 0), "field 'step' must be .*, and is 9223372036854775808"),
        ((0, 0, 2**63 - 1), "field 'batch' must be .*, and is 9223372036854775808"),
    ],
)
def test_a_position_beyond_its_bounds(ledger, position, message):
    forge(ledger, (0, 0, 0, 0, pack("<qqq", *position)), (0, 1, 1, 1, bytes(32)))
    with pytest.raises(LedgerError, match=f"the block at byte 46: {message}"):
        read(ledger)


def test_a_block_that_goes_beyond_what_its_line_says(ledger, runs):
    header = [record.as_record() for record in runs.records()[:1]]
    layout = {"kind": "layout", "id": 0, "places": PLACES}
    forge(ledger, (0, 1, 1, 1, bytes(32)))
    write_lines(ledger, [*header, layout, {"kind": "frames", "bytes": 40, "last": "0" * 16}])
    with pytest.raises(LedgerError, match="field 'count' makes it end beyond byte 40"):
        read(ledger)


def test_frames_whose_layout_changes_between_blocks(ledger, runs):
    """Blocks of one run in another order of writing are the same batches."""
    one, two = bytes(32), b"\1" * 32
    forge(ledger, (0, 1, 1, 1, one), (0, 1, 1, 1, two))
    split = ledger.with_name("split.jsonl")
    split.write_bytes(ledger.read_bytes())
    frames_path(split).write_bytes(frames_path(ledger).read_bytes())
    forge(ledger, (0, 2, 1, 1, one + two))
    (rank,) = compare_ledgers(read_ledger(split), read_ledger(ledger)).ranks
    assert rank.equal
    assert (rank.batches, rank.places) == (2, 4)
    forge(ledger, (0, 2, 2, 1, one + two))
    (rank,) = compare_ledgers(read_ledger(split), read_ledger(ledger)).ranks
    assert not rank.equal
