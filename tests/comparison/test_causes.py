"""The cause of the first place that differs: one row for each kind of cause."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_d9m.engine.ledger.differences import Divergence, PlaceDifference
from lightning_d9m.engine.ledger.kinds import PROBE_KINDS
from lightning_d9m.tools.comparison.causes import earliest_divergences, find_cause
from lightning_d9m.tools.comparison.ledgers import RunSide


def divergence(kind, name="a", *, rank=0, step=3, moment="batch", others=(), position=0, batch=0):
    """Return a divergence at a place; ``others`` are places of its batch that differ too."""
    places = [PlaceDifference(position, k, n, 0, "0", "f") for k, n in ((kind, name), *others)]
    return Divergence(
        rank=rank, epoch=0, step=step, batch=batch, moment=moment, places=places, count=len(places),
        compared=9,
    )  # fmt: skip


def comparison(
    *divergences,
    refusals=(),
    stack=(),
    extent="logged values",
    logged=None,
    probes=PROBE_KINDS,
    seeded=("", ""),
):
    """Return a comparison with one rank for each divergence, None for a rank that agrees."""
    ranks = [
        SimpleNamespace(divergence=entry, expected=RunSide(), actual=RunSide())
        for entry in divergences
    ]
    return SimpleNamespace(
        portable=False,
        ranks=ranks,
        refusals=refusals,
        stack=stack,
        extent=extent,
        logged=logged,
        probes=frozenset(probes),
        seeded=seeded,
        begins_late=False,
        divergences=sorted(filter(None, divergences), key=lambda entry: entry.when),
    )


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
        (divergence("buffer", others=[("optimizer", "0.group.0:lr")]), "buffers"),
        (divergence("optimizer", "0.exp_avg.a"), "optimizer state"),
        (divergence("output", "layers.0"), "module"),
        (divergence("loss", "loss"), "module"),
        (divergence("op", "layers.1::aten.native_dropout.default:1"), "random numbers"),
        (divergence("op", "a::aten.native_layer_norm.default"), "op"),
        (divergence("op", "a::aten.normal_.default"), "random numbers"),
        (divergence("op", "a::columns.normalize.default"), "op"),
        (divergence("gradient", "a.weight"), "gradients"),
        (divergence("scalar", "time"), "logged value"),
        (divergence("weights", moment="final"), "after training"),
        (divergence("saved", moment="saved ema.pt"), "saved file"),
        (divergence("weights", moment="epoch"), "weights"),
        (divergence("buffers", moment="epoch"), "buffers"),
        (divergence("optimizers", "0.group.0", moment="epoch"), "optimizer settings"),
        (divergence("optimizers", "0.exp_avg.a", moment="epoch"), "optimizer state"),
        (divergence("schedulers", "0", moment="epoch"), "optimizer settings"),
        (divergence("scalars", "val_loss", moment="epoch"), "logged value"),
    ],
)
def test_one_rank(found, kind):
    """The end of an epoch has a cause if its batches were seen to agree."""
    compared = comparison(found)
    assert find_cause(compared, batches_seen=True).kind == kind
    unseen = found.moment == "epoch" and kind != "logged value"
    assert find_cause(compared).kind == ("unknown" if unseen else kind)


def test_a_logged_value_that_steers_the_training_is_not_called_harmless():
    for moment, kind in (("batch", "scalar"), ("epoch", "scalars")):
        found = divergence(kind, "val_loss", moment=moment)
        for extent, text, advice in (
            ("logged values", "the training itself is equal.", "exclude it with ignored_metrics"),
            ("evaluations", "equal in these two runs.", "Only if nothing reads it"),
            ("training", "differs first, and the training differs later.", "other weights."),
        ):
            cause = find_cause(comparison(found, extent=extent))
            assert cause.text.endswith(text)
            assert advice in cause.advice
            assert ("ignored_metrics" in cause.advice) == (extent != "training")


def test_weights_and_settings_that_differ_together_are_both_named():
    """Both were written in one step, which does not say which of them is the cause."""
    found = find_cause(comparison(divergence("weight", others=[("optimizer", "0.group.0:lr")])))
    assert found.kind == "weights"
    assert "Weights and the optimizer's settings differ" in found.text


def test_what_makes_runs_incomparable_goes_first():
    found = divergence("batch")
    assert find_cause(comparison(found, stack=["torch.version"])).kind == "stack"
    assert (
        find_cause(comparison(found, refusals=[SimpleNamespace(field="seed")])).kind
        == "incomparable"
    )
    # No stack explains a difference of portable bits.
    portable = comparison(found, stack=["torch.version"])
    portable.portable = True
    assert find_cause(portable).kind == "data"


def test_gradients_that_differ_on_all_ranks_after_the_exchange_are_the_all_reduces():
    ranks = [divergence("gradient", rank=rank) for rank in range(4)]
    assert find_cause(comparison(*ranks)).kind == "all-reduce"


def test_the_rank_that_differs_before_the_exchange_is_the_cause():
    """The other rank differs in the same batch, in what the first one sent it."""
    found = comparison(divergence("gradient"), divergence("batch", rank=1))
    assert [entry.rank for entry in earliest_divergences(found)] == [1]
    assert find_cause(found).kind == "data"


def test_of_what_ranks_compute_the_first_goes_first():
    """An operation of the backward pass hands on what another rank's forward pass did."""
    late = divergence("op", "(model)::aten.copy_.default", position=90)
    found = comparison(late, divergence("op", "a::aten.mul.Tensor", rank=1, position=20), late)
    assert [entry.rank for entry in earliest_divergences(found)] == [1]
    # Where gradients are accumulated, the step alone does not say which rank diverged first.
    found = comparison(divergence("batch", batch=3), divergence("gradient", rank=1, batch=2))
    assert [entry.rank for entry in earliest_divergences(found)] == [1]


