"""How a rank that waits for a sum finds out that the others are somewhere else, in threads."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_d9m.errors import RankLostError, RanksDisagreeError
from lightning_d9m.horovod import communicator as wire_module
from lightning_d9m.horovod.communicator import CollectiveIntent, Communicator

BACKWARD, BARRIER = CollectiveIntent("the backward pass"), CollectiveIntent("the barrier 'x'")


class Hall:
    """Where the ranks meet: the nth call of one rank is paired with the nth of every other."""

    def __init__(self, size):
        self.size = size
        self.changed = threading.Condition()
        self.met = {}

    def meet(self, kind, number, rank, tensor):
        with self.changed:
            self.met.setdefault((kind, number), {})[rank] = tensor
            self.changed.notify_all()

    def everyone(self, kind, number):
        """What all ranks brought, in rank order; None as long as one is missing."""
        found = self.met.get((kind, number), {})
        return [found[rank] for rank in range(self.size)] if len(found) == self.size else None

    def wait_for(self, test):
        with self.changed:
            assert self.changed.wait_for(test, timeout=60)


class Pending:
    def __init__(self, hall, kind, number, combine):
        self.hall, self.kind, self.number, self.combine = hall, kind, number, combine

    def is_done_within(self, seconds):
        found = (self.kind, self.number)
        with self.hall.changed:
            return self.hall.changed.wait_for(
                lambda: self.hall.everyone(*found) is not None, max(seconds, 0)
            )

    def get_result(self):
        return self.combine(self.hall.everyone(self.kind, self.number))


class Transport:
    """One rank's door to the hall."""

    supports_unbounded_wait = True

    def __init__(self, hall, rank):
        self.hall, self.rank, self.calls = hall, rank, {}

    def _start(self, kind, tensor, combine):
        number = self.calls[kind] = self.calls.get(kind, -1) + 1
        self.hall.meet(kind, number, self.rank, tensor.clone())
        return Pending(self.hall, kind, number, combine)

    def sum(self, tensor, name):
        return self._start("sum", tensor, lambda all_: torch.stack(all_).sum(0))

    def minimise(self, tensor, name):
        return self._start("talk", tensor, lambda all_: torch.stack(all_).amin(0))

    def gather(self, tensor, name):
        return self._start("gather", tensor, torch.cat)


class Late:
    """A sum that is on its way, and here only once the asker has looked at an answer."""

    def __init__(self, pending, wire):
        self.pending, self.wire = pending, wire
        self.asked = False

    def is_done_within(self, seconds):
        self.asked |= self.wire._question is not None
        if self.asked and self.wire._question is None:
            return self.pending.is_done_within(60)
        return False

    def get_result(self):
        return self.pending.get_result()


@pytest.fixture
def ranks(monkeypatch):
    """Return a function that runs each function as a rank: results, or what it raised."""
    monkeypatch.setattr(wire_module, "_SLICE_SECONDS", 0.01)

    def run(*functions):
        hall = Hall(len(functions))
        wires = []
        for rank in range(len(functions)):
            module = types.SimpleNamespace(
                rank=lambda rank=rank: rank,
                size=lambda: len(functions),
                is_initialized=lambda: True,
            )
            wires.append(Communicator(module, grace=60.0))
            wires[-1]._transport = Transport(hall, rank)

        def attempt(function, wire):
            try:
                return function(wire, hall)
            except (RanksDisagreeError, RankLostError) as error:
                return error

        with ThreadPoolExecutor(len(functions)) as pool:
            return list(pool.map(attempt, functions, wires))

    return run


def backward(wire, agree=None):
    """Sum a one over the ranks as a backward pass does."""
    pending = wire.start(torch.ones(1), "d9m.bucket.0")
    wire.finish(pending, BACKWARD.doing, agree or (lambda: wire.agree(BACKWARD)))


def has_asked(hall, rank):
    return lambda: any(kind == "talk" and rank in met for (kind, _), met in hall.met.items())


def test_a_rank_that_is_only_slow_is_waited_for(ranks):
    """The others ask; what they asked is answered at the next agreement, and all go on."""

    def patient(wire, hall):
        for _ in range(3):
            backward(wire, pytest.fail)
        wire.agree(BARRIER)
        return wire.gather_objects(wire.rank)

    def slow(wire, hall):
        hall.wait_for(has_asked(hall, 0))
        hall.wait_for(has_asked(hall, 1))
        return patient(wire, hall)

    assert ranks(patient, patient, slow) == [[0, 1, 2]] * 3


def test_a_rank_at_a_barrier_and_ranks_in_a_backward_pass_hear_of_each_other(ranks):
    """Who claims something is found by those who only ask, and the other way round."""

    def waiting(wire, hall):
        backward(wire)

    def elsewhere(wire, hall):
        wire.agree(BARRIER)

    found = ranks(waiting, elsewhere, waiting)
    assert [type(error) for error in found] == [RanksDisagreeError] * 3
    assert found[0].claims == (BACKWARD.doing, BARRIER.doing, BACKWARD.doing)


def test_a_rank_that_raises_is_heard_in_a_backward_pass(ranks):
    def waiting(wire, hall):
        backward(wire)

    def raising(wire, hall):
        wire.announce(ValueError("bad"))

    error, nothing = ranks(waiting, raising)
    assert "rank 1: ends with ValueError: bad" in str(error)
    assert nothing is None


def test_a_sum_that_another_rank_has_finished_is_on_its_way(ranks):
    """The other rank is at a barrier already: no reason to claim anything."""

    def behind(wire, hall):
        pending = Late(wire.start(torch.ones(1), "d9m.bucket.0"), wire)
        wire.finish(pending, BACKWARD.doing, pytest.fail)
        wire.agree(BARRIER)
        return pending.asked

    def ahead(wire, hall):
        backward(wire, pytest.fail)
        wire.agree(BARRIER)

    assert ranks(behind, ahead) == [True, None]


def test_an_agreement_that_never_comes_ends_with_an_error(ranks):
    """Gloo would let it lie: the limit is ours."""

    def alone(wire, hall):
        wire._limit = 0.0
        wire.agree(BARRIER)

    error, _ = ranks(alone, lambda wire, hall: None)
    assert isinstance(error, RankLostError)
    assert "It took too long" in str(error)
