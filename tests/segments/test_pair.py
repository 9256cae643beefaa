"""Two runs that are compared while they run are told to end at their first difference."""

import pytest
from ledger_runs import LedgerWriter, make_digests, make_facts, make_header, make_probes

from lightning_d9m.engine.ledger.format.records import Checkpoint, End
from lightning_d9m.tools.segments.pair import PairWatch


class Growing:
    """A ledger that grows record by record."""

    def __init__(self, folder, **header):
        (folder / "fit-000").mkdir(parents=True)
        self.writer = LedgerWriter(folder / "fit-000/rank-0.jsonl")
        self.writer.write(make_header(**header))
        self.writer.write(make_facts())

    def write(self, *records):
        for record in records:
            self.writer.write(record)


@pytest.fixture
def pair(tmp_path):
    folders = (tmp_path / "a", tmp_path / "b")
    with PairWatch(folders) as watch:
        assert not watch.differs()  # neither has a ledger
        runs = [Growing(folder) for folder in folders]
        yield watch, *runs
        for run in runs:
            run.writer.close()


def test_a_difference_is_seen_as_soon_as_both_have_the_record(pair):
    watch, one, other = pair
    one.write(make_digests("initial", 0), make_digests("epoch", 0), make_digests("epoch", 1))
    assert not watch.differs()
    other.write(make_digests("initial", 0), make_digests("epoch", 0))
    assert not watch.differs()
    other.write(make_digests("epoch", 1, loss=(0.5).hex()))
    assert watch.differs()


def test_what_runs_may_differ_in_does_not_count(pair):
    """Times that a program logs, checkpoints that only one run saves, and how they end."""
    watch, one, other = pair
    one.write(make_digests("epoch", 0, scalars={"time": (1.0).hex()}), make_digests("epoch", 1))
    other.write(
        make_digests("epoch", 0, scalars={"time": (2.0).hex()}),
        Checkpoint(path="a.ckpt", epoch=0, step=9, batch=9),
        make_digests("epoch", 1),
        End(status="finished"),
    )
    assert not watch.differs()
    one.write(make_digests("epoch", 2))
    assert not watch.differs()


def test_an_exception_is_no_difference(pair):
    """The failure of that run decides, and the other one may end, also within a batch."""
    watch, one, other = pair
    one.write(make_digests("epoch", 0), *make_probes([("loss", "")], [(0,)]))
    begun = make_probes([("loss", ""), ("rng", "torch")], [])
    other.write(make_digests("epoch", 0), *begun, make_digests("exception", 0, step=30))
    assert not watch.differs()


def test_what_a_fit_begins_with_counts_after_some_records(pair):
    """A file may be that of another process, which takes the same number in the other run."""
    watch, one, other = pair
    one.write(make_digests("initial", 0))
    other.write(make_digests("initial", 1))
    for epoch in range(30):
        assert not (epoch < 20 and watch.differs())
        for run in (one, other):
            run.write(make_digests("epoch", epoch))
    assert watch.differs()


def test_a_record_that_is_being_written_waits(pair):
    watch, one, other = pair
    for run in (one, other):
        run.write(make_digests("epoch", 0))
    with other.writer.path.open("ab") as file:
        file.write(b'{"kind":"digests","mo')
    one.write(make_digests("epoch", 1))
    assert not watch.differs()


def test_ledgers_that_processes_number_in_any_order_are_not_compared(tmp_path):
    folders = (tmp_path / "a", tmp_path / "b")
    for number, folder in enumerate(folders):
        run = Growing(folder)
        run.write(make_digests("epoch", number))
        (folder / "fit-001").mkdir()
        with LedgerWriter(folder / "fit-001/rank-0.jsonl") as writer:
            writer.write(make_header())  # the first fit of another process
        run.writer.close()
    with PairWatch(folders) as watch:
        assert not watch.differs()