@pytest.mark.parametrize(("counts", "kind"), [((2, 0), "length"), ((0, 0), "unknown")])
def test_a_run_that_goes_on_where_the_other_ends(counts, kind):
    one, other = (RunSide(count) for count in counts)
    rank = SimpleNamespace(divergence=None, expected=one, actual=other)
    runs = SimpleNamespace(ranks=[rank], refusals=(), stack=(), divergences=[], logged=None)
    runs.one_is_longer = any(counts)
    assert find_cause(runs).kind == kind


def test_an_epoch_that_ends_after_other_steps_is_a_length_with_both_numbers():
    found = replace(
        divergence("weights", moment="epoch", others=[("step", "global step")]),
        by_kind={"weights": (1, 1), "step": (1, 1)}, steps=(113, 79),
    )  # fmt: skip
    runs = comparison(found, extent="training")
    runs.ranks[0].actual.reason = "trainer.should_stop, which Timer sets"
    seen, unseen = find_cause(runs, batches_seen=True), find_cause(runs)
    assert (seen.kind, seen.narrows, unseen.kind, unseen.narrows) == ("length", 0, "length", 1)
    assert seen.text == (
        "One run ends at step 113, the other at step 79; everything recorded before is equal. "
        "This run was ended by trainer.should_stop, which Timer sets."
    )
    assert "everything" not in unseen.text


def test_a_logged_value_that_differs_earlier_is_said_beside_the_cause_of_the_training():
    logged = divergence("scalar", "clock", step=0)
    found = find_cause(comparison(divergence("batch", "batch:0"), logged=logged))
    assert found.kind == "data"
    assert "Before it, the logged clock differs in" in found.text
    steered = comparison(divergence("optimizer", "0.group.0:lr"), logged=logged)
    assert find_cause(steered).text.startswith("A logged value differs first")


def test_what_was_not_recorded_is_not_ruled_out():
    found = comparison(divergence("output", "a"), probes=["output"])
    said = "ruled out: a difference of batch, buffer, input, rng, weight before it."
    assert find_cause(found).text.endswith(said)
    assert "Not recorded" not in find_cause(comparison(divergence("output", "a"))).text


def test_draws_of_another_thread_within_a_batch():
    found = replace(divergence("loss", "loss"), by_kind={"loss": (1, 1), "rng": (1, 3)})
    assert find_cause(comparison(found)).kind == "random numbers"


def test_a_seed_that_differs_is_named_with_its_line():
    seeded = [f"manual_seed({n}) at lib.py:5: seed(n)" for n in (1, 2)]
    found = divergence("weights", moment="initial", step=0)
    cause = find_cause(comparison(found, seeded=seeded))
    assert cause.kind == "seed"
    assert cause.text.endswith(f"Run 1: {seeded[0]}. The other: {seeded[1]}.")
    assert find_cause(comparison(found, seeded=seeded[:1] * 2)).kind == "initial weights"
    refused = comparison(refusals=[SimpleNamespace(field="seed")], seeded=seeded)
    assert find_cause(refused).kind == "seed"
