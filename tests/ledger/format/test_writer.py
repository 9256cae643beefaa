"""Writing ledgers: folders that are never shared, records that survive what ends the process."""

import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from ledger_runs import list_batches, make_digests, make_facts
from msgspec.structs import replace

from lightning_d9m.engine.ledger.folder import create_ledger_folder, rank_path, read_ledger
from lightning_d9m.engine.ledger.format.records import (
    Checkpoint,
    End,
    ProbeLayout,
    ProbesRecord,
)
from lightning_d9m.engine.ledger.format.writer import LedgerWriter
from lightning_d9m.engine.probes.trace import ProbeCollector
from lightning_d9m.engine.probes.training import ProbePoint
from lightning_d9m.errors import LedgerError

END = End(status="finished")


def read_all(path):
    with read_ledger(path).open(0) as reader:
        return reader, list(reader.records())


@pytest.fixture
def writer(runs, tmp_path):
    with LedgerWriter(tmp_path / "rank-0.jsonl") as writer:
        writer.write(runs.header())
        yield writer


def test_a_folder_is_never_given_twice(tmp_path):
    """The parent is made where it is missing; threads that ask at once get their own."""
    made = [create_ledger_folder(tmp_path / "logs" / "d9m").name for _ in range(3)]
    assert made == ["fit-000", "fit-001", "fit-002"]
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: create_ledger_folder(tmp_path), range(16)))
    assert len(set(made)) == 16
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match=r"No ledger can be made in .*/file/d9m: Not a dir"):
        create_ledger_folder(tmp_path / "file" / "d9m")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/rank-0.jsonl", "No such file or directory"),
        ("x" * 300, "File name too long. Choose a shorter path"),
        ("null\0byte", "embedded null"),
    ],
)
def test_a_file_that_cannot_be_made_is_named(tmp_path, path, message):
    with pytest.raises(LedgerError, match=message):
        LedgerWriter(tmp_path / path)


def test_a_disk_that_loses_data_is_reported_on_close(writer, runs, monkeypatch):
    """Some file systems say so only then. A closed writer takes nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", lambda _, close=os.close: close(-1))
        with pytest.raises(LedgerError, match="was not kept: Bad file descriptor"):
            writer.close()
    writer.close()
    with pytest.raises(LedgerError, match="is closed; no record can be added"):
        writer.write(runs.header())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_leaves_whole_records(writer, runs, monkeypatch, code):
    """Half of a record fits; it is taken back, and no later record hides the gap."""
    real, size = os.write, writer.path.stat().st_size

    def write(fd, data):
        if writer.path.stat().st_size > size:
            raise OSError(code, "")
        return real(fd, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(LedgerError) as caught:
            writer.write(runs.facts())
    assert str(writer.path) in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert f"the first {size} bytes stay readable" in str(caught.value)
    assert writer.path.stat().st_size == size
    with pytest.raises(LedgerError, match="Records of this run are missing from here on"):
        writer.write(END)
    assert read_ledger(writer.path).outcome(0).records == 1


@pytest.fixture(params=[0, 10, None], ids=["nothing", "a part", "all"])
def interrupt(request, monkeypatch):
    """Return a function that lets a part of the next write through, and then calls another."""

    def begin(action):
        def interrupted(fd, data):
            monkeypatch.setattr(os, "write", real)
            size = real(fd, data[: request.param])
            action()
            return size

        real = os.write
        monkeypatch.setattr(os, "write", interrupted)
        return request.param is None  # whether all gets through

    return begin


def press_ctrl_c():
    raise KeyboardInterrupt


def test_ctrl_c_in_the_middle_of_a_write(writer, runs, interrupt):
    """Whether the record got through is read off the file; the chain stays whole."""
    is_written = interrupt(press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        writer.write(runs.facts())
    writer.write(End(status="failed", error="KeyboardInterrupt"))
    reader, records = read_all(writer.path)
    assert len(records) == 1 + is_written
    assert reader.complete


def test_a_signal_handler_writes_in_the_middle_of_a_write(writer, runs, interrupt):
    """As one does that saves a checkpoint: its record comes after the one under way."""
    saves = [Checkpoint(path=path, epoch=0, step=1, batch=1) for path in "ab"]
    interrupt(lambda: [*map(writer.write, saves)])
    writer.write(runs.facts())
    writer.write(END)
    reader, _ = read_all(writer.path)
    assert reader.complete
    records = map(json.loads, writer.path.read_text().splitlines()[1:])
    written = [(record["kind"], record.get("path")) for record in records]
    assert written == [("run", None), ("checkpoint", "a"), ("checkpoint", "b"), ("end", None)]


def test_ctrl_c_in_the_middle_of_a_layout(writer, interrupt):
    """What follows, as the probes of a state at an exception, refers to a layout that is there."""
    probes = ProbeCollector(writer.write)
    interrupt(press_ctrl_c)
    for step in range(3):
        probes.begin(ProbePoint(0, step, step))
        probes.add("loss", "loss", step)
        with suppress(KeyboardInterrupt):
            probes.close()
    writer.write(END)
    steps = [where[1] for where in list_batches(read_ledger(writer.path))]
    assert steps == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "was deleted while the run wrote it"),
        (lambda path: path.write_bytes(path.read_bytes() + b"junk"), "another program has changed"),
    ],
)
def test_a_file_that_others_change_is_noticed(writer, runs, change, message):
    """Otherwise the ledger would be written into nothing, or two programs would write one."""
    change(writer.path)
    with pytest.raises(LedgerError, match=message):
        writer.write(runs.facts())


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from lightning_d9m.engine.ledger.format.writer import LedgerWriter
from lightning_d9m.engine.ledger.format.records import Evaluation, Header
words = {"epoch": 0, "batches": 0, "outputs": "0" * 32}
header = Header(rank=0, world_size=1, fit=0, seed=1, created="", settings={}, stack={}, package="0")
with LedgerWriter(Path(sys.argv[1])) as writer:
    writer.write(header)
    for step in range(10**9):
        writer.write(Evaluation(name="x" * (step % 4000), step=step, **words))
        print(step, flush=True)
"""


