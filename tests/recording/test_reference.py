"""A run is compared with its reference: what differs is named."""

from contextlib import closing

import pytest
from msgspec.structs import replace

from lightning_d9m.engine.ledger.folder import rank_path
from lightning_d9m.engine.recording.reference import Reference
from lightning_d9m.errors import LedgerError, ReferenceRefusedError


def accepted(runs, folder, *, rank=0, **header):
    reference = Reference(folder, rank)
    reference.accept(runs.header(rank=rank, **header), runs.facts())
    return reference


def check_all(reference, digests):
    """Return the number of records that differ, and what was not checked."""
    found = [reference.check(record) for record in digests]
    return len(found) - found.count(None), reference.finish()


def find_error(runs, *records, **header):
    """Return the error of the last record, and the reference's folder."""
    folder = runs.write(**header)
    with closing(accepted(runs, folder)) as reference:
        difference = [reference.check(record) for record in records][-1]
    return reference.drift_error(difference), folder


def changed(digests, *names, group="weights"):
    groups = {**digests.groups, group: digests.groups[group] | dict.fromkeys(names, "f" * 32)}
    return replace(digests, groups=groups)


def drop(*places):
    return lambda _, records: [records.__delitem__(place) for place in places]


def test_another_experiment_is_refused_by_what_differs(runs):
    folder = runs.write()
    with closing(Reference(folder, 0)) as one, pytest.raises(ReferenceRefusedError) as caught:
        one.accept(runs.header(seed=43, fit=1), runs.facts())
    said = f"The reference {folder} comes from another experiment: its seed differs.\n"
    said += "  reference: 42\n  this run:  43\nA different seed draws different random numbers"
    assert str(caught.value).startswith(said)
    assert "Also different: fit. Run as the reference was run, or name a" in str(caught.value)
    with closing(Reference(folder, 0)) as one, pytest.raises(ReferenceRefusedError) as caught:
        one.accept(runs.header(), runs.facts(model="0" * 32))
    assert caught.value.field == "model"
    assert f"  this run:  {'0' * 16} (" in str(caught.value)


def test_its_own_folder_is_no_reference(runs, tmp_path):
    with pytest.raises(LedgerError, match="holds no ledger"):
        Reference(tmp_path, 0, writing=runs.write())


def test_a_rank_that_it_lacks(runs):
    """The world size is named first; with logical ranks one process serves for four."""
    folder = runs.write(world_size=4)
    rank_path(folder, 3).unlink()
    with pytest.raises(LedgerError, match="has no file of rank 3"):
        accepted(runs, folder, rank=3, world_size=4)
    with pytest.raises(ReferenceRefusedError, match="its world_size differs"):
        accepted(runs, runs.write(world_size=2), rank=3, world_size=4)
    stack = {"world.logical_ranks": 4}
    reference = accepted(runs, runs.write(stack=stack), rank=3, world_size=4, stack=stack)
    assert check_all(reference, [runs.digests("initial", 0)])[0] == 0
    assert reference.checked == 1


def test_one_that_never_trained_is_refused(runs):
    reference = Reference(runs.write(edit=drop(slice(1, None))), 0)
    with closing(reference), pytest.raises(LedgerError, match="ends before its train"):
        reference.accept(runs.header(), runs.facts())


def test_an_equal_run_with_harmless_settings(runs):
    """Threads are in the stack; the fill changes no bit."""
    settings = runs.header().settings | {"threads": 4, "fill_uninitialized_memory": False}
    reference = accepted(runs, runs.write(), settings=settings)
    assert check_all(reference, runs.records()[2:-1]) == (0, None)
    assert reference.checked == 5


