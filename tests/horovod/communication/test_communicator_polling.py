"""Polls of a rank that waits for a sum while its peers do something else, in threads."""

import pickle
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_d9m.errors import RankLostError, RanksDisagreeError
from lightning_d9m.horovod.communication import communicator as communicator_module
from lightning_d9m.horovod.communication.communicator import Communicator
from lightning_d9m.horovod.communication.intents import CollectiveIntent
from lightning_d9m.horovod.communication.nccl_transport import StreamPending

BACKWARD, BARRIER = CollectiveIntent("the backward pass"), CollectiveIntent("the barrier 'x'")


class Network:
    """Pairs the nth call of one rank with the nth call of every other."""

    def __init__(self, size):
        self.size = size
        self.changed = threading.Condition()
        self.calls = {}

    def post(self, kind, number, rank, tensor):
        with self.changed:
            self.calls.setdefault((kind, number), {})[rank] = tensor
            self.changed.notify_all()

    def everyone(self, kind, number):
        """Return every rank's tensor in rank order; None while one is missing."""
        found = self.calls.get((kind, number), {})
        return [found[rank] for rank in range(self.size)] if len(found) == self.size else None

    def wait_for(self, test):
        with self.changed:
            assert self.changed.wait_for(test, timeout=60)


class Pending:
    def __init__(self, network, kind, number, combine):
        self.network, self.kind, self.number, self.combine = network, kind, number, combine

    def is_done_within(self, seconds):
        found = (self.kind, self.number)
        with self.network.changed:
            return self.network.changed.wait_for(
                lambda: self.network.everyone(*found) is not None, max(seconds, 0)
            )

    def get_result(self):
        return self.combine(self.network.everyone(self.kind, self.number))


class Transport:
    """One rank's connection to the network."""

    supports_unbounded_wait = True

    def __init__(self, network, rank):
        self.network, self.rank, self.calls = network, rank, {}

    def _start(self, kind, tensor, combine):
        number = self.calls[kind] = self.calls.get(kind, -1) + 1
        self.network.post(kind, number, self.rank, tensor.clone())
        return Pending(self.network, kind, number, combine)

    def sum(self, tensor, name):
        return self._start("sum", tensor, lambda all_: torch.stack(all_).sum(0))

    def minimize(self, tensor, name):
        return self._start("control", tensor, lambda all_: torch.stack(all_).amin(0))

    def gather(self, tensor, name):
        return self._start("gather", tensor, torch.cat)


class Late:
    """A sum whose result arrives only after the rank has read the answer to a poll."""

    def __init__(self, pending, communicator):
        self.pending, self.communicator = pending, communicator
        self.has_polled = False

    def is_done_within(self, seconds):
        self.has_polled |= self.communicator._poll is not None
        if self.has_polled and self.communicator._poll is None:
            return self.pending.is_done_within(60)
        return False

    def get_result(self):
        return self.pending.get_result()


@pytest.fixture
def ranks(monkeypatch):
    """Return a function that runs each function as a rank, and returns results or errors."""
    monkeypatch.setattr(communicator_module, "_SLICE_SECONDS", 0.01)

    def run(*functions):
        network = Network(len(functions))
        communicators = []
        for rank in range(len(functions)):
            module = types.SimpleNamespace(
                rank=lambda rank=rank: rank,
                size=lambda: len(functions),
                is_initialized=lambda: True,
            )
            communicators.append(Communicator(module, grace=60.0))
            communicators[-1]._transport = Transport(network, rank)

        def attempt(function, communicator):
            try:
                return function(communicator, network)
            except (RanksDisagreeError, RankLostError) as error:
                return error

        with ThreadPoolExecutor(len(functions)) as pool:
            return list(pool.map(attempt, functions, communicators))

    return run


def backward(communicator, agree=None):
    """Sum a one over the ranks as a backward pass does."""
    pending = communicator.start(torch.ones(1), "d9m.bucket.0", BACKWARD.activity)
    communicator.finish(pending, BACKWARD.activity, agree or (lambda: communicator.agree(BACKWARD)))


def has_polled(network, rank):
    return lambda: any(
        kind == "control" and rank in calls for (kind, _), calls in network.calls.items()
    )


