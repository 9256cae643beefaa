"""From the first place that differs to its cause: one row for each kind of cause."""

from types import SimpleNamespace

import pytest

from lightning_d9m.evidence.batches import PlaceDifference
from lightning_d9m.evidence.causes import find_cause, first_divergences
from lightning_d9m.evidence.comparison import Divergence


def divergence(kind, name="a", *, rank=0, step=3, moment="batch", others=()):
    """Return a divergence at a place; ``others`` are places of its batch that differ too."""
    places = [PlaceDifference(0, k, n, 0, "0", "f") for k, n in ((kind, name), *others)]
    return Divergence(
        rank=rank, epoch=0, step=step, batch=step, moment=moment, kind=kind, name=name, call=0,
        position=0, expected="0", actual="f", places=tuple(places), count=len(places), compared=9,
    )  # fmt: skip


def comparison(*divergences, refusals=(), stack=()):
    """Return a comparison with one rank for each divergence, None for a rank that agrees."""
    ranks = [SimpleNamespace(divergence=entry) for entry in divergences]
    return SimpleNamespace(ranks=ranks, refusals=refusals, stack=stack)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (divergence("weights", moment="initial", step=0), "initial weights"),
        (divergence("optimizers", "0.group.0", moment="initial", step=0), "optimizer settings"),
        (divergence("weight", step=0), "initial weights"),
        (divergence("weight"), "weights"),
        (divergence("buffer"), "buffers"),
        (divergence("rng", "torch"), "random numbers"),
        (divergence("batch", "batch:0"), "data"),
        (divergence("optimizer", "0.group.0:lr"), "optimizer settings"),
        (divergence("weight", others=[("optimizer", "0.group.0:lr")]), "optimizer settings"),
        (divergence("optimizer", "0.exp_avg.a"), "optimizer state"),
        (divergence("output", "layers.0"), "module"),
        (divergence("loss", "loss"), "module"),
        (divergence("op", "layers.0::aten.index_put_.default"), "op"),
        (divergence("op", "layers.1::aten.native_dropout.default:1"), "random numbers"),
        (divergence("gradient", "a.weight"), "gradients"),
        (divergence("scalar", "time"), "logged value"),
        (divergence("weights", moment="final"), "after training"),
        (divergence("weights", moment="epoch"), "unknown"),
    ],
)
def test_one_rank(found, kind):
    assert find_cause(comparison(found)).kind == kind


def test_what_makes_runs_incomparable_goes_first():
    found = divergence("batch")
    assert find_cause(comparison(found, stack=["torch.version"])).kind == "stack"
    assert find_cause(comparison(found, refusals=["seed"])).kind == "incomparable"


def test_gradients_that_differ_on_all_ranks_after_the_exchange_are_the_all_reduces():
    ranks = [divergence("gradient", rank=rank) for rank in range(4)]
    assert find_cause(comparison(*ranks)).kind == "all-reduce"


def test_gradients_that_differ_on_one_rank_are_not():
    found = comparison(None, divergence("gradient", rank=1))
    assert find_cause(found).kind == "gradients"
    assert [entry.rank for entry in first_divergences(found)] == [1]


def test_the_rank_that_differs_before_the_exchange_is_the_cause():
    """The other rank differs in the same batch, in what the first one sent it."""
    found = comparison(divergence("gradient"), divergence("batch", rank=1))
    assert [entry.rank for entry in first_divergences(found)] == [1]
    assert find_cause(found).kind == "data"


def test_the_earliest_step_goes_first():
    found = comparison(divergence("rng", step=5), divergence("scalar", rank=1, step=4))
    assert [entry.rank for entry in first_divergences(found)] == [1]


def test_runs_without_a_divergence_have_none():
    assert first_divergences(comparison(None)) == ()
    assert find_cause(comparison(None)).kind == "unknown"
