"""Ledgers of resumed runs are read as one run, and say where it was interrupted."""

from functools import partial

import pytest
from ledger_runs import find_breaks

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format.records import Digests, End, Header, RunFacts
from lightning_d9m.ledger.format.writer import LedgerWriter
from lightning_d9m.ledger.resumed_runs import holds_record
from lightning_d9m.output.comparison_text import format_comparison

HEADER = Header(rank=0, world_size=1, fit=0, seed=1, created="", settings={}, stack={}, package="0")
FACTS = RunFacts(model="m", parameters=1, train=())
END = End(status="finished")


def digests(moment, epoch, digit=0):
    value = f"{epoch + digit:032x}"
    return Digests(
        moment=moment,
        epoch=epoch,
        step=6 * epoch,
        totals={"weights": value},
        groups={"weights": {"w": value}},
    )


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
    write(tmp_path / "fit-000", [HEADER, FACTS, *(digests(*place) for place in STRAIGHT), END])
    first = [HEADER, FACTS, digests("initial", 0), digests("epoch", 0), digests("epoch", 1, 7)]
    checks = write(tmp_path / "fit-001", first)
    second = [HEADER, resume("../fit-001", checks[3], epoch=1, batch=3), FACTS]
    second += [digests("epoch", 1), digests("final", 1), End(status="failed")]
    checks = write(tmp_path / "fit-002", second)
    third = [HEADER, resume("../fit-002", checks[4], epoch=2), FACTS]
    write(tmp_path / "fit-003", [*third, digests("epoch", 2), digests("final", 2), END])
    return tmp_path


def test_a_chain_is_read_as_one_run(chain):
    """What the first run did beyond its checkpoint was done again, and counts for nothing."""
    assert moments(chain / "fit-003") == STRAIGHT
    comparison = compare_ledgers(*(read_ledger(chain / name) for name in ("fit-000", "fit-003")))
    assert comparison.equal


def test_the_breaks_are_told(chain):
    breaks = find_breaks(chain / "fit-003" / "rank-0.jsonl")
    assert [(entry.epoch, entry.batch, entry.problem) for entry in breaks] == [
        (1, 3, None),
        (2, 0, None),
    ]
    assert find_breaks(chain / "fit-000" / "rank-0.jsonl") == ()


def test_an_epoch_that_was_recorded_after_the_checkpoint_counts(tmp_path):
    """A callback before ours saved at the end of the epoch, before it was recorded."""
    checks = write(
        tmp_path / "fit-000", [HEADER, FACTS, digests("initial", 0), digests("epoch", 0)]
    )
    second = [HEADER, resume("../fit-000", checks[2], epoch=1), FACTS, digests("epoch", 1)]
    write(tmp_path / "fit-001", second)
    assert moments(tmp_path / "fit-001") == [("initial", 0), ("epoch", 0), ("epoch", 1)]


def test_a_parent_that_is_beside_it_is_found(chain):
    checks = write(chain / "x" / "fit-000", [HEADER, FACTS, digests("initial", 0)])
    second = [HEADER, resume("/gone/fit-000", checks[-1], epoch=0), FACTS, digests("epoch", 0)]
    write(chain / "x" / "fit-001", second)
    assert moments(chain / "x" / "fit-001") == STRAIGHT[:2]


@pytest.mark.parametrize(
    ("parent", "check", "problem"),
    [
        ("../gone", "0" * 16, "it is not there"),
        ("", "0" * 16, "it is not there"),
        ("x" * 300, "0" * 16, "it is not there"),
        ("../" + "x/" * 2000, "0" * 16, "it is not there"),
        ("a\0b", "0" * 16, "it is not there"),
        ("../fit-001", "0" * 16, "it does not hold the record at which the checkpoint was saved"),
        (".", "0" * 16, "it continues itself"),
    ],
)
def test_a_parent_that_cannot_be_read_is_said_and_left_out(chain, parent, check, problem):
    write(chain / "fit-009", [HEADER, resume(parent, check, epoch=1), FACTS, digests("epoch", 1)])
    (found,) = find_breaks(chain / "fit-009" / "rank-0.jsonl")
    assert found.problem == problem
    assert moments(chain / "fit-009") == [("epoch", 1)]


def test_a_parent_that_was_edited_is_said(chain):
    path = chain / "fit-001" / "rank-0.jsonl"
    path.write_text(path.read_text().replace('"step":0', '"step":1'))
    (*_, found) = find_breaks(chain / "fit-003" / "rank-0.jsonl")
    assert found.problem is None
    assert "does not fit its check" in find_breaks(chain / "fit-003" / "rank-0.jsonl")[0].problem


def test_reasons_that_are_found_late_belong_to_the_break(chain):
    """Unless the batches after which they were found were trained again."""
    late = partial(resume, "", "")
    first = (chain / "fit-001" / "rank-0.jsonl").read_text().splitlines()[3][-18:-2]
    records = [HEADER, resume("../fit-001", first, epoch=1, inexact=["Early."]), FACTS]
    records += [late(epoch=1, inexact=["Late.", "Early."]), digests("epoch", 1)]
    records += [late(epoch=2, inexact=["Again."]), digests("epoch", 2, 7)]
    checks = write(chain / "fit-007", records)
    records = [HEADER, resume("../fit-007", checks[4], epoch=2), FACTS, digests("epoch", 2)]
    records += [digests("final", 2), late(epoch=2, inexact=["Last."]), END]
    write(chain / "fit-008", records)
    breaks = find_breaks(chain / "fit-008" / "rank-0.jsonl")
    assert [found.inexact for found in breaks] == [("Early.", "Late."), ("Last.",)]
    assert moments(chain / "fit-008") == STRAIGHT
    comparison = compare_ledgers(*(read_ledger(chain / name) for name in ("fit-000", "fit-008")))
    assert comparison.equal
    assert "Rank 0: this run was not resumed exactly there: Last." in format_comparison(comparison)


def test_a_record_is_found_anywhere_in_the_chain(chain):
    file = chain / "fit-003" / "rank-0.jsonl"
    first = (chain / "fit-001" / "rank-0.jsonl").read_text().splitlines()[4]
    assert holds_record(file, first[-18:-2])
    assert not holds_record(chain / "fit-000" / "rank-0.jsonl", first[-18:-2])
    assert not holds_record(file, "0" * 16)
