"""Agreements between ranks, without processes."""

import types

import pytest
import torch

from lightning_d9m.errors import RankLostError
from lightning_d9m.horovod.communication.communicator import Communicator
from lightning_d9m.horovod.communication.intents import CollectiveIntent, compose_disagreement


def fake(size=2, **functions):
    """A module like ``horovod.torch``, on which nothing is asynchronous."""
    return types.SimpleNamespace(
        Sum="sum",
        Min="min",
        rank=lambda: 0,
        size=lambda: size,
        poll=lambda _: True,
        is_initialized=lambda: True,
        **functions,
    )


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


def test_fingerprints_fit_an_int64_and_differ():
    """The number and its opposite must both be int64."""
    intents = [
        CollectiveIntent("a"),
        CollectiveIntent("b"),
        CollectiveIntent("a", ("b",)),
        CollectiveIntent("a", ("b", "c")),
        CollectiveIntent("ab"),
    ]
    prints = [intent.fingerprint() for intent in intents]
    assert len(set(prints)) == len(intents)
    assert all(0 <= value < 2**62 for value in prints)


def test_a_lost_rank_is_an_error_and_breaks_the_communicator():
    """An error of Horovod becomes an error that names the collective, now and later."""

    def fail(_):
        raise RuntimeError("Horovod has been shut down")

    communicator = Communicator(fake(allreduce_async_=lambda *_, **__: 1, synchronize=fail))
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

    functions = dict.fromkeys(["allreduce_async_", "allgather_async", "broadcast_async_"], refuse)
    communicator = Communicator(fake(**functions))
    waited = r"^Rank 0 waited for %s, but the collective failed\."
    with pytest.raises(RankLostError, match=waited % "the backward pass"):
        communicator.start(torch.ones(1), "d9m.bucket.0.1-3", "the backward pass")
    communicator.broken = None
    with pytest.raises(RankLostError, match=waited % "the end"):
        communicator.agree(CollectiveIntent("the end"))
    with pytest.raises(RankLostError, match=waited % "the weights"):
        communicator.broadcast_tensors([torch.ones(1)], "the weights")


def test_bounded_wait_gives_up():
    """A rank that failed does not wait indefinitely to announce it."""
    module = fake(allreduce_async_=lambda *_, **__: 1)
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
