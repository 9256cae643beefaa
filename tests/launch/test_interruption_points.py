"""Interruption points of a fit: parsed from a variable, and chosen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.engine.recording.interruption_points import (
    EpochShape,
    InterruptionPoint,
    choose_points,
    parse_point,
)
from lightning_d9m.errors import SettingError

whole = st.integers(0, 10**6)
places = st.one_of(
    st.builds(InterruptionPoint, st.sampled_from(["epoch", "validated"]), whole, st.just(0), whole),
    st.builds(
        InterruptionPoint,
        st.sampled_from(["batch", "validation"]),
        whole,
        st.integers(1, 99),
        whole,
    ),
)


@given(places)
def test_a_point_is_parsed_as_it_was_written(place):
    assert parse_point(str(place)) == place


@pytest.mark.parametrize(
    "text",
    ["", "step:17", "batch:1", "epoch:1:2", "batch:1:-2", "batch:1:2+", "batch:x:1", "Epoch:1"],
)
def test_invalid_points_are_named(text):
    with pytest.raises(SettingError) as caught:
        parse_point(text)
    assert str(caught.value).startswith(f"The variable LIGHTNING_D9M_INTERRUPT is {text!r}; allow")


def shapes(epochs, batches, *, accumulated=1, validation=0):
    """Return equal shapes for all epochs."""
    return [EpochShape(epoch, batches, accumulated, validation) for epoch in range(epochs)]


def chosen(*arguments, **words):
    return [str(place) for place, _ in choose_points(shapes(*arguments, **words))]


def test_one_place_of_each_kind_near_the_middle():
    found = chosen(epochs=10, batches=23, accumulated=4, validation=6)
    assert found == ["epoch:4", "batch:5:8+16", "batch:5:11", "validation:5:3", "validated:5"]
    assert chosen(epochs=0, batches=5) == []
    assert chosen(epochs=1, batches=2) == ["batch:0:1"]
    assert chosen(epochs=2, batches=1) == ["epoch:0"]
    assert chosen(epochs=1, batches=2, accumulated=8) == ["batch:0:1"]
    assert chosen(epochs=1, batches=1, validation=1) == ["validation:0:1", "validated:0"]


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_every_place_is_within_the_fit(epochs, batches, accumulated, validation):
    all_shapes = shapes(epochs, batches, accumulated=accumulated, validation=validation)
    for place, _ in choose_points(all_shapes):
        assert place.epoch < epochs
        assert place.number < batches or place.kind != "batch"
        assert place.number <= validation or place.kind != "validation"
        # The batches after the checkpoint are within the fit too, and at most one epoch.
        assert place.number + place.later <= (epochs - place.epoch) * batches


def test_an_epoch_without_validation_is_passed_over():
    epochs = [EpochShape(0, 4, 1, 2), EpochShape(1, 4, 1, 0), EpochShape(2, 4, 1, 0)]
    assert str(list(choose_points(epochs))[-1][0]) == "validated:0"
