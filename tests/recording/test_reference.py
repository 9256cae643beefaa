"""A run is held against its reference: refused, equal, or drifted, and then where."""

from contextlib import closing

import pytest

from lightning_d9m.errors import LedgerError, ReferenceRefusedError
from lightning_d9m.ledger.folder import rank_path
from lightning_d9m.ledger.format.records import LoaderFacts
from lightning_d9m.recording.reference import Reference


def held(runs, folder, *, rank=0, **header):
    """Return a reference that has accepted this run."""
    reference = Reference(folder, rank)
    reference.accept(runs.header(rank=rank, **header), runs.facts())
    return reference


def check_all(reference, digests):
    """Return what each record gave, and what was not checked."""
    found = [reference.check(record) for record in digests]
    return found, reference.finish()


def drifted(digests, group="weights", name="layers.0.bias"):
    """Return digests of which one is another."""
    groups = {kind: dict(entries) for kind, entries in digests.groups.items()}
    groups[group][name] = "f" * 32
    fields = {field: getattr(digests, field) for field in ("moment", "epoch", "step", "totals")}
    return type(digests)(**fields, groups=groups, loss=digests.loss, scalars=digests.scalars)


class TestRefusal:
    """A reference from another experiment says nothing about this run."""

    @pytest.mark.parametrize(
        ("field", "header", "facts"),
        [
            ("seed", {"seed": 43}, {}),
            ("fit", {"fit": 2}, {}),
            ("world_size", {"world_size": 4}, {}),
            ("settings.per_sample_rng", {"settings": {"per_sample_rng": True}}, {}),
            ("settings.per_sample_rng", {"settings": {}}, {}),
            ("model", {}, {"model": "0" * 32}),
            ("dataset", {}, {"train": [LoaderFacts(99, 64, 2)]}),
            ("batch_size", {}, {"train": [LoaderFacts(1437, 32, 45)]}),
            ("trainer.precision", {}, {"trainer": {"precision": "bf16-mixed"}}),
        ],
    )
    def test_by_a_field(self, runs, field, header, facts):
        """The field and both values are in the text and on the error."""
        reference = Reference(runs.write(), 0)
        with closing(reference), pytest.raises(ReferenceRefusedError) as caught:
            reference.accept(runs.header(**header), runs.facts(**facts))
        error = caught.value
        assert error.field == field
        assert facts or f"  reference: {error.expected}\n  this run:  {error.actual}" in str(error)

    def test_the_message(self, runs):
        """What, the values, why, what to do."""
        folder = runs.write()
        with pytest.raises(ReferenceRefusedError) as caught:
            Reference(folder, 0).accept(runs.header(seed=43, fit=1), runs.facts())
        assert str(caught.value) == (
            f"The reference {folder} comes from another experiment: its seed differs.\n"
            "  reference: 42\n"
            "  this run:  43\n"
            "A different seed draws different random numbers, so every digest differs by design. "
            "Also different: fit. Run as the reference was run, or name a reference that was run "
            "as this is."
        )

    def test_harmless_settings_are_accepted(self, runs):
        """Threads are in the stack; the fill changes no bit."""
        settings = runs.header().settings | {"threads": 4, "fill_uninitialized_memory": False}
        held(runs, runs.write(), settings=settings).close()

    def test_its_own_folder(self, runs, tmp_path):
        """A run agrees with itself always."""
        folder = runs.write()
        with pytest.raises(ReferenceRefusedError, match="is the folder that this run writes"):
            Reference(folder, 0, writing=folder)
        with pytest.raises(LedgerError, match="holds no ledger"):
            Reference(tmp_path, 0, writing=folder)

    def test_a_rank_that_it_lacks(self, runs):
        """The world size is named first, whichever rank asks."""
        reference = Reference(runs.write(world_size=2), 3)
        with pytest.raises(ReferenceRefusedError, match="its world_size differs"):
            reference.accept(runs.header(rank=3, world_size=4), runs.facts())
        folder = runs.write(world_size=4)
        rank_path(folder, 3).unlink()
        with pytest.raises(LedgerError, match="has no file of rank 3"):
            held(runs, folder, rank=3, world_size=4)

    def test_a_rank_that_it_lacks_with_logical_ranks(self, runs):
        """A run on four processes is compared with one on a single process."""
        stack = {"world.logical_ranks": 4}
        reference = held(runs, runs.write(stack=stack), rank=3, world_size=4, stack=stack)
        assert reference.check(runs.digests("initial", 0)) is None
        assert reference.checked == 1
        reference.close()

    def test_one_that_never_trained(self, runs):
        """It was killed after its header."""
        folder = runs.write(edit=lambda _, records: records.__delitem__(slice(1, None)))
        reference = Reference(folder, 0)
        with closing(reference), pytest.raises(LedgerError, match="ends before its train"):
            reference.accept(runs.header(), runs.facts())


