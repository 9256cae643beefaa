"""Traces of probes are compared place by place: aligned, ordered, counted, in bounded memory."""

import tracemalloc
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_runs import make_digests, make_facts, make_header, write_rank
from msgspec.structs import replace

from lightning_d9m.engine.ledger.differences import (
    find_difference,
    header_differences,
    run_refusals,
)
from lightning_d9m.engine.ledger.folder import create_ledger_folder, read_ledger
from lightning_d9m.engine.ledger.format.records import (
    End,
    Evaluation,
    Header,
    RankDrift,
    RunFacts,
    StepDigests,
    list_compared,
)
from lightning_d9m.engine.ledger.stack import stack_differences
from lightning_d9m.tools.comparison.ledgers import compare_ledgers

PLACES = [
    ("batch", "0", 0),
    ("output", "layers.0", 0),
    ("output", "layers.1", 0),
    ("output", "layers.0", 1),
    ("loss", "loss", 0),
    ("gradient", "layers.1.weight", 0),
    ("gradient", "layers.0.weight", 0),
]


ZERO, ONE, TWO = "1" * 32, (1.0).hex(), (2.0).hex()
DRIFT = RankDrift(moment="epoch", epoch=0, step=1, rank=1, group="weights", name="a")
COMPARED = (
    make_header(world_size=2),
    make_facts(),
    make_digests("epoch", 0, loss=ONE, scalars={"a": ONE}),
    Evaluation(
        name="test", epoch=0, step=1, batches=2, outputs=ZERO, problem="a", scalars={"a": ONE}
    ),
    StepDigests(epoch=0, step=1, totals={"weights": ZERO}, entries={"weights": b"abcd"}),
    End(status="finished", error="a", drift=DRIFT, reason="b"),
)


def digest_of(place, batch):
    return f"{abs(hash((place, batch))) % 2**64:032x}"


class Tracer:
    """Collects the records of a trace as the probes would write them."""

    def __init__(self):
        self.records = []
        self.layouts = {}

    def add(self, batch, places=PLACES, *, step=None, changed=(), part=4096):
        """Add the records of a batch; ``changed`` places get another digest."""
        for at in range(0, len(places), part):
            some = tuple(places[at : at + part])
            if some not in self.layouts:
                self.layouts[some] = len(self.layouts)
                entries = [list(place) for place in some]
                layout = {"kind": "layout", "id": self.layouts[some], "places": entries}
                self.records.append(layout)
            digests = ["f" * 32 if p in changed else digest_of(p, batch) for p in some]
            record = {"kind": "probes", "epoch": 0, "batch": batch, "layout": self.layouts[some]}
            record["digests"] = bytes.fromhex("".join(digests))
            self.records.append(record | {"step": batch if step is None else step})
        return self

    def __call__(self, _, records):
        """Put the trace before the digests of the first epoch."""
        records[3:3] = self.records


def write_trace(parent, tracer):
    return write_rank(create_ledger_folder(parent), tracer.records, end=False)


def compare(one, other, **options):
    (rank,) = compare_ledgers(read_ledger(one), read_ledger(other), **options).ranks
    return rank


def traced(numbers, **options):
    tracer = Tracer()
    for number in numbers:
        tracer.add(number, **options)
    return tracer


def test_the_first_divergence_is_first_in_order_of_execution(runs):
    """Not in the order of names; all that differ in its batch are listed."""
    changed = {PLACES[6], PLACES[3]}
    actual = traced(range(2)).add(2, changed=changed).add(3, changed=set(PLACES))
    one, other = runs.write(edit=traced(range(4))), runs.write(edit=actual)
    (found,) = compare_ledgers(read_ledger(one), read_ledger(other)).divergences
    assert (found.rank, found.moment, found.epoch, found.step, found.batch) == (0, "batch", 0, 2, 2)
    assert (found.kind, found.name, found.call, found.position) == ("output", "layers.0", 1, 3)
    assert (found.expected, found.actual) == (digest_of(PLACES[3], 2), "f" * 32)
    assert [(p.position, p.kind, p.name) for p in found.places] == [
        (3, "output", "layers.0"),
        (6, "gradient", "layers.0.weight"),
    ]
    assert (found.count, found.compared, found.one_sided) == (2, 7, ())
    rank = compare(one, other)
    assert (rank.differing_batches, rank.differing_places, rank.places) == (2, 9, 28)
    assert rank.divergence.names == ("layers.0 (call 1)",)
    assert rank.divergence.by_kind == {"output": (1, 3), "gradient": (1, 2)}


