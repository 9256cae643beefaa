"""Two ledgers are compared: equal only when proven, otherwise the first divergence is named."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_runs import Runs, make_facts, make_probes, make_weights, write_rank

from lightning_d9m.engine.ledger.command import SEGMENT
from lightning_d9m.engine.ledger.folder import create_ledger_folder, rank_path, read_ledger
from lightning_d9m.engine.ledger.format.records import Evaluation, LoaderFacts, StepDigests
from lightning_d9m.tools.comparison.causes import find_cause
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.output.comparison_text import list_one_sided, state_verdict


def compare(one, other, **options):
    return compare_ledgers(read_ledger(one), read_ledger(other), **options)


def in_epoch(epoch, change):
    return lambda _, records: change(records[3 + epoch])


def flip(record, group="weights", name="layers.2.weight"):
    record["groups"][group][name] = "f" * 32
    record["totals"][group] = "e" * 32


def logical_run(runs, processes, logical_ranks=4, **options):
    """Write a run with logical ranks on a number of processes."""
    stack = {**runs.header().stack, "world.size": processes, "world.devices_per_node": processes}
    if logical_ranks is not None:
        stack["world.logical_ranks"] = logical_ranks
    return runs.write(world_size=processes, stack=stack, **options)


def facts(**changes):
    record = make_facts(**changes).as_record()
    return {"edit": lambda _, records: records.__setitem__(1, record)}


# What a change makes of the digests of an epoch; the group and the name under which it is found.
CHANGES = {
    ("weights", "layers.2.weight"): flip,
    ("weights", "new"): lambda r: r["groups"]["weights"].update(new="f" * 32),
    ("weights", "layers.0.bias"): lambda r: r["groups"]["weights"].pop("layers.0.bias"),
    ("optimizers", "0.exp_avg.layers.0.bias"): lambda r: flip(
        r, "optimizers", "0.exp_avg.layers.0.bias"
    ),
    ("schedulers", "0"): lambda r: flip(r, "schedulers", "0"),
    ("ema", "a"): lambda r: r["groups"].update(ema={"a": "f" * 32}),
    ("loss", "loss"): lambda r: r.update(loss="-0x0.0p+0"),
    ("scalars", "train_loss"): lambda r: r["scalars"].update(train_loss="nan"),
    ("step", "global step"): lambda r: r.update(step=r["step"] + 1),
}


@given(st.sets(st.tuples(st.integers(0, 2), st.sampled_from(sorted(CHANGES)))))
@settings(max_examples=60, deadline=None)
def test_any_changes_are_named_where_they_are(tmp_path_factory, changes):
    """The first epoch with all its entries, in order; later ones are counted."""
    runs = Runs(tmp_path_factory.mktemp("runs"))

    def edit(_, records):
        for epoch, key in sorted(changes):
            CHANGES[key](records[3 + epoch])

    (rank,) = compare(runs.write(), runs.write(edit=edit)).ranks
    assert rank.differing == len({epoch for epoch, _ in changes})
    if not changes:
        assert rank.verdict == "equal"
        return
    first = min(epoch for epoch, _ in changes)
    named = [key for epoch, key in changes if epoch == first]
    order = ["weights", "optimizers", "schedulers", "ema", "loss", "scalars", "step"]
    found = rank.divergence
    assert (found.moment, found.epoch, found.count) == ("epoch", first, len(named))
    assert {(place.kind, place.name) for place in found.places} == set(named)
    assert [order.index(place.kind) for place in found.places] == sorted(
        order.index(kind) for kind, _ in named
    )
    assert sum(count for count, _ in found.by_kind.values()) == found.count <= found.compared
    digests = runs.digests("epoch", first).groups["weights"]
    for place in found.places:
        if place.kind == "weights":
            assert place.expected == digests.get(place.name)
            assert place.actual == (None if place.name == "layers.0.bias" else "f" * 32)


class TestDivergence:
    def test_with_logical_ranks_probes_are_compared_on_equally_many_processes(self, runs):
        """They are of the micro-batches of each process; otherwise they are counted."""

        def probe(digest):
            probes = list(make_probes([("output", "layers.0")], [[digest]] * 3))
            return lambda _, records: records.__setitem__(slice(3, 3), probes)

        one, two, other = (
            logical_run(runs, processes, edit=probe(digest))
            for processes, digest in ((1, 0), (2, 1), (1, 1))
        )
        for comparison in (compare(one, two), compare(two, one)):
            (rank,) = comparison.ranks
            assert (rank.rank, comparison.verdict) == (0, "equal")
            assert (rank.batches, rank.uncompared_batches) == (0, 3)
            (said,) = list_one_sided(comparison)
            assert "the probes of 3 batches were not compared" in said
        drift = in_epoch(0, flip)
        assert compare(one, logical_run(runs, 2, edit=drift)).verdict == "different"
        (rank,) = compare(one, other).ranks
        assert rank.verdict == "different"
        assert (rank.batches, rank.uncompared_batches) == (3, 0)

    @pytest.mark.parametrize("numbers", [(4, 8), (4, None), (None, None)])
    def test_without_equal_logical_ranks_it_is(self, runs, numbers):
        """The world size is refused, and so are different numbers of logical ranks."""
        comparison = compare(*map(partial(logical_run, runs), (1, 2), numbers))
        assert comparison.verdict == "not comparable"
        assert "world_size" in [entry.field for entry in comparison.refusals]

    def test_totals_are_held_against_totals(self, runs):
        """Where one run recorded no names, its totals still tell."""

        def leave_out(record, **totals):
            record["groups"] = {}
            record["totals"] |= totals

        full = runs.write()
        assert compare(full, runs.write(edit=in_epoch(1, leave_out))).verdict == "equal"
        drift = partial(leave_out, weights="f" * 32)
        first = compare(full, runs.write(edit=in_epoch(1, drift))).first
        assert (first.kind, first.names) == ("weights", ("(total)",))

    def test_the_end(self, runs):
        """That a run failed is evidence, whatever its weights; the words of its error are not."""

        def fail(words):
            edit = {"status": "failed", "error": words}
            return runs.write(edit=lambda _, records: records[-1].update(edit))

        assert compare(fail("0x7f01"), fail("0x7f02")).verdict == "equal"
        comparison = compare(runs.write(), fail("0x7f01"))
        assert comparison.verdict == "different"
        assert comparison.first.names == ("status",)

    def test_an_end_has_the_place_of_the_run_that_ended_first(self, runs):
        def fail(_, records):
            records[-3:] = [
                make_weights("exception", 2, {"w": "0" * 32}, step=50).as_record(),
                records[-1] | {"status": "failed", "step": 50, "error": "RuntimeError: no\nmemory"},
            ]

        one, other = runs.write(), runs.write(edit=fail)
        for found in (compare(one, other), compare(other, one)):
            assert (found.first.is_end, found.first.epoch, found.first.step) == (True, 2, 50)
            cause = find_cause(found)
            assert (cause.kind, cause.narrows) == ("failure", False)
            assert "was ended by RuntimeError: no." in cause.text


@pytest.mark.parametrize(("kind", "first"), [("weight", "batch"), ("loss", "step")])
def test_the_probes_of_a_state_show_more_than_its_record(tmp_path, kind, first):
    """The record of the state after step 1 comes before the probes of batch 1, in segments."""
    places = [("rng", "torch"), (kind, "layers.0.weight")]
    folders = []
    for value in (1, 2):
        layout, *batches = make_probes(places, [(0, 0), (0, value)])
        totals = {"weights": f"{value}" * 32}
        state = StepDigests(epoch=0, step=1, totals=totals, entries={"weights": b"0" * 4})
        records = [make_facts(), layout, batches[0], state, batches[1]]
        own = {"program": {SEGMENT: "until 2"}}
        folders.append(write_rank(create_ledger_folder(tmp_path), records, **own))
    found = compare(*folders).first
    assert (found.moment, found.step) == (first, 1)
    assert found.name == ("layers.0.weight" if first == "batch" else "(total)")


class TestStatesAfterACheckpoint:
    """Each run has those of the steps that follow its own checkpoints."""

    @staticmethod
    def write(tmp_path, weights, steps, ends=True, device="cpu", world_size=1):
        """Weights and generators of each step; the last step ends the epoch."""
        records = [make_facts()]
        for step in steps:
            totals = {"weights": weights[step] * 32, "generators": device[0] * 32}
            records.append(StepDigests(epoch=0, step=step, totals=totals, entries={}))
        last = weights[max(weights)] * 32
        state = make_weights("epoch", 0, {"w": last}, step=max(weights), totals={"weights": last})
        records += [state] * ends
        stack = {"device.kind": device, "world.logical_ranks": 4}
        folder = create_ledger_folder(tmp_path)
        return write_rank(folder, records, stack=stack, world_size=world_size, end="finished")

    def test_those_of_both_are_compared(self, tmp_path):
        same, other = {1: "0", 2: "0", 3: "0"}, {1: "0", 2: "1", 3: "0"}
        one = self.write(tmp_path, same, [1, 2])
        found = compare(one, self.write(tmp_path, other, [2, 3]))
        assert (found.verdict, found.first.where) == (
            "different",
            "the state after step 2 (epoch 0)",
        )
        found = compare(one, self.write(tmp_path, other, [1, 3]))
        assert (found.verdict, found.ranks[0].records, found.ranks[0].digests) == ("equal", 4, 2)

    @pytest.mark.parametrize("ends", [True, False])
    def test_the_record_of_the_epoch_that_ends_there_shows_more(self, tmp_path, ends):
        runs = [self.write(tmp_path, {1: "0", 2: value}, [1, 2], ends) for value in "01"]
        first = compare(*runs).first
        assert (first.moment, first.step) == ("epoch" if ends else "step", 2)

    def test_generators_of_other_devices_or_processes_are_left_out(self, tmp_path):
        one = self.write(tmp_path, {1: "0"}, [1])
        for changes, records in (({"device": "cuda"}, 4), ({"world_size": 2}, 3)):
            found = compare(one, self.write(tmp_path, {1: "0"}, [1], **changes))
            assert (found.verdict, found.ranks[0].records) == ("equal", records)
        other = self.write(tmp_path, {1: "1"}, [1], ends=False, device="cuda")
        assert (
            compare(self.write(tmp_path, {1: "0"}, [1], ends=False), other).verdict == "different"
        )


@pytest.mark.parametrize("end", ["", "finished"])
def test_only_the_last_batch_of_a_killed_run_may_be_torn(tmp_path, end):
    """A probe that only one run has in an earlier batch is a difference."""

    def write(wide=None):
        layout, *batches = make_probes([("output", "a")], [(0,)] * 3)
        records = [make_facts(), layout, *batches]
        if wide is not None:
            batches[wide]["digests"] *= 2
            two = layout | {"places": [*layout["places"], ["output", "b", 0]]}
            records[2 + wide : 3 + wide] = [two, batches[wide], layout]
        return write_rank(create_ledger_folder(tmp_path), records, end=end)

    one = write()
    assert compare(write(0), one).verdict == "different"
    assert compare(write(0), write(2)).verdict == "different"
    assert compare(write(2), one).verdict == ("different" if end else "incomplete")


@pytest.mark.parametrize("batches", [0, 4])
@pytest.mark.parametrize("loss", ["0x1.0000000000000p+0", "0x1.0000000000000p+1"])
def test_a_validation_within_an_epoch_that_a_segment_does_not_end(tmp_path, loss, batches):
    """The run compares it after the epoch, and the segment at its end."""
    folders = []
    for value, stop in (("0x1.0000000000000p+0", 4), (loss, 2)):
        probes = [*make_probes([("loss", "")], [(step,) for step in range(min(batches, stop))])]
        states = [StepDigests(epoch=0, step=s, totals={}, entries={}) for s in range(1, stop + 1)]
        seen = Evaluation(
            name="validate", epoch=0, step=1, batches=1, scalars={"loss": value}, outputs="0" * 32
        )
        end = [make_weights("epoch", 0, {"w": "0" * 32}, step=4)] if stop == 4 else []
        own = {} if end else {"program": {SEGMENT: "until 2"}, "end": "stopped"}
        records = [make_facts(), *probes[:2], states[0], seen, *probes[2:], *states[1:], *end]
        folders.append(write_rank(create_ledger_folder(tmp_path), records, **own))
    found = compare(*folders)
    assert found.verdict == ("equal" if loss == "0x1.0000000000000p+0" else "different"), found
    assert compare(*folders[::-1]).verdict == found.verdict


def test_a_probe_of_a_value_that_cannot_be_read_is_named(tmp_path):
    folders = []
    for problem in ("input a: of type Lock", "input a: of type Lock at 0x1"):
        layout, batch = make_probes([("input", "a")], [(1,)])
        records = [make_facts(), layout, batch | {"problem": problem}]
        folders.append(write_rank(create_ledger_folder(tmp_path), records))
    (found,) = compare(*folders).ranks
    assert (found.verdict, found.divergence) == ("equal", None)
    assert found.undigested == "batch 0 of epoch 0 (step 0): input a: of type Lock"


@pytest.mark.parametrize(("weight", "kind"), [("1", "evaluation"), ("2", "weights")])
def test_weights_that_differ_after_a_validation_are_its_cause(tmp_path, weight, kind):
    """No record before it has the weights that it evaluates."""
    folders = []
    for value, digit in ((1.0, "1"), (1.5, weight)):
        seen = Evaluation(
            name="validate",
            epoch=0,
            step=1,
            batches=1,
            outputs="0" * 32,
            scalars={"loss": value.hex()},
        )
        records = [make_facts(), seen, make_weights("epoch", 0, {"w": digit * 32}, step=4)]
        folders.append(write_rank(create_ledger_folder(tmp_path), records))
    found = compare(*folders)
    assert (found.first.kind, found.logged) == (kind, None)


PART = {"program": {SEGMENT: "until epoch 2"}}
# Two runs, of epochs, an end and a header, and their verdict: where a segment is stopped, or still
# trains, the other may end later.
ENDS = {
    "a segment of a run": ((3, "finished"), (1, "stopped", PART), "equal"),
    "a segment that trains": ((3, "finished"), (1, "", PART), "equal"),
    "a segment of a killed run": ((3, ""), (1, "stopped", PART), "equal"),
    "a segment whose fit ends early": ((3, "finished"), (1, "finished", PART), "different"),
    "a segment whose fit fails": ((3, "finished"), (1, "failed", PART), "different"),
    "a segment that trains on": ((1, "finished"), (3, "stopped", PART), "different"),
    "a segment that still trains after it": ((1, "finished"), (3, "", PART), "different"),
    "a segment up to the end": ((3, "finished"), (3, "finished", PART), "equal"),
    "two segments": ((3, "stopped", PART), (1, "stopped", PART), "equal"),
    "two segments, of which one ends": ((3, "stopped", PART), (1, "finished", PART), "different"),
    "a shorter run": ((3, "finished"), (1, "finished"), "different"),
    "a run that failed": ((3, "finished"), (1, "failed"), "different"),
    "a killed run": ((3, "finished"), (1, ""), "incomplete"),
    "two killed runs": ((3, ""), (1, ""), "incomplete"),
    "two killed runs of a length": ((1, ""), (1, ""), "incomplete"),
}


@pytest.mark.parametrize(("one", "other", "verdict"), ENDS.values(), ids=ENDS)
def test_where_two_runs_end(tmp_path, one, other, verdict):
    def write(epochs, end, header=None):
        states = [make_weights("epoch", epoch, {"w": "0" * 32}) for epoch in range(epochs)]
        last = [make_weights("final", epochs - 1, {"w": "0" * 32})] * (end not in ("", "stopped"))
        records = [make_facts(), *states, *last]
        return write_rank(create_ledger_folder(tmp_path), records, end=end, **(header or {}))

    folders = write(*one), write(*other)
    for found in (compare(*folders), compare(*folders[::-1])):
        assert found.verdict == verdict, found
        if verdict == "different" and one[1] and other[1]:
            assert (found.first.is_end, found.first.step) == (True, 9)


def test_a_killed_run_that_lacks_a_record_within_is_different(tmp_path):
    states = [make_weights("epoch", epoch, {"w": "0" * 32}) for epoch in range(3)]
    whole = write_rank(create_ledger_folder(tmp_path), [make_facts(), *states])
    lacks = [make_facts(), states[0], states[2]]
    killed = write_rank(create_ledger_folder(tmp_path), lacks, end="")
    assert compare(whole, killed).verdict == compare(killed, whole).verdict == "different"


class TestOneSided:
    def test_one_stopped_early(self, runs):
        """Its final state is that of another epoch, and the ends differ."""
        (rank,) = compare(runs.write(epochs=5), runs.write(epochs=3)).ranks
        assert (rank.differing, rank.divergence.step) == (1, 69)
        assert rank.divergence.names == ("epoch", "step")
        assert rank.epochs == 3
        assert (rank.expected.records, rank.actual.records) == (3, 1)
        assert rank.expected.first_record == "epoch 3 (step 92)"
        assert rank.actual.first_record == "the final state (epoch 2, step 69)"
        assert rank.verdict == "different"

    @pytest.mark.parametrize("torn", [False, True])
    def test_one_was_killed(self, runs, torn):
        """In the middle of a record, or between two."""
        one, other = runs.write(), runs.write()
        path = rank_path(other, 0)
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:5]) + (lines[5][:-9] if torn else b""))
        comparison = compare(one, other)
        (rank,) = comparison.ranks
        assert comparison.verdict == "incomplete"
        assert compare(other, one).verdict == "incomplete"
        assert not comparison.equal
        assert (rank.expected.end, rank.actual.end) == ("finished", "")
        assert (rank.expected.truncated, rank.actual.truncated) == (False, torn)
        assert (rank.expected.records, rank.expected.first_record) == (3, "epoch 2 (step 69)")


class TestNotComparable:
    """Runs that differ by design are refused, with the reason."""

    @pytest.mark.parametrize(
        ("changes", "field", "expected", "actual"),
        [
            ({"seed": 43}, "seed", "42", "43"),
            ({"fit": 1}, "fit", "0", "1"),
            ({"world_size": 2}, "world_size", "1", "2"),
            ({"settings": {"per_sample_rng": True}}, "settings.per_sample_rng", "False", "True"),
            (facts(parameters=99), "model", "(1234 parameters)", "(99 parameters)"),
            (facts(train=[LoaderFacts(99, 64, 23)]), "dataset", "1437 samples", "99 samples"),
            (facts(train=[]), "dataset", "1437 samples", "no samples"),
            (facts(train=[LoaderFacts(None, 64, 23)]), "dataset", "1437", "unknown samples"),
            (facts(train=[LoaderFacts(1437, 32, 23)]), "batch_size", "64", "32 samples a batch"),
            (facts(train=[LoaderFacts(1437, 64, 9)]), "batches", "23", "9 batches an epoch"),
            (facts(trainer={"precision": "bf16"}), "trainer.precision", "32-true", "bf16"),
        ],
    )
    def test_by_header_or_facts(self, runs, changes, field, expected, actual):
        comparison = compare(runs.write(), runs.write(**changes))
        assert comparison.verdict == "not comparable"
        assert all(rank.divergence is None for rank in comparison.ranks)
        first = comparison.refusals[0]
        assert (first.field, bool(first.reason)) == (field, True)
        assert expected in str(first.expected)
        assert actual in str(first.actual)

    def test_a_stack_or_a_harmless_setting_refuses_nothing(self, runs):
        """They are listed; the bits decide."""
        other = runs.write(stack={"torch.version": "2.14"}, settings={"threads": 2})
        comparison = compare(runs.write(settings={"threads": None}), other)
        assert comparison.verdict == "equal"
        assert {entry.field for entry in comparison.stack} == {"torch.version", "device.driver"}
        assert [entry.field for entry in comparison.settings] == ["threads"]

    def test_equal_runs_with_ops_that_may_vary_say_so(self, runs):
        """Two equal runs are no evidence about a third one then."""
        settings = {"settings": {"varying_ops": "a::b histc"}}
        comparison = compare(runs.write(**settings), runs.write(**settings))
        assert comparison.verdict == "equal"
        assert comparison.varying_ops == ("a::b", "histc")
        assert comparison.as_json()["varying_ops"] == ("a::b", "histc")
        assert "Another run may differ: varying_ops lets a::b, histc" in state_verdict(comparison)
        assert "may differ" not in state_verdict(compare(runs.write(), runs.write()))


def test_evaluations_with_the_same_key_are_compared_in_their_order(runs):
    """Those of a step may be written in any order."""

    def write(*entries):
        words = {"kind": "evaluation", "epoch": 0, "step": 0, "outputs": "0" * 32}
        added = [words | {"name": name, "batches": int(batches)} for name, batches in entries]
        return runs.write(edit=lambda _, records: records.__setitem__(slice(3, 3), added))

    one = write("a1", "a2", "b1")
    assert compare(one, write("b1", "a1", "a2")).equal
    (rank,) = compare(one, write("b1", "a1", "a3")).ranks
    found = rank.divergence
    assert (rank.differing, found.names, found.expected) == (1, ("batches",), "2")


@pytest.mark.parametrize(
    ("changes", "extent"),
    [
        ((1.5, "1", "1"), "evaluations"),
        ((1.0, "2", "1"), "evaluations"),
        ((1.5, "2", "2"), "training"),
    ],
)
def test_what_differs_at_most(runs, changes, extent):
    """All records decide, whichever differs first."""

    def write(value, output, weight):
        def edit(rank, records):
            end = records.index(next(r for r in records if r.get("moment") == "epoch"))
            scalars = {"val_loss": value.hex()}
            records[end]["scalars"] |= scalars
            logged = {"step": records[end]["step"], "scalars": scalars}
            entry = Evaluation(name="fit", epoch=0, batches=2, outputs=output * 32, **logged)
            records.insert(end, entry.as_record())
            final = next(r for r in records if r.get("moment") == "final")
            final["totals"]["weights"] = weight * 32

        return runs.write(edit=edit)

    found = compare(write(1.0, "1", "1"), write(*changes))
    assert (found.extent, found.verdict) == (extent, "different")