class TestDrift:
    """The first record that differs is reported with everything that is known."""

    def test_equal(self, runs):
        """All records agree, and nothing was left out."""
        reference = held(runs, runs.write())
        found, unchecked = check_all(reference, runs.records()[2:-1])
        assert found == [None] * 5
        assert unchecked is None
        assert reference.checked == 5

    def test_one_weight(self, runs):
        """The message is complete, and the facts are attributes."""
        folder = runs.write()
        reference = held(runs, folder)
        expected = runs.digests("epoch", 1).groups["weights"]["layers.0.bias"]
        with closing(reference):
            assert reference.check(runs.digests("initial", 0)) is None
            assert reference.check(runs.digests("epoch", 0)) is None
            difference = reference.check(drifted(runs.digests("epoch", 1)))
        error = reference.drift_error(difference)
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

    def test_several_groups(self, runs):
        """Weights come first; the others are counted."""
        reference = held(runs, runs.write())
        record = runs.digests("epoch", 0)
        for name in record.groups["weights"]:
            record = drifted(drifted(record, "weights", name), "schedulers", "0")
        with closing(reference):
            error = reference.drift_error(reference.check(record))
        assert "5 of 12 entries differ, first in weights: layers.0.weight, layers.0.bias, " in str(
            error
        )
        assert "layers.2.weight and 1 more.\n" in str(error)
        assert "In all: weights 4 of 4, schedulers 1 of 1." in str(error)
        assert "No earlier record was compared" in str(error)

    def test_initial_weights(self, runs):
        """No training caused it: seed earlier."""
        reference = held(runs, runs.write())
        with closing(reference):
            error = reference.drift_error(reference.check(drifted(runs.digests("initial", 0))))
        assert "differs from its reference in the initial state on rank 0" in str(error)
        assert "They differed before the first step" in str(error)
        assert "Seed before the model is built: call lightning_d9m.enable(seed=...)" in str(error)

    def test_loss(self, runs):
        """A number is shown with all digits: one unit in the last place counts."""
        reference = held(runs, runs.write())
        with closing(reference):
            difference = reference.check(runs.digests("epoch", 0, loss="0x1.5555555555556p-2"))
        error = reference.drift_error(difference)
        assert "  reference: 0.3333333333333333\n" in str(error)
        assert "  this run:  0.33333333333333337\n" in str(error)
        assert (error.expected, error.actual) == ("0x1.5555555555555p-2", "0x1.5555555555556p-2")
        assert error.group == "loss"

    def test_its_own_rank(self, runs):
        """Rank 1 is held against rank 1."""

        def differ(rank, records):
            if rank == 1:
                records[3]["groups"]["weights"]["layers.0.bias"] = "a" * 32

        folder = runs.write(world_size=2, edit=differ)
        for rank in (0, 1):
            reference = held(runs, folder, rank=rank, world_size=2)
            with closing(reference):
                difference = reference.check(runs.digests("epoch", 0))
            assert (difference is not None) == (rank == 1)
        assert reference.drift_error(difference).rank == 1

    def test_an_edited_reference(self, runs):
        """Found when the record is reached; its line is named."""
        folder = runs.write()
        path = rank_path(folder, 0)
        path.write_bytes(path.read_bytes().replace(b'"step":69', b'"step":68', 1))
        reference = held(runs, folder)
        with closing(reference):
            reference.check(runs.digests("epoch", 0))
            with pytest.raises(LedgerError, match="line 6 "):
                reference.check(runs.digests("epoch", 1))


class TestLengths:
    """A reference that is shorter or longer is checked as far as it goes, and that is said."""

    def test_the_reference_ends_earlier(self, runs):
        """Two epochs more, and a final state of another epoch."""
        folder = runs.write(epochs=2)
        found, unchecked = check_all(held(runs, folder), runs.records(epochs=4)[2:-1])
        assert found == [None] * 6
        assert unchecked == (
            f"Compared with {folder}: 3 records; 3 records of this run, from epoch 2 (step 69) on, "
            "had no counterpart there and went unchecked; 1 record there had no counterpart in "
            "this run."
        )

    def test_a_killed_reference(self, runs):
        """What it has is checked."""
        folder = runs.write(edit=lambda _, records: records.__delitem__(slice(4, None)))
        found, unchecked = check_all(held(runs, folder), runs.records()[2:-1])
        assert found == [None] * 5
        assert "was itself ended before it could finish its ledger" in unchecked

    def test_a_record_that_the_reference_lacks_in_between(self, runs):
        """A check that was asked for would be left out in silence."""
        reference = held(runs, runs.write(edit=lambda _, records: records.pop(4)))
        with closing(reference):
            reference.check(runs.digests("epoch", 0))
            with pytest.raises(ReferenceRefusedError) as caught:
                reference.check(runs.digests("epoch", 1))
        assert "has no record of epoch 1 (step 46); the next that it has is epoch 2 (step 69)" in (
            str(caught.value)
        )
        assert caught.value.field == "records"

    def test_records_that_only_the_reference_has(self, runs):
        """A run that begins later, as a resumed one does, finds its place."""
        reference = held(runs, runs.write(epochs=5))
        found, unchecked = check_all(reference, runs.records(epochs=5)[6:-1])
        assert found == [None] * 3
        assert reference.checked == 3
        assert "4 records there had no counterpart in this run" in unchecked
