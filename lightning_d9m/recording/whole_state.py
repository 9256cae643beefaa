"""Digests of whole tensors of which each rank holds a part, from the parts of all ranks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_d9m.hashing.digest import digest
from lightning_d9m.hashing.shards import ShardParts, combine_shards, read_shards
from lightning_d9m.hashing.training_state import PartialSnapshot, Snapshot
from lightning_d9m.ranks.ranks import Ranks

_Place = tuple[str, str]  # group and name
# Bytes of each rank that are gathered at a time: every rank holds those of all.
_ROUND = 2**20


@dataclass(frozen=True)
class _Entry:
    """A rank's description of its part of a tensor, or of a value that belongs to one.

    Attributes:
        ranks: The ranks that together hold the tensor once.
        header: The header of its digest, as text; the digest itself, of a value.
        size: The bytes of the tensor; None for a value.
        begin: The first byte that the rank holds.
        lengths: The bytes of the parts that it sends.
    """

    ranks: tuple[int, ...]
    header: str
    size: int | None = None
    begin: int = 0
    lengths: tuple[int, int, int] = (0, 0, 0)


_Table = dict[_Place, _Entry]


def complete_snapshot(partial: PartialSnapshot, ranks: Ranks) -> Snapshot:
    """Return the snapshot with the digests of whole tensors; every rank calls this.

    Of a tensor that is divided along its first dimension, ranks gather the digests of chunks and
    the bytes of chunks that two of them share. A tensor that is divided otherwise is gathered on
    each rank, one after the other.

    Raises:
        DigestError: If a tensor has no digest, or its parts do not cover it.
    """
    if not (partial.shards or partial.owners or partial.scattered):
        return partial.finish()
    read = ranks.raise_on_all(lambda: read_shards(partial.shards.values()))
    own = dict(zip(partial.shards, read, strict=True))
    tables = [_decode(row) for row in ranks.gather_bytes(_encode(_describe(partial, own)))]
    wanted = _select(tables, ranks.rank)
    digests = {place: entry.header for place, entry in wanted.items() if entry.size is None}
    for places in _divide_into_rounds(tables):
        payload = b"".join(b"".join(own[place][1:]) for place in places if place in own)
        rows = ranks.gather_bytes(payload)
        found = ranks.raise_on_all(lambda: _combine(tables, places, rows, wanted))  # noqa: B023 - called here
        digests.update(found)
    for place, tensor in partial.scattered.items():
        with torch.no_grad():
            digests[place] = digest(tensor.full_tensor())  # type: ignore[attr-defined]
    return partial.finish(digests)


def _describe(partial: PartialSnapshot, own: Mapping[_Place, ShardParts]) -> _Table:
    table = {}
    for place, shard in partial.shards.items():
        _, *parts = own[place]
        head, leaves, tail = map(len, parts)
        header = shard.header.decode()
        table[place] = _Entry(shard.ranks, header, shard.size, shard.begin, (head, leaves, tail))
    for (group, name), shard in partial.owners.items():
        table[group, name] = _Entry(shard.ranks, partial.groups[group][name])
    return table


def _encode(table: _Table) -> bytes:
    groups = list(dict.fromkeys(entry.ranks for entry in table.values()))
    numbers = {ranks: number for number, ranks in enumerate(groups)}
    entries = [
        [*place, numbers[own.ranks], own.header, own.size, own.begin, own.lengths]
        for place, own in table.items()
    ]
    return json.dumps([groups, entries]).encode()


def _decode(row: bytes) -> _Table:
    groups, entries = json.loads(row)
    return {
        (group, name): _Entry(tuple(groups[number]), header, size, begin, tuple(lengths))
        for group, name, number, header, size, begin, lengths in entries
    }


def _select(tables: Sequence[_Table], rank: int) -> _Table:
    """Return what this rank records: its own entries, and those of the ranks it shares with."""
    selected = dict(tables[rank])
    for table in tables:
        for place, entry in table.items():
            if rank in entry.ranks:
                selected.setdefault(place, entry)
    return selected


def _divide_into_rounds(tables: Sequence[_Table]) -> Iterator[list[_Place]]:
    """Yield the places whose parts are gathered together, the same on all ranks."""
    places = dict.fromkeys(
        place for table in tables for place, entry in table.items() if entry.size is not None
    )
    chosen: list[_Place] = []
    filled = [0] * len(tables)
    for place in places:
        lengths = [sum(table[place].lengths) if place in table else 0 for table in tables]
        if chosen and max(map(sum, zip(filled, lengths, strict=True))) > _ROUND:
            yield chosen
            chosen, filled = [], [0] * len(tables)
        chosen.append(place)
        filled = list(map(sum, zip(filled, lengths, strict=True)))
    if chosen:
        yield chosen


def _combine(
    tables: Sequence[_Table], places: Sequence[_Place], rows: Sequence[bytes], wanted: _Table
) -> dict[_Place, str]:
    """Return the digests at places from what each rank has sent for them."""
    received: dict[_Place, dict[int, ShardParts]] = {}
    for rank, (table, row) in enumerate(zip(tables, rows, strict=True)):
        at = 0
        for place in places:
            if place not in table:
                continue
            entry = table[place]
            parts = []
            for length in entry.lengths:
                parts.append(row[at : at + length])
                at += length
            if place in wanted and rank in wanted[place].ranks:
                received.setdefault(place, {})[rank] = ShardParts(entry.begin, *parts)
    return {
        place: combine_shards(
            wanted[place].header.encode(), wanted[place].size or 0, list(received[place].values())
        )
        for place in places
        if place in wanted
    }