def test_places_of_one_run_alone(runs):
    """They are not a divergence; the others are compared."""
    fewer = [place for place in PLACES if place[1] != "layers.1"]
    more = [*PLACES, ("monitor", "mine", 0)]
    one = runs.write(edit=traced(range(3), places=fewer, changed=PLACES[6:]))
    rank = compare(one, runs.write(edit=traced(range(3), places=more)))
    assert (rank.expected.places, rank.actual.places) == (0, 6)
    assert rank.actual.first_place == "output layers.1 in batch 0 of epoch 0 (step 0)"
    assert (rank.places, rank.differing_places) == (18, 3)
    assert [place.name for place in rank.divergence.one_sided] == ["layers.1", "mine"]


def test_another_step_of_the_same_batch_is_a_difference(runs):
    rank = compare(runs.write(edit=traced([4])), runs.write(edit=traced([4], step=3)))
    assert (rank.divergence.name, rank.divergence.expected) == ("global step", "4")


@given(
    st.lists(st.lists(st.integers(0, 6), unique=True, min_size=1), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 6))),
    st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_any_traces(tmp_path_factory, orders, part, changed, times):
    """What differs is what was changed, whatever the order and the parts.

    Only a forged ledger has a place twice in a batch: probes count the calls of a place.
    """
    folder = tmp_path_factory.mktemp("pair")
    one, other = Tracer(), Tracer()
    expected = 0
    for number, order in enumerate(orders):
        places = [PLACES[n] for n in order]
        flipped = {PLACES[n] for batch, n in changed if batch == number and n in order}
        expected += times * len(flipped)
        for _ in range(times):
            one.add(number, sorted(places))
            other.add(number, places, part=part, changed=flipped)
    paths = [write_trace(folder, tracer) for tracer in (one, other)]
    rank = compare(*paths)
    assert rank.differing_places == expected
    assert rank.places == times * sum(map(len, orders))
    seen = []
    assert compare(*paths, watch=lambda *pair: seen.append(pair)) == rank
    assert sum(one.size for _, one, other, _ in seen if one and other) == rank.places


RECORDS = st.dictionaries(st.tuples(st.integers(0, 3), st.sampled_from("abc")), st.integers(0, 1))


@given(RECORDS, RECORDS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_any_evaluations(tmp_path_factory, one, other, draws):
    """By step and name, within a step in any order, as threads may write them."""
    folder, paths = tmp_path_factory.mktemp("pair"), []
    for run in (one, other):
        keys = draws.sample(sorted(run), len(run))
        tracer = Tracer()
        tracer.records = [
            {"kind": "evaluation", "epoch": 0, "step": step, "name": name}
            | {"batches": run[step, name], "outputs": "0" * 32}
            for step, name in sorted(keys, key=lambda key: key[0])
        ]
        paths.append(write_trace(folder, tracer))
    rank = compare(*paths)
    both = one.keys() & other.keys()
    differing = [key for key in both if one[key] != other[key]]
    assert (rank.records, rank.differing) == (len(both), len(differing))
    assert (rank.divergence is None) == (not differing)
    assert not differing or rank.divergence.step == min(differing)[0]
    alone = (len(one.keys() - both), len(other.keys() - both))
    assert (rank.expected.records, rank.actual.records) == alone


def test_long_traces_are_streamed(tmp_path):
    """Four times the batches, the same memory, though all differ."""
    peaks = []
    for count in (250, 1000):
        paths = [
            write_trace(tmp_path, traced(range(count), changed=changed)) for changed in ((), PLACES)
        ]
        tracemalloc.start()
        assert compare(*paths).differing_places == 7 * count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**20


def change(value):
    """Return another value of the same type."""
    if isinstance(value, Mapping):
        return {key: change(own) for key, own in value.items()}
    if isinstance(value, tuple):
        return ("op", "b", 0) if value[0] == "op" else (*value, value[-1])
    if isinstance(value, RankDrift):
        return replace(value, step=value.step + 1)
    if isinstance(value, int):
        return not value if isinstance(value, bool) else value + 1
    known = {"finished": "failed", ONE: TWO, ZERO: "0" * 32, None: ONE, b"abcd": b"abce"}
    return known.get(value) or f"{int(value[0] == '0')}{value[1:]}"


@pytest.mark.parametrize("record", COMPARED, ids=lambda record: record.kind)
def test_each_field_is_compared_unless_it_says_that_it_is_not(record):
    """A field that a later version adds is compared without another line of code."""
    seen = []
    for name in record.__struct_fields__:
        changed = replace(record, **{name: change(getattr(record, name))})
        if isinstance(record, Header):
            stacks = stack_differences(record.stack, changed.stack)
            found = stacks or any(header_differences(record, changed))
        elif isinstance(record, RunFacts):
            found = run_refusals(record, changed)
        else:
            found = find_difference(record, changed)
        seen += [name] if found else []
    assert seen == list_compared(type(record))
