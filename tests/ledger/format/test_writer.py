"""Writing ledgers: folders that are never shared, records that survive what ends the process."""

import errno
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from ledger_runs import list_batches, make_digests, make_facts

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import create_ledger_folder, rank_path, read_ledger
from lightning_d9m.ledger.format.records import End
from lightning_d9m.ledger.format.writer import LedgerWriter


def write_interrupted(writer, record, written, monkeypatch):
    """Write a record, with Ctrl-C when so many bytes of it (None: all) are in the file."""
    real = os.write

    def interrupted(fd, data):
        real(fd, data[:written])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.write(record)


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from lightning_d9m.ledger.format.writer import LedgerWriter
from lightning_d9m.ledger.format.records import Evaluation, Header
words = {"epoch": 0, "batches": 0, "outputs": "0" * 32}
header = Header(rank=0, world_size=1, fit=0, seed=1, created="", settings={}, stack={}, package="0")
with LedgerWriter(Path(sys.argv[1])) as writer:
    writer.write(header)
    for step in range(10**9):
        writer.write(Evaluation(name="x" * (step % 4000), step=step, **words))
        print(step, flush=True)
"""


def kill_after(count, program, path):
    """Kill a program after so many records; return the number of the last acknowledged one."""
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        for _ in range(count):
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split(b"\n")[:-1]
    return int(rest[-1]) if rest else acknowledged


def read_all(path):
    """Return a reader that has been read to its end, and the records."""
    with read_ledger(path).open(0) as reader:
        return reader, list(reader.records())


class TestFolder:
    """``create_ledger_folder`` never takes an older folder."""

    def test_numbers_follow_each_other(self, tmp_path):
        """The parent is made where it is missing."""
        made = [create_ledger_folder(tmp_path / "logs" / "d9m").name for _ in range(3)]
        assert made == ["fit-000", "fit-001", "fit-002"]

    def test_processes_that_ask_at_once_get_folders_of_their_own(self, tmp_path):
        with ThreadPoolExecutor(16) as pool:
            made = list(pool.map(lambda _: create_ledger_folder(tmp_path), range(16)))
        assert len(set(made)) == 16

    def test_a_file_in_the_way_is_named(self, tmp_path):
        (tmp_path / "log").write_text("")
        with pytest.raises(LedgerError, match=r"No ledger can be made in .*/log/d9m: Not a dir"):
            create_ledger_folder(tmp_path / "log" / "d9m")


class TestWriter:
    """``LedgerWriter`` appends whole records, or nothing."""

    def test_what_was_written_is_read(self, runs):
        ledger = read_ledger(runs.write(epochs=2))
        assert ledger.header == runs.header()
        assert list(ledger.records(0)) == runs.records(epochs=2)[1:]
        outcome = ledger.outcome(0)
        assert outcome.records == 7
        assert outcome.final == outcome.last == runs.digests("final", 1)
        assert outcome.end == End(status="finished")

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("missing/rank-0.jsonl", "No such file or directory"),
            ("file/rank-0.jsonl", "Not a directory"),
            ("x" * 300, "File name too long. Choose a shorter path"),
            ("null\0byte", "embedded null"),
            ("/proc/rank-0.jsonl", "cannot be made"),
        ],
    )
    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path, path, message):
        (tmp_path / "file").write_text("")
        with pytest.raises(LedgerError, match=message):
            LedgerWriter(tmp_path / path)

    def test_a_closed_writer_takes_nothing(self, runs, tmp_path):
        writer = LedgerWriter(tmp_path / "rank-0.jsonl")
        writer.close()
        writer.close()
        with pytest.raises(LedgerError, match="is closed; no record can be added"):
            writer.write(runs.header())

    def test_a_disk_that_loses_data_is_reported_on_close(self, tmp_path, monkeypatch):
        """Some file systems say so only then."""

        def fail(_):
            raise OSError(errno.EIO, "Input/output error")

        writer = LedgerWriter(tmp_path / "rank-0.jsonl")
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(LedgerError, match=r"was not kept: Input/output error\. Check the"):
            writer.close()


class TestFailures:
    """Whatever ends a run leaves a ledger that reads."""

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
    def test_a_full_disk_leaves_whole_records(self, runs, tmp_path, monkeypatch, code):
        """Half of a record fits; it is taken back, and no later record hides the gap."""
        path = tmp_path / "rank-0.jsonl"
        real = os.write
        writer = LedgerWriter(path)
        writer.write(runs.header())
        size = path.stat().st_size
        answers = iter([lambda fd, data: real(fd, data[: len(data) // 2]), OSError(code, "")])

        def write(fd, data):
            answer = next(answers)
            if isinstance(answer, OSError):
                raise answer
            return answer(fd, data)

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            with pytest.raises(LedgerError) as caught:
                writer.write(runs.facts())
        assert str(path) in str(caught.value)
        assert os.strerror(code) in str(caught.value)
        assert f"the first {size} bytes stay readable" in str(caught.value)
        assert path.stat().st_size == size
        with pytest.raises(LedgerError, match="Records of this run are missing from here on"):
            writer.write(End(status="finished"))
        writer.close()
        assert read_ledger(path).outcome(0).records == 1

    @pytest.mark.parametrize("written", [0, 10, None], ids=["nothing", "a part", "all"])
    def test_ctrl_c_in_the_middle_of_a_write(self, runs, tmp_path, monkeypatch, written):
        """Whether the record got through is read off the file; the chain stays whole."""
        path = tmp_path / "rank-0.jsonl"
        with LedgerWriter(path) as writer:
            writer.write(runs.header())
            write_interrupted(writer, runs.facts(), written, monkeypatch)
            writer.write(End(status="failed", error="KeyboardInterrupt"))
        reader, records = read_all(path)
        assert len(records) == (2 if written is None else 1)
        assert reader.complete

    def test_a_deleted_file_is_noticed(self, runs, tmp_path):
        """Otherwise the ledger would be written into nothing."""
        path = tmp_path / "rank-0.jsonl"
        with LedgerWriter(path) as writer:
            writer.write(runs.header())
            path.unlink()
            with pytest.raises(LedgerError, match="was deleted while the run wrote it"):
                writer.write(runs.facts())

    def test_a_second_writer_is_noticed(self, runs, tmp_path):
        """Two programs must not write one file."""
        path = tmp_path / "rank-0.jsonl"
        with LedgerWriter(path) as writer:
            writer.write(runs.header())
            path.write_bytes(path.read_bytes() + b"junk")
            with pytest.raises(LedgerError, match="another program has changed the file"):
                writer.write(runs.facts())

    def test_kill_loses_at_most_the_last_record(self, tmp_path):
        """SIGKILL at random moments: all that was acknowledged reads, in order, without a gap."""
        choice = random.Random(7)
        for number in range(8):
            path = tmp_path / f"rank-{number}.jsonl"
            acknowledged = kill_after(choice.randrange(1, 400), WRITE_FOR_EVER, path)
            reader, records = read_all(path)
            steps = [record.step for record in records]
            assert steps == list(range(len(steps)))
            assert len(steps) - 1 in (acknowledged, acknowledged + 1)
            assert not reader.complete

    def test_cut_anywhere(self, runs):
        """Each prefix of a ledger reads as its whole lines; a torn line is reported."""
        path = rank_path(runs.write(edit=lambda _, records: records.__delitem__(slice(2, -1))), 0)
        data = path.read_bytes()
        header = data.index(b"\n") + 1
        for size in range(header, len(data)):
            path.write_bytes(data[:size])
            reader, records = read_all(path)
            assert len(records) == data[:size].count(b"\n") - 1
            assert reader.truncated == (not data[:size].endswith(b"\n"))
            assert not reader.complete


LAYOUT = {"kind": "layout", "id": 0, "places": [["loss", "loss", 0]]}
PROBES = {"kind": "probes", "epoch": 0, "step": 1, "batch": 2, "layout": 0, "digests": b"f" * 16}


@pytest.fixture
def writer(runs, tmp_path):
    """A ledger with a layout of one place."""
    with LedgerWriter(tmp_path / "rank-0.jsonl") as writer:
        writer.write(runs.header())
        writer.write(LAYOUT)
        yield writer


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (make_digests("epoch", -1), r"'digests' .* field 'epoch' does not fit"),
        ({"kind": "later"}, r"'later' .* field 'kind' does not fit"),
        (make_facts(trainer={"a": object()}), "cannot be written as JSON"),
        (PROBES | {"step": -1}, "field 'step' does not fit"),
        (PROBES | {"digests": b"f" * 32}, "must be 1 digests of 16 bytes, .* and has 32 bytes"),
        (PROBES | {"layout": 1}, "field 'layout' is 1, and no record before it"),
    ],
)
def test_a_malformed_record_is_not_written(writer, record, message):
    """What would not be readable is refused; the ledger goes on."""
    writer.write(PROBES)
    with pytest.raises(LedgerError, match=message):
        writer.write(record)
    writer.write(PROBES | {"step": 2, "batch": 3})
    writer.write(End(status="finished"))
    assert [where[1] for where in list_batches(read_ledger(writer.path))] == [1, 2]


def test_a_forked_process_does_not_write_into_the_ledger_of_its_parent(tmp_path, monkeypatch):
    path = tmp_path / "rank-0.jsonl"
    with LedgerWriter(path) as writer:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(LedgerError, match="was forked from it and must not write there"):
            writer.write(End(status="finished"))
        monkeypatch.undo()
    assert path.read_bytes() == b""
