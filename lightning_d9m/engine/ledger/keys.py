"""Keys and positions of ledger records."""

from typing import TypeAlias

from lightning_d9m.engine.ledger.format.records import (
    Batch,
    Digests,
    End,
    Evaluation,
    Record,
    StepDigests,
)
from lightning_d9m.engine.ledger.kinds import ENDS, describe_batch
from lightning_d9m.text import describe_moment, escape

Key: TypeAlias = tuple[object, ...]
LedgerPosition: TypeAlias = tuple[int, int, int]
Item: TypeAlias = Record | Batch
LEDGER_START: LedgerPosition = (0, 0, 0)
# The fields that identify an evaluation.
_NAMED = ("epoch", "step", "name")
_LAST = 2**63  # beyond each epoch that a record can have


def record_key(record: Item) -> Key:
    """Return the key of a record within its rank; counterparts have equal keys."""
    # The step is not part of the key of an epoch's digests: two runs that end an epoch at different
    # steps differ in this record.
    if isinstance(record, Batch):
        return ("probes", record.epoch, record.batch)
    if isinstance(record, Digests):
        # A moment that a later version adds may occur several times in an epoch.
        counted = record.moment in {"initial", "epoch", *ENDS}
        return ("digests", record.moment, record.epoch, None if counted else record.step)
    if isinstance(record, StepDigests):
        return ("step", record.epoch, record.step)
    if isinstance(record, Evaluation):
        return (record.kind, *(getattr(record, name) for name in _NAMED))
    return (record.kind,)


def record_place(record: Item, previous: LedgerPosition) -> LedgerPosition:
    """Return the position of a record in the run: (epoch, phase of the epoch, step), ascending.

    Args:
        record: The record.
        previous: The position of the record before it, for kinds without an epoch and step.
    """
    if isinstance(record, Digests):
        # After all epochs: the last epoch that was trained may be any.
        if record.moment in ENDS:
            return (_LAST, 0, 0)
        phases = {"initial": (0, 0), "epoch": (2, 0)}
        return max(previous, (record.epoch, *phases.get(record.moment, (1, record.step))))
    if isinstance(record, End):
        return (_LAST, 1, 0)
    if isinstance(record, Evaluation):
        # It is compared after the next digests. A segment that ends before them has it earlier than
        # a run that trains on, and both need one place, so that they are paired.
        return max(previous, (record.epoch, 2, 0))
    if isinstance(record, Batch | StepDigests):
        # The last one has the step after it; the others have the step before it.
        return max(previous, (record.epoch, 1, record.step - isinstance(record, StepDigests)))
    return previous


def describe_record(record: Item) -> str:
    """Return a record in a few words, for people."""
    if isinstance(record, Digests):
        return describe_moment(record.moment, record.epoch, record.step)
    if isinstance(record, Batch):
        return f"{describe_batch(record.batch)} of epoch {record.epoch} (step {record.step})"
    if isinstance(record, StepDigests):
        return f"the state after step {record.step} (epoch {record.epoch})"
    if isinstance(record, Evaluation):
        named = [f"{name} {escape(getattr(record, name))}" for name in _NAMED]
        return " ".join([record.kind, *named])
    if isinstance(record, End):
        return f"the end of the fit (epoch {record.epoch}, step {record.step})"
    return "the facts of the run" if record.kind == "run" else "the header"
