"""After the first difference, digests that differ in values alone are counted without parsing."""

import random

import pytest

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format import reader


def flip(record):
    record["groups"]["weights"]["layers.2.weight"] = "f" * 32


def turn(record):
    """A different order, which does not count."""
    groups = record["groups"]
    groups["weights"] = dict(reversed(groups["weights"].items()))


def rename(record):
    weights = record["groups"]["weights"]
    weights["e" * 32] = weights.pop("layers.2.bias")


def change_loss(record):
    record["loss"] = (0.5).hex()


def forget_loss(record):
    record["loss"] = None


def add_scalar(record):
    record["scalars"]["accuracy"] = (-0.25).hex()


def step_on(record):
    record["step"] += 1


CHANGES = (flip, turn, rename, change_loss, forget_loss, add_scalar, step_on, lambda _: None)


def count_both_ways(runs, changes):
    """Return how many records differ, parsed and not, and how many epochs were counted."""

    def edit(_, records):
        for record, change in zip(records[3:], changes, strict=False):
            change(record)

    epochs = len(changes)
    one, other = (read_ledger(runs.write(epochs, edit=own)) for own in (None, edit))
    ways = (compare_ledgers(one, other, watch=lambda *_: None), compare_ledgers(one, other))
    return [(rank.differing, rank.digests, rank.epochs) for way in ways for rank in way.ranks]


@pytest.mark.parametrize("seed", range(20))
def test_the_short_way_counts_what_the_long_one_does(runs, seed):
    changes = random.Random(seed).choices(CHANGES, k=12)
    parsed, unparsed = count_both_ways(runs, changes)
    assert parsed == unparsed


def test_another_order_of_names_is_no_difference_on_the_short_way(runs):
    counts = count_both_ways(runs, [flip, flip, turn, turn, flip])
    assert counts == [(3, 7, 5)] * 2


def test_what_differs_in_values_alone_is_parsed_until_its_names_are_known(runs, monkeypatch):
    def edit(_, records):
        for record in records[3:-2]:
            flip(record)

    one, other = runs.write(9), runs.write(9, edit=edit)
    parsed = []
    decode = reader.decode_record

    def record(body):
        parsed.append(body[:40])
        return decode(body)

    monkeypatch.setattr(reader, "decode_record", record)
    comparison = compare_ledgers(read_ledger(one), read_ledger(other))
    assert comparison.ranks[0].differing == 9
    # The first pair because it is described, the second so that its names are known.
    assert sum(body.startswith(b'{"kind":"digests","moment":"epoch"') for body in parsed) == 4


def test_what_is_malformed_is_found_on_the_short_way(runs):
    """Texts that differ in values alone, of which nobody has seen whether the rest is sound."""
    one, other = runs.write(4), runs.write(4, edit=lambda _, records: flip(records[3]))
    for folder, digit in ((one, b"1"), (other, b"2")):
        path = folder / "rank-0.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        broken = lines[5][: -len(b',"check":"0123456789abcdef"}\n')]
        broken = broken.replace(b'"layers.0.bias":"', b'"layers.0.bias" "', 1).replace(
            b'"loss":"0x1.', b'"loss":"0x1.' + digit, 1
        )
        check = lines[4][-len(b'0123456789abcdef"}\n') :][:16]
        lines[5], check = reader.chain_record(broken + b"}", check)
        path.write_bytes(b"".join(lines[:6]))
    with pytest.raises(LedgerError, match="is not JSON"):
        compare_ledgers(read_ledger(one), read_ledger(other))
