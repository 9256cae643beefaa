"""Probes: places in order of execution, digests of what was there at that moment, few records."""

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from threading import Lock

import pytest
import torch
from torch import nn

from lightning_d9m.engine.hashing.digest import DigestQueue, digest, digest_value
from lightning_d9m.engine.hashing.nested_values import list_pytree_leaves
from lightning_d9m.engine.probes.trace import (
    RECORD_PLACES,
    ProbeCollector,
    ProbePoint,
    monitor,
    monitors_heard,
)
from lightning_d9m.errors import DigestError

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - as users write them
X = torch.ones(2)


@dataclass
class Sample:
    image: object
    label: object


class Graph:
    """Lightning moves an object with a method `to`."""

    def __init__(self):
        self.x, self.edges, self.number = X, [X], 3
        self.parents = [self, self]

    def to(self, device):
        return self


CONTAINERS = [
    (X, [""]),
    ({"a": X, "b": {"c": [X, (X, 1)]}}, ["a", "b.c.0", "b.c.1.0", "b.c.1.1"]),
    (Pair(X, 2), ["left", "right"]),
    (Sample(X, [X]), ["image", "label.0"]),
    (OrderedDict(z=X), ["z"]),
    (deque([X, 1]), ["0", "1"]),
    (
        {"graph": Graph(), "module": nn.Linear(1, 1), "class": Graph},
        [*(f"graph.{n}" for n in ("x", "edges.0", "number", "parents.0", "parents.1")), "module",
         "class"],
    ),
    # What holds only plain values is one leaf.
    *((plain, [""]) for plain in ("a", 1, 1.5, None, [], {}, ["a", "b"], (1, None), {1, 2}, b"",
                                      deque([1, 2]))),
]  # fmt: skip


@pytest.mark.parametrize(("value", "paths"), CONTAINERS)
def test_every_kind_of_container_has_leaves(value, paths):
    assert [path for path, _ in list_pytree_leaves(value)] == paths


def write_batches(*batches):
    """Return the records of batches, each a list of (kind, name, value) or functions."""
    records = []
    probes = ProbeCollector(lambda record: records.append(record.as_record()))
    for number, values in enumerate(batches):
        probes.begin(ProbePoint(1, number, number))
        for value in values:
            if callable(value):
                value(probes)
            else:
                probes.add(*value)
        probes.end()
    probes.add("output", "outside batches", X)
    probes.close()
    return records


def hexed(record):
    return record["digests"].hex()


def test_places_are_counted_and_a_layout_is_written_once():
    first, other = [("output", "a", X)], [("output", "b", X)]
    records = write_batches(first, first, [*first, *other, *first], first)
    kinds = ["layout", "probes", "probes", "layout", "probes", "probes"]
    assert [r["kind"] for r in records] == kinds
    assert [r["layout"] for r in records if r["kind"] == "probes"] == [0, 0, 1, 0]
    assert records[3]["places"] == [("output", "a", 0), ("output", "b", 0), ("output", "a", 1)]
    assert [records[2][name] for name in ("epoch", "step", "batch")] == [1, 1, 1]


def test_digests_are_those_of_the_moment_whatever_the_values_are():
    """Values other than tensors have digests, too; some count by their type alone."""
    x, meta = torch.zeros(3), torch.ones(2, device="meta")
    before, after = digest(x), digest(x + 1)
    records = write_batches(
        [
            ("input", "a", x),
            lambda _: x.add_(1),
            ("batch", "b", {"x": x, "text": "a", "no": None}),
            ("output", "c", [meta, Lock()]),
            lambda probes: probes.add_leaves("weight", [("d", X), ("e", meta)]),
        ]
    )
    names = [place[1] for place in records[0]["places"]]
    assert names == ["a", "b:x", "b:text", "b:no", "c:0", "c:1", "d", "e"]
    of_type = digest_value(torch.Tensor)
    others = [digest_value("a"), digest_value(None), of_type, digest_value(type(Lock()))]
    assert hexed(records[1]) == "".join([before, after, *others, digest(X), of_type])
    assert records[1]["problem"].startswith("output c:0: ")


class Cache:
    """An object of a program, with a tensor."""

    def __init__(self, value, other=None):
        self.keys, self.other = value, other


def test_an_object_counts_by_what_pickle_would_save_of_it():
    def take(*made):
        return write_batches(*([("input", "a", value)] for value in made))[1:]

    one, same, other = take(Cache(X), Cache(X.clone()), Cache(X + 1))
    assert one["digests"] == same["digests"] != other["digests"]
    assert "problem" not in one
    # Beside what cannot be read, and within what holds itself.
    loop = Cache(X)
    loop.other = {"parent": loop}
    (locked, other), (looped,) = take(Cache(X, Lock()), Cache(X + 1, Lock())), take(loop)
    assert locked["digests"] != other["digests"]
    problem = "input a: value['other'] is of type _thread.lock, whose bytes are not defined."
    assert locked["problem"].startswith(problem)
    assert "value that holds itself" in looped["problem"]


def test_objects_that_hold_each_other_many_times_are_read_a_limited_number_of_times():
    value = Cache(X)
    for _ in range(64):
        value = Cache(value, value)
    (_, record) = write_batches([("input", "a", value)])
    assert "Cache, whose bytes are not defined" in record["problem"]


def test_a_batch_with_many_places_is_written_in_parts():
    records = write_batches([("op", "a", X)] * (RECORD_PLACES + 10))
    sizes = [len(r["digests"]) // 16 for r in records if r["kind"] == "probes"]
    assert sizes == [RECORD_PLACES, 10]
    assert tuple(records[2]["places"][0]) == ("op", "a", RECORD_PLACES)


def test_nothing_is_taken_while_probes_are_paused():
    def pause(probes):
        with probes.paused():
            probes.add("output", "a", X)
            probes.add_leaves("weight", [("a", X)])

    assert write_batches([pause]) == []


def test_a_queue_takes_none_of_the_tensors_if_one_has_no_digest():
    queue, freed = DigestQueue(), torch.ones(4)
    freed.untyped_storage().resize_(8)
    for other, problem in ((torch.ones(1, device="meta"), "meta"), (freed, "freed")):
        with pytest.raises(DigestError, match=problem):
            queue.add([torch.ones(1), other])
    queue.add([torch.ones(1)])
    assert queue.fetch() == [digest(torch.ones(1))]


def test_a_monitor_returns_what_it_is_given_and_tells_who_listens():
    heard = []
    x = torch.ones(2, requires_grad=True)
    with monitors_heard(lambda name, value: heard.append((name, value))):
        assert monitor(x, "x") is x
        monitor(x * 2, "twice").sum().backward()
        assert monitor(None, "nothing") is None
    monitor(1, "after")
    assert [name for name, _ in heard] == ["x", "twice", "nothing"]
    assert x.grad.tolist() == [2, 2]