@pytest.mark.parametrize("count", [1, 300])
def test_kill_loses_at_most_the_last_record(tmp_path, count):
    """All that was acknowledged reads, in order, without a gap."""
    path = tmp_path / "rank-0.jsonl"
    command = [sys.executable, "-c", WRITE_FOR_EVER, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        for _ in range(count):
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.read().count(b"\n")
    reader, records = read_all(path)
    steps = [record.step for record in records]
    assert steps == list(range(len(steps)))
    assert len(steps) - 1 in (acknowledged, acknowledged + 1)
    assert not reader.complete


def test_cut_anywhere(runs):
    """Each prefix of a ledger reads as its whole lines; a torn line is reported."""
    path = rank_path(runs.write(edit=lambda _, records: records.__delitem__(slice(2, -1))), 0)
    data = path.read_bytes()
    for size in range(data.index(b"\n") + 1, len(data)):
        path.write_bytes(data[:size])
        reader, records = read_all(path)
        assert len(records) == data[:size].count(b"\n") - 1
        assert reader.truncated == (not data[:size].endswith(b"\n"))
        assert not reader.complete


PROBES = ProbesRecord(epoch=0, step=1, batch=2, layout=0, digests=b"f" * 16)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (make_digests("epoch", -1), r"'digests' .* field 'epoch' does not fit"),
        (make_facts(trainer={"a": object()}), "cannot be written as JSON"),
        (make_facts(trainer={"a": {1, 2}}), "does not fit"),
        (replace(PROBES, step=-1), "field 'step' does not fit"),
        (replace(PROBES, digests=b"f" * 32), "must be 1 digests of 16 bytes, .* and has 32 bytes"),
        (replace(PROBES, layout=1), "field 'layout' is 1, and no record before it"),
    ],
)
def test_a_malformed_record_is_not_written(writer, record, message):
    """What would not be readable is refused; the ledger goes on."""
    writer.write(ProbeLayout(id=0, places=(("loss", "loss", 0),)))
    writer.write(PROBES)
    with pytest.raises(LedgerError, match=message):
        writer.write(record)
    writer.write(replace(PROBES, step=2, batch=3))
    writer.write(END)
    assert [where[1] for where in list_batches(read_ledger(writer.path))] == [1, 2]


def test_a_forked_process_does_not_write_into_the_ledger_of_its_parent(writer, monkeypatch):
    before = writer.path.read_bytes()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(LedgerError, match="was forked from it and must not write there"):
        writer.write(END)
    assert writer.path.read_bytes() == before
