"""What the ranks say to each other, without processes."""

import types

import pytest
import torch

from lightning_d9m.errors import RankLostError
from lightning_d9m.horovod.communicator import CollectiveIntent, Communicator, compose_disagreement


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
    claims = [
        CollectiveIntent("the backward pass", ("a", "b")),
        CollectiveIntent("the backward pass", ("a",)),
    ]
    text = compose_disagreement(claims)
    assert "what takes part in the backward pass" in text
    assert "b: yes on rank 0; no on rank 1" in text
    assert "a: yes" not in text


def test_many_names_are_cut():
    claims = [CollectiveIntent("it", tuple(f"p{i:02}" for i in range(20))), CollectiveIntent("it")]
    assert "and 12 more" in compose_disagreement(claims)


def test_fingerprints_fit_the_wire_and_differ():
    """Both the number and its opposite have to be int64."""
    claims = [
        CollectiveIntent("a"),
        CollectiveIntent("b"),
        CollectiveIntent("a", ("b",)),
        CollectiveIntent("a", ("b", "c")),
        CollectiveIntent("ab"),
    ]
    prints = [claim.fingerprint() for claim in claims]
    assert len(set(prints)) == len(claims)
    assert all(0 <= value < 2**62 for value in prints)


def test_lost_rank_is_an_error_and_breaks_the_wire():
    """What Horovod raises becomes an error that says what was waited for, now and later."""

    def fail(_):
        raise RuntimeError("Horovod has been shut down")

    wire = Communicator(fake(allreduce_async_=lambda *_, **__: 1, synchronize=fail))
    with pytest.raises(RankLostError, match=r"Rank 0 waited for the end.*been shut down"):
        wire.agree(CollectiveIntent("the end"))
    assert wire.broken is not None
    with pytest.raises(RankLostError):
        wire.agree(CollectiveIntent("something else"))
    wire.announce(ValueError("unheard"))


def test_bounded_wait_gives_up():
    """A rank that failed does not wait for ever to say so."""
    module = fake(allreduce_async_=lambda *_, **__: 1)
    module.poll = lambda _: False
    wire = Communicator(module, grace=0.0)
    wire.announce(ValueError("nobody listens"))
    assert wire.broken is None


def test_one_rank_alone_needs_no_wire():
    """Every collective of one process is answered at once."""
    wire = Communicator(fake(size=1))
    wire.agree(CollectiveIntent("alone"))
    assert wire.gather_objects({"a": 1}) == [{"a": 1}]
    assert wire.broadcast_object("x", 0) == "x"
    value = torch.ones(2, 3)
    assert wire.gather_equal(value, "x").shape == (1, 2, 3)
    assert wire.gather_tensors(value)[0] is value
    wire.broadcast_tensors([value], "x")