def test_one_weight(runs):
    """The message is complete, and the facts are attributes."""
    expected = runs.digests("epoch", 1).groups["weights"]["layers.0.bias"]
    before = runs.digests("initial", 0), runs.digests("epoch", 0)
    error, folder = find_error(runs, *before, changed(runs.digests("epoch", 1), "layers.0.bias"))
    assert str(error) == (
        "This run differs from its reference in epoch 1 (step 46) on rank 0: 1 of 12 entries "
        "differ, first in weights: layers.0.bias.\n"
        f"  reference: {expected[:16]}\n"
        f"  this run:  {'f' * 16}\n"
        "They last agreed in epoch 0 (step 23), so the cause lies after it.\n"
        f"Reference: {folder}/rank-0.jsonl"
    )
    assert (error.moment, error.epoch, error.step, error.rank) == ("epoch", 1, 46, 0)
    assert (error.group, error.names) == ("weights", ("layers.0.bias",))
    assert (error.count, error.total) == (1, 12)
    assert (error.expected, error.actual) == (expected, "f" * 32)


def test_several_groups_the_initial_weights_and_a_loss(runs):
    record = runs.digests("epoch", 0)
    record = changed(changed(record, *record.groups["weights"]), "0", group="schedulers")
    text = str(find_error(runs, record)[0])
    assert "5 of 12 entries differ, first in weights: layers.0.weight, layers.0.bias, " in text
    assert "layers.2.weight and 1 more.\n" in text
    assert "In all: weights 4 of 4, schedulers 1 of 1.\nNo earlier record was compared" in text
    text = str(find_error(runs, changed(runs.digests("initial", 0), "layers.0.bias"))[0])
    assert "differs from its reference in the initial state on rank 0" in text
    assert "Seed before the model is built: call lightning_d9m.enable(seed=...)" in text
    # A number is shown with all digits: one unit in the last place counts.
    error, _ = find_error(runs, runs.digests("epoch", 0, loss="0x1.5555555555556p-2"))
    assert "  reference: 0.3333333333333333\n  this run:  0.33333333333333337\n" in str(error)
    assert (error.expected, error.group) == ("0x1.5555555555555p-2", "loss")


def test_an_edited_reference_is_found_when_the_record_is_reached(runs):
    folder = runs.write()
    path = rank_path(folder, 0)
    path.write_bytes(path.read_bytes().replace(b'"step":69', b'"step":68', 1))
    with closing(accepted(runs, folder)) as reference:
        reference.check(runs.digests("epoch", 0))
        with pytest.raises(LedgerError, match="line 6 "):
            reference.check(runs.digests("epoch", 1))


@pytest.mark.parametrize(
    ("reference", "run", "left"),
    [
        # Two epochs more, and a final state of another epoch.
        (
            {"epochs": 2},
            {"epochs": 4},
            "counterpart there and went unchecked; 1 record there had no counterpart in this run.",
        ),
        ({"edit": drop(slice(4, None))}, {}, "was itself ended before it could finish its ledger."),
    ],
    ids=["shorter", "killed"],
)
def test_a_reference_is_checked_as_far_as_it_goes_and_that_is_said(runs, reference, run, left):
    folder = runs.write(**reference)
    differing, unchecked = check_all(accepted(runs, folder), runs.records(**run)[2:-1])
    assert differing == 0
    assert unchecked.startswith(f"Compared with {folder}: ")
    assert unchecked.endswith(left)


def test_an_equal_run_with_ops_that_may_vary_says_so(runs):
    """Its end is a verdict, which must not hide them; without them it is silent."""
    settings = {"settings": {"varying_ops": "histc"}}
    reference = accepted(runs, runs.write(**settings), **settings)
    differing, said = check_all(reference, runs.records()[2:-1])
    assert differing == 0
    assert said.endswith(
        "Another run may differ: varying_ops lets histc run, whose results may vary."
    )
    assert check_all(accepted(runs, runs.write()), runs.records()[2:-1]) == (0, None)


def test_a_record_that_the_reference_lacks_in_between_is_refused(runs):
    """A check that was asked for would be left out in silence."""
    with closing(accepted(runs, runs.write(edit=drop(4)))) as reference:
        reference.check(runs.digests("epoch", 0))
        with pytest.raises(ReferenceRefusedError) as caught:
            reference.check(runs.digests("epoch", 1))
    said = "has no record of epoch 1 (step 46); the next that it has is epoch 2 (step 69)"
    assert said in str(caught.value)
    assert caught.value.field == "records"
