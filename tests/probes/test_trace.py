"""Probes: places in order of execution, digests of what was there at that moment, few records."""

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_d9m.errors import DigestError
from lightning_d9m.hashing.digest import DigestQueue, digest, digest_value
from lightning_d9m.hashing.nested_values import list_pytree_leaves
from lightning_d9m.probes.trace import (
    RECORD_PLACES,
    ProbeCollector,
    ProbePoint,
    Trace,
    find_difference,
    monitor,
    monitors_heard,
)

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - as users write them


@dataclass
class Sample:
    image: object
    label: object


def write_batches(*batches):
    """Return the records of batches, each a list of (kind, name, value)."""
    records = []
    probes = ProbeCollector(lambda record: records.append(record.as_record()))
    for number, values in enumerate(batches):
        probes.begin(ProbePoint(0, number, number))
        for kind, name, value in values:
            probes.add(kind, name, value)
        probes.end()
    probes.close()
    return records


def hexed(record):
    return record["digests"].hex()


def paths(value):
    return [path for path, _ in list_pytree_leaves(value)]


def test_every_kind_of_container_has_leaves():
    x = torch.ones(2)
    assert paths(x) == [""]
    assert paths({"a": x, "b": {"c": [x, (x, 1)]}}) == ["a", "b.c.0", "b.c.1.0", "b.c.1.1"]
    assert paths(Pair(x, 2)) == ["left", "right"]
    assert paths(Sample(x, [x])) == ["image", "label.0"]
    assert paths(OrderedDict(z=x)) == ["z"]
    assert paths(deque([x, 1])) == ["0", "1"]
    assert paths(deque([1, 2])) == ["0", "1"]  # as a whole it has no digest


def test_a_batch_of_a_class_of_its_own_has_its_attributes():
    """Lightning moves an object with a method `to`; others, modules too, are leaves."""

    class Graph:
        def __init__(self):
            self.x, self.edges, self.number = torch.ones(2), [torch.ones(1)], 3
            self.parents = [self, self]

        def to(self, device):
            return self

    assert paths({"graph": Graph(), "module": nn.Linear(1, 1), "class": Graph}) == [
        "graph.x",
        "graph.edges.0",
        "graph.number",
        "graph.parents.0",
        "graph.parents.1",
        "module",
        "class",
    ]


@pytest.mark.parametrize(
    "value", ["text", 1, 1.5, None, [], {}, ["a", "b"], (1, None), {1, 2}, b""]
)
def test_what_holds_only_plain_values_is_one_leaf(value):
    assert list_pytree_leaves(value) == [("", value)]


def test_calls_of_a_place_are_counted_within_a_batch():
    x = torch.ones(2)
    records = write_batches([("output", "a", x), ("output", "b", x), ("output", "a", x)])
    assert records[0]["places"] == [("output", "a", 0), ("output", "b", 0), ("output", "a", 1)]


def test_a_layout_is_written_once():
    x = torch.ones(2)
    first, other = [("output", "a", x)], [("output", "b", x)]
    records = write_batches(first, first, other, first)
    assert [r["kind"] for r in records] == [
        "layout", "probes", "probes", "layout", "probes", "probes",
    ]  # fmt: skip
    assert [r["layout"] for r in records if r["kind"] == "probes"] == [0, 0, 1, 0]


def test_digests_are_those_of_the_moment():
    x = torch.zeros(3)
    probes, records = None, []
    probes = ProbeCollector(lambda record: records.append(record.as_record()))
    probes.begin(ProbePoint(1, 2, 3))
    probes.add("input", "a", x)
    before = digest(x)
    x.add_(1)
    probes.add("output", "a", x)
    probes.end()
    assert hexed(records[1]) == before + digest(x)
    assert (records[1]["epoch"], records[1]["step"], records[1]["batch"]) == (1, 2, 3)


def test_values_that_are_no_tensors_have_digests_and_others_count_by_their_type():
    meta = torch.ones(2, device="meta")
    plain = ("batch", "batch", {"x": torch.ones(1), "text": "a", "no": None})
    records = write_batches([plain, ("output", "a", [meta, object()])])
    names = [place[1] for place in records[0]["places"]]
    assert names == ["batch:x", "batch:text", "batch:no", "a:0", "a:1"]
    others = map(digest_value, ("a", None, torch.Tensor, object))
    assert hexed(records[1]) == digest(torch.ones(1)) + "".join(others)


def test_tensors_together_survive_one_without_a_digest():
    records = []
    probes = ProbeCollector(lambda record: records.append(record.as_record()))
    probes.begin(ProbePoint(0, 0, 0))
    x = torch.ones(2)
    probes.add_tensors("weight", {"a": x, "b": torch.ones(1, device="meta")})
    probes.end()
    assert hexed(records[1]) == digest(x) + digest_value(torch.Tensor)


def test_a_batch_with_many_places_is_written_in_parts():
    x = torch.ones(1)
    records = write_batches([("op", "a", x)] * (RECORD_PLACES + 10))
    sizes = [len(r["digests"]) // 16 for r in records if r["kind"] == "probes"]
    assert sizes == [RECORD_PLACES, 10]
    assert tuple(records[2]["places"][0]) == ("op", "a", RECORD_PLACES)


def test_outside_batches_and_when_paused_nothing_is_taken():
    records = []
    probes = ProbeCollector(lambda record: records.append(record.as_record()))
    probes.add("output", "a", torch.ones(1))
    probes.begin(ProbePoint(0, 0, 0))
    with probes.paused():
        probes.add("output", "a", torch.ones(1))
        probes.add_tensors("weight", {"a": torch.ones(1)})
    probes.close()
    assert records == []


@pytest.mark.parametrize("size", [0, 1, 16383, 16384, 16385, 131072, 131073, 64 * 131072 + 1])
def test_a_queue_gives_the_digests_of_the_moment(size):
    x = torch.arange(size).to(torch.uint8)
    queue, expected = DigestQueue(), []
    for _ in range(3):
        queue.add([x])
        expected.append(digest(x))
        x += 1
    assert queue.fetch() == expected
    assert size == 0 or len(set(expected)) == 3


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


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.data())
def test_the_first_difference_of_traces_is_found(values, data):
    place = data.draw(st.integers(0, len(values) - 1))
    expected, actual = Trace(), Trace()
    for number, value in enumerate(values):
        expected.add("output", f"m{value}", torch.tensor([number]))
        actual.add("output", f"m{value}", torch.tensor([-1 if number == place else number]))
    difference = find_difference(expected, actual)
    assert difference is not None
    assert (difference[0], difference[3]) == (expected.places[place], 1)
    assert find_difference(expected, expected) is None


def test_a_place_that_only_one_trace_has_is_a_difference():
    expected, actual = Trace(), Trace()
    actual.add("output", "a", 1)
    difference = find_difference(expected, actual)
    assert difference == (("output", "a", 0), None, digest_value(1), 1)
