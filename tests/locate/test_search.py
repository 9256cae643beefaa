"""``d9m locate``: the looks, what each asks for, and what is said when nothing comes back."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_d9m.comparison.probe_diff import PlaceDifference
from lightning_d9m.comparison.result import Divergence
from lightning_d9m.locate import op_evidence
from lightning_d9m.locate.op_evidence import find_patch
from lightning_d9m.locate.search import Search
from lightning_d9m.output.locate_text import describe


def pair(kind=None, name="a", *, step=0, moment="batch", epoch=0, values=("", ""), others=()):
    """Return a pair of runs that diverge at a place, or agree."""
    found = Divergence(
        rank=0, epoch=epoch, step=step, batch=step, moment=moment, kind=str(kind), name=name,
        call=0, position=0, count=1, compared=9, expected=values[0], actual=values[1],
        places=tuple(PlaceDifference(0, str(kind), own, 0, *values) for own in (name, *others)),
    )  # fmt: skip
    ranks = [SimpleNamespace(divergence=None if kind is None else found)]
    return SimpleNamespace(
        differs=kind is not None,
        rank_drift=(),
        comparison=SimpleNamespace(ranks=ranks, refusals=(), stack=()),
        steps_of_epoch=lambda epoch: (10 * epoch, 10 * epoch + 10),
        fit="fit-000",
        fits=1,
        dumps=(Path("nowhere"), Path("nowhere")),
    )


def search(*pairs, tries=1):
    """Search among given pairs; return what was found and what the looks asked for."""
    asked = []
    remaining = iter(pairs)

    def run_pair(stage, **words):
        asked.append((stage, words))
        return next(remaining)

    return Search(SimpleNamespace(run_pair=run_pair, command=["true"]), tries).locate(), asked


EPOCH = {"kind": "weights", "moment": "epoch", "step": 10}


def test_runs_that_agree():
    found, asked = search(pair(), pair(), tries=2)
    assert found.cause is None
    assert len(asked) == 2
    assert "equal: no two runs differ." in "\n".join(describe(found, determinism=True))


def test_what_narrows_no_further_ends_the_search():
    found, asked = search(pair(**EPOCH), *[pair("batch", "batch:0", step=4)] * 3)
    assert found.cause.kind == "data"
    assert [words.get("probe_steps") for _, words in asked] == [None, "0:10", "4:5", "0:10"]
    assert [words.get("dump") for _, words in asked[-2:]] == ["batch:0", "batch"]


def test_from_the_epoch_to_the_operations_of_a_module():
    found, asked = search(
        pair(**EPOCH),
        pair("loss", "loss", step=4),
        pair("output", "layers[0]", step=4),
        *[pair("op", "layers[0]::aten.max.dim:1", step=4)] * 2,
    )
    assert found.cause.kind == "op"
    assert [words.get("probe_steps") for _, words in asked] == [None, "0:10", "0:5", "4:5", "4:5"]
    assert [words.get("probe_modules") for _, words in asked[-2:]] == [
        "layers[[]0],layers[[]0].*"
    ] * 2
    assert asked[-1][1]["dump"] == "layers[0]::aten.max.dim"


def test_what_comes_into_a_module_is_not_what_it_did():
    """Only that module is looked at, so another pair's cause may lie where nobody looks."""
    found, _ = search(
        pair(**EPOCH),
        pair("loss", "loss", step=4),
        pair("output", "layers", step=4),
        pair("input", "layers", step=4),
        pair("output", "layers", step=4),
    )
    assert found.divergences[0].kind == "output"
    said = "the divergence did not occur again in 2 runs, 1 of 1 pairs differ elsewhere"
    assert found.looks[-2] == f"operations of layers: {said}"


def test_the_values_of_state_are_saved_with_the_step_before():
    """It shows that they were equal there: of a pair that diverges earlier nothing is measured."""
    found, asked = search(
        pair(**EPOCH),
        pair("weight", "layers.weight", step=4),
        pair("weight", "layers.weight", step=3),
        pair("weight", "layers.weight", step=4),
        tries=2,
    )
    assert asked[-1][1]["probe_steps"] == "3:5"
    assert found.looks[-1] == "values: epoch 0, step 4, batch 4: weight layers.weight"


def test_values_of_another_place_are_not_taken_for_those_that_were_sought():
    found, _ = search(
        pair(**EPOCH), pair("gradient", "a.weight", step=4), pair("gradient", "b.weight", step=4)
    )
    assert found.divergences[0].name == "a.weight"
    said = "values: the divergence did not occur again in 2 runs, 1 of 1 pairs differ elsewhere"
    assert found.looks[-1] == said


def test_values_are_measured_where_another_place_of_that_kind_differs_first():
    """As in a race: which gradients a fused buffer rounds otherwise is left to chance."""
    found, _ = search(
        pair(**EPOCH),
        pair("gradient", "b.weight", step=4),
        pair("gradient", "a.weight", step=5, others=("b.weight",)),
    )
    assert found.divergences[0].step == 4
    assert found.looks[-1] == "values: epoch 0, step 5, batch 5: gradient b.weight"


@pytest.mark.parametrize(
    ("kind", "name", "cause"),
    [
        ("weights", "layers.weight", "weights"),
        ("buffers", "layers.running_mean", "buffers"),
        ("optimizers", "0.exp_avg.layers.weight", "optimizer state"),
        ("optimizers", "0.group.0", "optimizer settings"),
        ("schedulers", "0", "optimizer settings"),
    ],
)
def test_what_changes_after_the_last_batch_of_an_epoch(kind, name, cause):
    """All batches were probed and agree, so it is what came after them."""
    found, _ = search(*[pair(kind, name, moment="epoch", step=10)] * 3)
    assert found.cause.kind == cause
    assert found.looks[1] == f"steps of the epoch: epoch 0, step 10: {kind} {name}"


