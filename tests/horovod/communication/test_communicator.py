"""Agreements between ranks, without Horovod."""

import pickle
import types
from datetime import timedelta

import pytest
import torch
from gloo_threads import run_processes

from lightning_d9m.errors import RankLostError, RanksDisagreeError
from lightning_d9m.horovod.communication.communicator import Communicator
from lightning_d9m.horovod.communication.intents import CollectiveIntent, compose_disagreement


def fake(size=2, **functions):
    """A module like ``horovod.torch``, on which nothing is asynchronous."""
    known = {
        "rank": lambda: 0,
        "size": lambda: size,
        "poll": lambda _: True,
        "is_initialized": lambda: True,
    }
    return types.SimpleNamespace(**(known | functions))


def test_different_actions_are_told_apart_by_rank():
    text = compose_disagreement(
        [CollectiveIntent("the backward pass"), CollectiveIntent("the barrier 'x'")]
    )
    assert "  rank 0: the backward pass\n  rank 1: the barrier 'x'" in text


def test_different_parts_are_named_with_their_ranks():
    intents = [
        CollectiveIntent("the backward pass", ("a", "b")),
        CollectiveIntent("the backward pass", ("a",)),
    ]
    text = compose_disagreement(intents)
    assert "what takes part in the backward pass" in text
    assert "b: yes on rank 0; no on rank 1" in text
    assert "a: yes" not in text


def test_many_names_are_cut():
    intents = [CollectiveIntent("it", tuple(f"p{i:02}" for i in range(20))), CollectiveIntent("it")]
    assert "and 12 more" in compose_disagreement(intents)


def test_fingerprints_differ():
    intents = [
        CollectiveIntent("a"),
        CollectiveIntent("b"),
        CollectiveIntent("a", ("b",)),
        CollectiveIntent("a", ("b", "c")),
        CollectiveIntent("ab"),
    ]
    prints = [intent.fingerprint() for intent in intents]
    assert len(set(prints)) == len(intents)
    assert all(len(value) == 8 for value in prints)


def test_a_lost_rank_is_an_error_and_breaks_the_communicator():
    """An error of Horovod becomes an error that names the collective, now and later."""

    def fail(_):
        raise RuntimeError("Horovod has been shut down")

    communicator = Communicator(fake(allgather_async=lambda *_, **__: 1, synchronize=fail))
    with pytest.raises(RankLostError, match=r"Rank 0 waited for the end.*been shut down"):
        communicator.agree(CollectiveIntent("the end"))
    assert communicator.broken is not None
    with pytest.raises(RankLostError):
        communicator.agree(CollectiveIntent("something else"))
    communicator.announce(ValueError("unheard"))


def test_a_rank_whose_loss_is_known_at_the_start_is_reported_with_the_same_activity():
    """Horovod refuses a collective at its start once it has noticed that a rank ended."""

    def refuse(*_, **__):
        raise RuntimeError("Horovod has been shut down")

    functions = dict.fromkeys(["allgather_async", "broadcast_async_"], refuse)
    communicator = Communicator(fake(**functions))
    waited = r"^Rank 0 waited for %s, but the collective failed\."
    with pytest.raises(RankLostError, match=waited % "the end"):
        communicator.agree(CollectiveIntent("the end"))
    with pytest.raises(RankLostError, match=waited % "the weights"):
        communicator.broadcast_tensors([torch.ones(1)], "the weights")


def test_bounded_wait_gives_up():
    """A rank that failed does not wait indefinitely to announce it."""
    module = fake(allgather_async=lambda *_, **__: 1)
    module.poll = lambda _: False
    communicator = Communicator(module, grace=0.0)
    communicator.announce(ValueError("nobody listens"))
    assert communicator.broken is None


def test_one_rank_alone_exchanges_nothing():
    """Every collective of one process returns at once."""
    communicator = Communicator(fake(size=1))
    communicator.agree(CollectiveIntent("alone"))
    assert communicator.gather_objects({"a": 1}) == [{"a": 1}]
    assert communicator.broadcast_object("x", 0) == "x"
    value = torch.ones(2, 3)
    assert communicator.gather_equal(value, "x").shape == (1, 2, 3)
    assert communicator.gather_tensors(value)[0] is value
    communicator.broadcast_tensors([value], "x")


def run_ranks(*functions):
    """Call each function with the communicator of a rank; return results or errors."""

    def run(rank, group):
        communicator = Communicator(
            fake(size=len(functions), rank=lambda: rank, is_initialized=lambda: False), grace=60.0
        )
        communicator._tensors = communicator._control = group
        try:
            return functions[rank](communicator)
        except (RanksDisagreeError, RankLostError) as error:
            return error

    return run_processes(len(functions), run, closes=True)


def test_ranks_that_do_different_things_find_each_other():
    backward, barrier = CollectiveIntent("the backward pass"), CollectiveIntent("the barrier 'x'")
    found = run_ranks(*(lambda c, i=intent: c.agree(i) for intent in (backward, barrier, backward)))
    assert [type(error) for error in found] == [RanksDisagreeError] * 3
    assert found[0].intents == (backward.activity, barrier.activity, backward.activity)


def test_ranks_learn_of_a_rank_that_raises():
    error, nothing = run_ranks(
        lambda communicator: communicator.agree(CollectiveIntent("the backward pass")),
        lambda communicator: communicator.announce(ValueError("bad")),
    )
    assert "rank 1: ends with ValueError: bad" in str(error)
    assert nothing is None


def test_an_agreement_that_never_comes_ends_with_an_error():
    def wait_alone(communicator):
        communicator._control._set_default_timeout(timedelta(milliseconds=10))
        communicator.agree(CollectiveIntent("the end"))

    error, _ = run_ranks(wait_alone, lambda communicator: None)
    assert isinstance(error, RankLostError)
    assert error.activity == "the end"


def test_a_pickle_from_another_rank_is_refused():
    """Every rank refuses it; nothing is unpickled."""
    error, _ = run_ranks(
        lambda communicator: communicator.gather_objects(["plain"]),
        lambda communicator: communicator._exchange(pickle.dumps(["anything"]), "an attack"),
    )
    assert isinstance(error, RanksDisagreeError)
    assert "bytes that are not plain data" in str(error)


def test_tensors_of_different_shapes_are_gathered():
    def gather(communicator):
        parts = communicator.gather_tensors(torch.full((communicator.rank + 1, 2), 0.5))
        return [tuple(part.shape) for part in parts]

    assert run_ranks(gather, gather) == [[(1, 2), (2, 2)]] * 2
