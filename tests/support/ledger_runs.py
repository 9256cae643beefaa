"""Ledgers for the tests: small runs that are written as the callback would write them."""

import json
from hashlib import blake2b
from itertools import chain

import msgspec
import pytest

from lightning_d9m.engine.ledger.folder import create_ledger_folder, rank_path, read_ledger
from lightning_d9m.engine.ledger.format import records as schema
from lightning_d9m.engine.ledger.format.records import (
    CHAIN_START,
    Batch,
    Digests,
    End,
    Header,
    LoaderFacts,
    RunFacts,
    chain_record,
)
from lightning_d9m.engine.ledger.format.writer import LedgerWriter as TypedWriter
from lightning_d9m.tools.comparison.ledgers import compare_ledgers

NAMES = ("layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias")


def _digest(*parts):
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def parse_record(fields):
    """Return a record that is given as JSON values by name; digests of probes are bytes."""
    plain = msgspec.to_builtins(fields, builtin_types=(bytes,))
    return msgspec.convert(plain, schema.Record, builtin_types=(bytes,))


class LedgerWriter(TypedWriter):
    """Writes records that are given as JSON values by name, too."""

    def write(self, record):
        """Append one record."""
        super().write(parse_record(record) if isinstance(record, dict) else record)


def make_header(**changes):
    """Return a header with some fields changed."""
    fields = {
        "rank": 0,
        "world_size": 1,
        "fit": 0,
        "seed": 42,
        "created": "2026-01-01T00:00:00+00:00",
        "settings": {"seed": 42, "per_sample_rng": False, "threads": None},
        "stack": {"torch.version": "2.13.0", "device.driver": "560.35.03", "cpu.count": 8},
        "package": "0.1.0",
    }
    return Header(**(fields | changes))


def find_breaks(path):
    """Return the interruptions of the run that wrote one rank's file, and what is not read."""
    ledger = read_ledger(path)
    side = compare_ledgers(ledger, ledger).ranks[0].actual
    return side.breaks, side.problem


def make_facts(**changes):
    """Return the facts of a run with some fields changed."""
    fields = {
        "model": _digest("model"),
        "parameters": 1234,
        "train": (LoaderFacts(1437, 64, 23),),
        "trainer": {"precision": "32-true", "accumulate_grad_batches": 1},
    }
    return RunFacts(**(fields | changes))


def make_digests(moment, epoch, **changes):
    """Return digests that depend on the epoch, with some fields changed."""
    groups = {
        "weights": {name: _digest(name, epoch) for name in NAMES},
        "buffers": {},
        "optimizers": {f"0.exp_avg.{name}": _digest("m", name, epoch) for name in NAMES},
        "schedulers": {"0": _digest("scheduler", epoch)},
    }
    fields = {
        "moment": moment,
        "epoch": epoch,
        "step": 0 if moment == "initial" else 23 * (epoch + 1),
        "groups": groups,
        "totals": {group: _digest(entries) for group, entries in groups.items()},
        "loss": None if moment == "initial" else (1.0 / (epoch + 3)).hex(),
        "scalars": {} if moment == "initial" else {"train_loss": (1.0 / (epoch + 3)).hex()},
    }
    return Digests(**(fields | changes))


def make_records(epochs=3, *, status="finished", **header):
    """Return the typed records of one rank of a run."""
    last = epochs - 1
    return [
        make_header(**header),
        make_facts(),
        make_digests("initial", 0),
        *(make_digests("epoch", epoch) for epoch in range(epochs)),
        make_digests("final", last),
        End(status=status, epoch=last, step=23 * epochs),
    ]


def chain_lines(bodies):
    """Return lines with a valid chain over JSON texts that need not be records."""
    data, check = b"", CHAIN_START
    for body in bodies:
        line, check = chain_record(body, check)
        data += line
    return data


def write_lines(path, records):
    """Write records that need not be of the schema, with a valid chain; return the path."""
    path.write_bytes(
        chain_lines(json.dumps(record, separators=(",", ":")).encode() for record in records)
    )
    return path


def list_batches(ledger, rank=0):
    """Return (epoch, step, batch, [(place, digest)]) of each batch that was probed, in order."""
    batches = []
    for part in ledger.records(rank):
        if not isinstance(part, Batch):
            continue
        places, digests = chain.from_iterable(part.layouts), map(bytes.hex, part.list_digests())
        entries = list(zip(places, digests, strict=True))
        where = part.epoch, part.step, part.batch
        if batches and batches[-1][:3] == where:
            batches[-1][3].extend(entries)
        else:
            batches.append((*where, entries))
    return batches


def write_rank(folder, records, *, rank=0, end="finished", **header):
    """Write one rank's file: a header, records, typed or not, and the end; return the folder.

    The end has the place of the last state, and no end is written without its status.
    """
    header, records = {"stack": {}, "settings": {}} | header, [*records]
    states = [record for record in records if hasattr(record, "totals")]
    place = {name: getattr(states[-1], name) if states else 0 for name in ("epoch", "step")}
    with LedgerWriter(rank_path(folder, rank)) as writer:
        for record in (make_header(rank=rank, **header), *records):
            writer.write(record)
        if end:
            writer.write(End(status=end, **place))
    return folder


def make_weights(moment, epoch, weights, *, group="weights", **changes):
    """Return digests of one group alone, by name."""
    return Digests(
        moment=moment,
        epoch=epoch,
        **({"step": 9 * epoch + 9, "totals": {}, "groups": {group: weights}} | changes),
    )


def make_probes(places, batches):
    """Return the records of probes: of each batch, the first bytes of the digests of its places."""
    named = {"kind": "probes", "epoch": 0, "layout": 0}
    yield {"kind": "layout", "id": 0, "places": [[*place[:2], 0] for place in places]}
    for step, batch in enumerate(batches):
        digests = b"".join(bytes([value]) * 16 for value in batch)
        yield named | {"step": step, "batch": step, "digests": digests}


class Runs:
    """Writes runs below a folder."""

    header = staticmethod(make_header)
    facts = staticmethod(make_facts)
    digests = staticmethod(make_digests)
    records = staticmethod(make_records)

    def __init__(self, parent):
        self.parent = parent

    def write(self, epochs=3, *, edit=None, world_size=1, **header):
        """Write a run and return its folder.

        Args:
            epochs: Number of epochs.
            edit: Function of (rank, list of records as dicts) that changes the list in place.
            world_size: Number of ranks.
            header: Fields of the header that are changed.
        """
        folder = create_ledger_folder(self.parent)
        for rank in range(world_size):
            typed = make_records(epochs, rank=rank, world_size=world_size, **header)
            records = [record.as_record() for record in typed]
            if edit is not None:
                edit(rank, records)
            with LedgerWriter(rank_path(folder, rank)) as writer:
                for record in records:
                    writer.write(record)
        return folder


@pytest.fixture
def runs(tmp_path):
    """Write small runs into the test's own folder."""
    return Runs(tmp_path)
