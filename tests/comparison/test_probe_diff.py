"""The probes of one batch in two runs, place by place."""

from dataclasses import replace

from lightning_d9m.comparison.probe_diff import OTHER, compare_batches
from lightning_d9m.ledger.format.frames import Batch, Layouts
from lightning_d9m.ledger.format.records import ProbeLayout


def make_batch(places, *, step=7, offset=0):
    """A batch whose places are given as ``{(kind, name, call): digit of the digest}``."""
    layouts = Layouts()
    layouts.add(ProbeLayout(0, tuple(places)))
    digests = b"".join(bytes([digit] * 16) for digit in places.values())
    return Batch(1, step, 3, offset, (layouts.get(0),), digests)


A, B, C = ("output", "a", 0), ("output", "b", 0), ("gradient", "a", 0)
EARLIER = make_batch({A: 1, B: 2, C: 3}, offset=10)


def test_equal_digests_are_counted():
    found = compare_batches(EARLIER, make_batch({A: 1, B: 2, C: 3}))
    assert (found.epoch, found.step, found.batch) == (1, 7, 3)
    assert (found.places, found.count, found.differing, found.by_kind) == (3, 0, [], {})


def test_digests_that_differ_are_listed():
    found = compare_batches(EARLIER, make_batch({A: 1, B: 4, C: 5}))
    assert (found.places, found.count) == (3, 2)
    assert found.differing == [(11, *B, "02" * 16, "04" * 16), (12, *C, "03" * 16, "05" * 16)]
    assert found.by_kind == {"output": (1, 2), "gradient": (1, 1)}


def test_a_place_that_a_batch_has_twice_is_compared_twice():
    """Only a forged ledger has it: probes count the calls of a place."""
    layouts = EARLIER.layouts * 2
    for other in (bytes(16), EARLIER.digests[16:32]):
        one = replace(EARLIER, layouts=layouts, digests=EARLIER.digests * 2)
        changed = replace(one, digests=other + one.digests[16:])
        assert [place.name for place in compare_batches(one, changed).differing] == ["a"]
        more = replace(
            changed, layouts=(*layouts, *EARLIER.layouts), digests=one.digests + EARLIER.digests
        )
        assert compare_batches(changed, more).count == 1


def test_places_of_one_run_are_listed_and_the_others_are_compared_by_name():
    later = make_batch({C: 3, A: 9, ("loss", "loss", 0): 6}, offset=20)
    found = compare_batches(EARLIER, later)
    assert (found.places, found.count) == (2, 1)
    assert found.differing == [(10, *A, "01" * 16, "09" * 16)]
    assert found.only_expected == [(11, *B, "02" * 16, None)]
    assert found.only_actual == [(22, "loss", "loss", 0, None, "06" * 16)]


def test_another_step_is_a_difference_of_its_own():
    found = compare_batches(EARLIER, make_batch({A: 1, B: 2, C: 3}, step=8))
    assert (found.places, found.count, found.step) == (4, 1, 8)
    assert found.differing == [(10, OTHER, "global step", 0, "7", "8")]