def test_a_logged_number_is_measured_from_the_ledger():
    values = ((1.5).hex(), (1.5 + 2**-23).hex())
    logged = pair("scalars", "val_loss", moment="epoch", step=10, values=values)
    found, asked = search(logged, logged)
    assert found.cause.kind == "logged value"
    assert (found.magnitude.ulps, len(asked)) == (1, 2)


def test_another_fit_of_a_run_is_not_taken_for_the_one_that_diverged():
    other = pair("batch", "batch", step=4)
    other.fit = "fit-001"
    found, _ = search(pair(**EPOCH), other)
    assert found.pair.fit == "fit-000"
    assert "1 of 1 pairs differ elsewhere" in found.looks[-1]


def test_the_fit_is_named_where_a_run_has_several():
    first = pair("weights", moment="initial")
    first.fits, first.fit = 2, "fit-001"
    found, _ = search(first, pair())
    assert "fit:   fit-001, one of 2" in describe(found, determinism=True)


def test_a_divergence_that_does_not_come_back_is_told_as_far_as_it_was_seen():
    found, _ = search(pair(**EPOCH), pair("loss", "loss", step=4), *[pair()] * 3, tries=1)
    text = "\n".join(describe(found, determinism=True))
    assert found.cause.kind == "module"
    assert "modules of the step: the divergence did not occur again in 2 runs" in text
    assert "where: epoch 0, step 4, batch 4: loss loss" in text


def test_state_that_differs_where_the_probes_begin_was_not_caught():
    """The cause lies before the steps that were probed: nothing is to be invented from that."""
    found, _ = search(
        pair(**EPOCH),
        pair("loss", "loss", step=4),
        pair("output", "layers", step=4),
        pair("weight", "layers.weight", step=4),
        pair(),
    )
    assert found.cause.kind == "module"
    said = "the divergence did not occur again in 2 runs, 1 of 1 pairs differ elsewhere"
    assert found.looks[-2].endswith(said)


def test_a_pair_that_diverges_in_an_earlier_epoch_sends_the_search_back_to_it():
    """A race: the second pair is not to be blamed on the epoch of the first."""
    found, asked = search(
        pair(**EPOCH | {"epoch": 3, "step": 40}),
        pair(**EPOCH | {"epoch": 1, "step": 20}),
        *[pair("batch", "batch", step=12, epoch=1)] * 3,
    )
    assert (found.cause.kind, found.divergences[0].step) == ("data", 12)
    steps = [words.get("probe_steps") for _, words in asked]
    assert steps == [None, "30:40", "10:20", "12:13", "10:20"]


@pytest.mark.parametrize("differs", [False, True])
def test_filled_memory_tells_an_uninitialized_read(differs, monkeypatch):
    finding = SimpleNamespace(inputs_equal=False)
    monkeypatch.setattr(op_evidence, "examine_op", lambda *_: finding)
    found, asked = search(
        pair(**EPOCH),
        pair("loss", "loss", step=4),
        pair("output", "layers", step=4),
        *[pair("op", "layers::aten.mul.Tensor", step=4)] * 2,
        pair(**EPOCH) if differs else pair(),
    )
    assert found.cause.kind == ("value from outside torch" if differs else "uninitialized memory")
    assert asked[-1][1] == {"filled": True}


def test_a_line_is_no_wider_than_a_terminal():
    found, _ = search(pair(**EPOCH), *[pair("weight", "layers.weight", step=4)] * 2)
    assert max(map(len, describe(found, determinism=True))) <= 80


def test_another_stack_is_shown_and_nothing_else_is_sought():
    other = pair(**EPOCH)
    other.comparison.stack = (SimpleNamespace(field="threads", expected=1, actual=2),)
    found, asked = search(other)
    assert (found.cause.kind, len(asked)) == ("stack", 1)
    assert "  threads" in describe(found, determinism=True)


def test_what_one_run_has_alone_is_told():
    longer = pair()
    alone = SimpleNamespace(count=9, first="epoch 2")
    rank = SimpleNamespace(
        rank=0, divergence=None, only_expected=SimpleNamespace(count=0), only_actual=alone
    )
    longer.differs, longer.comparison.ranks = True, [rank]
    found, asked = search(longer)
    assert (found.cause.kind, len(asked)) == ("length", 1)
    assert "  rank 0, actual alone: 9 records, from epoch 2" in describe(found, determinism=True)


def test_initial_weights_need_two_looks():
    """The second saves their values."""
    found, asked = search(*[pair("weights", moment="initial")] * 2)
    assert found.cause.kind == "initial weights"
    assert [words.get("probe_steps") for _, words in asked] == [None, "0:1"]


@pytest.mark.parametrize(
    ("op", "args", "name"),
    [
        ("put_.default", [], "put_"),
        ("mm.default", [], None),
        ("index_put_.default", [0, 0, 0, False], "index_put"),
        ("index_put.default", [0, 0, 0, True], "index_put_accumulate"),
        ("_index_put_impl_.default", [], "index_put_accumulate"),
        ("scatter_.src", [], "scatter"),
        ("convolution_backward.default", [], "convolution"),
        ("_scaled_dot_product_flash_attention_backward.default", [],
         "scaled_dot_product_attention_backward"),
        ("median.dim", [], "median"),
    ],
)  # fmt: skip
def test_the_catalogue_is_asked(op, args, name):
    found = find_patch({"op": f"aten.{op}", "args": args})
    assert (found.name if found else None) == name