def test_a_rank_that_is_only_slow_is_waited_for(ranks):
    """The next agreement answers the polls of the others, and all continue."""

    def patient(communicator, network):
        for _ in range(3):
            backward(communicator, pytest.fail)
        communicator.agree(BARRIER)
        return communicator.gather_objects(communicator.rank)

    def slow(communicator, network):
        network.wait_for(has_polled(network, 0))
        network.wait_for(has_polled(network, 1))
        return patient(communicator, network)

    assert ranks(patient, patient, slow) == [[0, 1, 2]] * 3


def test_a_rank_at_a_barrier_and_ranks_in_a_backward_pass_find_each_other(ranks):
    """A rank that announces an intent and ranks that poll learn of each other."""

    def waiting(communicator, network):
        backward(communicator)

    def elsewhere(communicator, network):
        communicator.agree(BARRIER)

    found = ranks(waiting, elsewhere, waiting)
    assert [type(error) for error in found] == [RanksDisagreeError] * 3
    assert found[0].intents == (BACKWARD.activity, BARRIER.activity, BACKWARD.activity)


def test_ranks_in_a_backward_pass_learn_of_a_rank_that_raises(ranks):
    def waiting(communicator, network):
        backward(communicator)

    def raising(communicator, network):
        communicator.announce(ValueError("bad"))

    error, nothing = ranks(waiting, raising)
    assert "rank 1: ends with ValueError: bad" in str(error)
    assert nothing is None


def test_a_sum_that_another_rank_has_finished_needs_no_intent(ranks):
    """The other rank is at a barrier already, so this rank announces nothing."""

    def behind(communicator, network):
        pending = Late(
            communicator.start(torch.ones(1), "d9m.bucket.0", BACKWARD.activity), communicator
        )
        communicator.finish(pending, BACKWARD.activity, pytest.fail)
        communicator.agree(BARRIER)
        return pending.has_polled

    def ahead(communicator, network):
        backward(communicator, pytest.fail)
        communicator.agree(BARRIER)

    assert ranks(behind, ahead) == [True, None]


def test_an_agreement_that_never_comes_ends_with_an_error(ranks):
    """Gloo would wait indefinitely; the limit is the communicator's."""

    def alone(communicator, network):
        communicator._limit = 0.0
        communicator.agree(BARRIER)

    error, _ = ranks(alone, lambda communicator, network: None)
    assert isinstance(error, RankLostError)
    assert "It took too long" in str(error)


def test_a_pickle_from_another_rank_is_refused(ranks):
    """Every rank refuses it; nothing is unpickled."""

    def attacking(communicator, network):
        communicator._gather_payloads(pickle.dumps(["anything"]))

    def attacked(communicator, network):
        return communicator.gather_objects(["plain"])

    error, _ = ranks(attacked, attacking)
    assert isinstance(error, RanksDisagreeError)
    assert "bytes that are not plain data" in str(error)


class DeviceTransport(Transport):
    """Sums that a device finishes, some time after all ranks have started them."""

    def sum(self, tensor, name):
        pending = super().sum(tensor, name)
        work = types.SimpleNamespace(
            is_completed=lambda: pending.is_done_within(0), wait=lambda: None
        )
        return StreamPending(work, tensor)


@pytest.fixture
def on_a_device(monkeypatch, ranks):
    """Let the ranks' sums be those of a device."""
    monkeypatch.setattr(sys.modules[__name__], "Transport", DeviceTransport)
    return ranks


def confirm(communicator):
    communicator.confirm(BACKWARD.activity, lambda: communicator.agree(BACKWARD))


def test_a_sum_on_a_device_is_waited_for_in_the_next_pass(on_a_device):
    """`finish` returns before the other rank has started the sum; `confirm` does not."""

    def ahead(communicator, network):
        backward(communicator, pytest.fail)
        started_alone = network.everyone("sum", 0) is None
        network.post("go", 0, 0, None)
        confirm(communicator)
        return started_alone, network.everyone("sum", 0) is not None

    def behind(communicator, network):
        network.wait_for(lambda: ("go", 0) in network.calls)
        backward(communicator, pytest.fail)
        confirm(communicator)

    assert on_a_device(ahead, behind)[0] == (True, True)


def test_ranks_that_confirm_a_sum_find_one_that_is_elsewhere(on_a_device):
    def waiting(communicator, network):
        backward(communicator)
        confirm(communicator)

    def elsewhere(communicator, network):
        communicator.agree(BARRIER)

    found = on_a_device(waiting, elsewhere)
    assert [type(error) for error in found] == [RanksDisagreeError] * 2
    assert found[0].intents == (BACKWARD.activity, BARRIER.activity)
