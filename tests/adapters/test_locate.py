"""``d9m locate``: the looks, what each asks for, and what is said when nothing comes back."""

from types import SimpleNamespace

import pytest

from lightning_d9m.adapters import locate_op
from lightning_d9m.adapters.cli import main
from lightning_d9m.adapters.locate import Search
from lightning_d9m.adapters.locate_op import find_patch
from lightning_d9m.adapters.locate_report import describe
from lightning_d9m.evidence.batches import PlaceDifference
from lightning_d9m.evidence.comparison import Divergence


def pair(kind=None, name="a", *, step=0, moment="batch", epoch=0):
    """Return a pair of runs that diverge at a place, or agree."""
    found = Divergence(
        rank=0, epoch=epoch, step=step, batch=step, moment=moment, kind=str(kind), name=name,
        call=0, position=0, expected="0", actual="f", count=1, compared=9,
        places=(PlaceDifference(0, str(kind), name, 0, "0", "f"),),
    )  # fmt: skip
    ranks = [SimpleNamespace(divergence=None if kind is None else found)]
    return SimpleNamespace(
        differs=kind is not None,
        comparison=SimpleNamespace(ranks=ranks, refusals=(), stack=()),
        steps_of_epoch=lambda epoch: (10 * epoch, 10 * epoch + 10),
        fit="fit-000",
        dumps=(),
    )


def search(*pairs, tries=1):
    """Search among given pairs; return what was found and what the looks asked for."""
    asked = []
    remaining = iter(pairs)

    def run_pair(stage, **words):
        asked.append((stage, words))
        return next(remaining)

    return Search(SimpleNamespace(run_pair=run_pair), tries).locate(), asked


EPOCH = {"kind": "weights", "moment": "epoch", "step": 10}


def test_runs_that_agree():
    found, asked = search(pair(), pair(), tries=2)
    assert found.cause is None
    assert len(asked) == 2
    assert "equal: no two runs differ." in "\n".join(describe(found, recipe=True))


def test_what_narrows_no_further_ends_the_search():
    found, asked = search(pair(**EPOCH), pair("batch", "batch:0", step=4))
    assert found.cause.kind == "data"
    assert [words.get("probe_steps") for _, words in asked] == [None, "0:10"]


def test_from_the_epoch_to_the_operations_of_a_module():
    found, asked = search(
        pair(**EPOCH),
        pair("loss", "loss", step=4),
        pair("output", "layers[0]", step=4),
        pair("op", "layers[0]::aten.index_put_.default", step=4),
    )
    assert found.cause.kind == "op"
    assert [words.get("probe_steps") for _, words in asked] == [None, "0:10", "0:5", "4:5"]
    assert asked[-1][1]["probe_modules"] == "layers[[]0]"
    assert asked[-1][1]["dump"]


def test_a_divergence_that_does_not_come_back_is_told_as_far_as_it_was_seen():
    found, _ = search(pair(**EPOCH), pair("loss", "loss", step=4), pair(), pair(), tries=1)
    text = "\n".join(describe(found, recipe=True))
    assert found.cause.kind == "module"
    assert "modules of the step: the divergence did not come back in 2 runs" in text
    assert "where: epoch 0, step 4, batch 4: loss loss" in text


def test_state_that_differs_where_the_probes_begin_was_not_caught():
    """The cause lies before the steps that were probed: nothing is to be invented from that."""
    found, _ = search(
        pair(**EPOCH),
        pair("loss", "loss", step=4),
        pair("output", "layers", step=4),
        pair("weight", "layers.weight", step=4),
    )
    assert found.cause.kind == "module"
    said = "the divergence did not come back in 2 runs, 1 of 1 pairs differ elsewhere"
    assert found.looks[-1].endswith(said)


def test_a_pair_that_diverges_in_an_earlier_epoch_sends_the_search_back_to_it():
    """A race: the second pair is not to be blamed on the epoch of the first."""
    found, asked = search(
        pair(**EPOCH | {"epoch": 3, "step": 40}),
        pair(**EPOCH | {"epoch": 1, "step": 20}),
        pair("batch", "batch", step=12, epoch=1),
    )
    assert (found.cause.kind, found.divergences[0].step) == ("data", 12)
    assert [words.get("probe_steps") for _, words in asked] == [None, "30:40", "10:20"]


@pytest.mark.parametrize("differs", [False, True])
def test_filled_memory_tells_an_uninitialised_read(differs, monkeypatch):
    finding = SimpleNamespace(inputs_equal=False)
    monkeypatch.setattr(locate_op, "examine_op", lambda *_: finding)
    found, asked = search(
        pair(**EPOCH),
        pair("loss", "loss", step=4),
        pair("output", "layers", step=4),
        pair("op", "layers::aten.mul.Tensor", step=4),
        pair(**EPOCH) if differs else pair(),
    )
    assert found.cause.kind == ("value from outside torch" if differs else "uninitialised memory")
    assert asked[-1][1] == {"filled": True}


def test_a_line_is_no_wider_than_a_terminal():
    found, _ = search(pair(**EPOCH), pair("weight", "layers.weight", step=4))
    assert max(map(len, describe(found, recipe=True))) <= 80


def test_initial_weights_need_one_look():
    found, asked = search(pair("weights", moment="initial"))
    assert found.cause.kind == "initial weights"
    assert len(asked) == 1


@pytest.mark.parametrize(("op", "name"), [("aten.put_.default", "put_"), ("aten.mm.default", None)])
def test_the_catalogue_is_asked(op, name):
    found = find_patch(op)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--"], "no command to run"),
        (["--tries", "0", "--", "true"], "--tries is 0; allowed"),
        (["--timeout", "0", "--", "true"], "--timeout is 0; allowed"),
    ],
)
def test_misuse(words, message, capsys):
    assert main(["locate", *words]) == 2
    assert message in capsys.readouterr().err
