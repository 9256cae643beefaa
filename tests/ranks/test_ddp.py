"""Two processes with DDP on Gloo: ranks are compared, and all of them raise together."""

import os
import pickle
import sys
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed.distributed_c10d as collectives
from ledger_runs import list_batches
from rank_processes import call_on_ranks
from trainings import QUIET, make_loader, make_model

from lightning_d9m import D9mError, DeterminismCallback
from lightning_d9m.control import session
from lightning_d9m.ledger.folder import read_ledger

RANK = int(os.environ.get("RANK", "0"))


def fit(folder, name, model=None, **words):
    """Train as a run of its own would."""
    session._fits = 0
    callback = DeterminismCallback(seed=5, ledger_dir=folder / name, **words)
    trainer = L.Trainer(max_epochs=2, strategy="ddp", devices=2, callbacks=[callback], **QUIET)
    trainer.fit(model or make_model(), make_loader(), make_loader(shuffle=False))
    return trainer


@contextmanager
def unpickling_watched():
    """Yield a list that gets the file of whoever unpickles what a rank has sent.

    Functions of torch and of Lightning's strategies do it on behalf of their caller.
    """
    callers = []

    class Watched(pickle.Unpickler):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            frame = sys._getframe(1)
            while "/torch/" in (name := frame.f_code.co_filename) or "/strategies/" in name:
                frame = frame.f_back
            callers.append(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_unpickler", Watched)
        yield callers


def error_of(*arguments, **words):
    """Return the facts of the error that a training raises."""
    with pytest.raises(D9mError) as caught:
        fit(*arguments, **words)
    return {"message": str(caught.value), **vars(caught.value)}


def change_moment(module):
    """Change Adam's first moment by one unit in the last place, after the last step."""
    moment = module.optimizers().state[module.layers[0].weight]["exp_avg"]
    moment.view(torch.int32)[2, 3] += 1


def change_rate(module):
    """Change the learning rate when an epoch ends."""
    module.optimizers().param_groups[0]["lr"] = 0.02


def change_statistics(module):
    """Change a buffer when an epoch ends: the next batch brings rank 0's again."""
    module.layers[1].running_mean += 0.5


def make_disturbed(change):
    """Return a model that rank 1 changes after each validation but the first."""

    def on_validation_epoch_end(self):
        if RANK == 1 and not (self.trainer.sanity_checking and change is not change_statistics):
            change(self)

    return make_model(on_validation_epoch_end=on_validation_epoch_end)


def switch_off(self, *_):
    """Switch deterministic algorithms off on rank 1 only."""
    if RANK == 1:
        torch.use_deterministic_algorithms(False)


class FlipOnRank1:
    """Flips a bit of an output once, on rank 1: in the first run of the third batch."""

    left = 2 + 5  # two batches of validation before, two runs of a batch

    def __call__(self, module, args, output):
        self.left -= 1
        if RANK == 1 and self.left == 0:
            flipped = output.detach().clone()
            flipped.view(torch.int32)[0, 0] ^= 1 << 12
            return output + (flipped - output.detach())
        return None


def train(folder):
    """Train several times; return what was found."""
    folder = Path(folder)
    before = dict(os.environ)
    fit(folder, "first")
    changed = {own for own in before.keys() | os.environ if before.get(own) != os.environ.get(own)}
    left = [*changed - {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"}]
    found = {"left": left + ["deterministic"] * torch.are_deterministic_algorithms_enabled()}
    with unpickling_watched() as callers:
        fit(folder, "second").save_checkpoint(folder / "second.ckpt")
    found["unpickles"] = callers
    found["moment"] = error_of(folder, "moment", make_disturbed(change_moment))
    found["rate"] = error_of(folder, "rate", make_disturbed(change_rate))
    other, first = make_disturbed(change_statistics), folder / "first" / "fit-000"
    found["statistics"] = error_of(folder, "data", other, reference=first)
    found["switch"] = error_of(folder, "off", make_model(on_train_batch_end=switch_off))
    (folder / "file").write_text("")
    found["no folder"] = error_of(folder, "file/below")
    fit(folder, "probed", probes="all", replay_every=2)
    faulty = make_model()
    faulty.layers[0].register_forward_hook(FlipOnRank1())
    words = {"replay_every": 1, "probes": "loss", "probe_ranks": 1}
    found["faulty"] = error_of(folder, "faulty", faulty, **words)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def found(folder):
    """Train in two processes once for all tests; return what each rank found."""
    return call_on_ranks(train, 2, folder)


@pytest.mark.parametrize(
    ("case", "name"), [("moment", "0.exp_avg.layers.0.weight"), ("rate", "0.group.0")]
)
def test_optimizer_state_that_differs_on_one_rank_raises_on_all(found, case, name):
    for error in (entry[case] for entry in found):
        assert (error["rank"], error["group"], error["names"]) == (1, "optimizers", [name])
        assert (error["epoch"], error["count"]) == (0, 1)
        assert "optimizer entries differ, first " + name in error["message"]


def test_a_reference_that_one_rank_leaves_stops_all(found):
    first, second = (entry["statistics"] for entry in found)
    assert first["rank"] == second["rank"] == 1
    assert "in the message of rank 1" in first["message"]
    assert "buffers" in second["message"]


def test_a_folder_that_cannot_be_made_stops_all(found):
    for error in (entry["no folder"] for entry in found):
        assert "No ledger can be made" in error["message"]


def test_a_switch_that_one_rank_lost_stops_all(found):
    first, second = (entry["switch"]["message"] for entry in found)
    assert "Rank 1 failed, so this rank 0 stops too" in first
    assert "deterministic" in second


def test_nothing_of_the_run_is_left_on_any_rank(found):
    assert [entry["left"] for entry in found] == [[], []]


def test_no_rank_unpickles_for_us(found):
    """It would run code of the rank that sent it. Lightning does so to agree on its folders."""
    callers = [Path(name) for entry in found for name in entry["unpickles"]]
    assert {path.parent.name for path in callers} == {"trainer"}
    assert not [path for path in callers if "lightning_d9m" in path.parts]


def test_probes_and_replays_change_no_bit(folder, found):
    plain, probed = (read_ledger(folder / name / "fit-000") for name in ("first", "probed"))
    for rank in (0, 1):
        assert plain.outcome(rank).final == probed.outcome(rank).final


def test_local_gradients_differ_and_reduced_ones_do_not(folder, found):
    ranks = []
    for rank in (0, 1):
        batches = list_batches(read_ledger(folder / "probed" / "fit-000"), rank)
        assert (batches[0][0], batches[0][2]) == (0, 0)
        ranks.append(dict(batches[0][3]))
    kinds = ("local_gradient", "gradient")
    local, reduced = ([own[kind, "layers.0.weight", 0] for own in ranks] for kind in kinds)
    assert local[0] != local[1]
    assert reduced[0] == reduced[1]
    assert reduced[0] not in local


def test_a_fault_on_one_rank_stops_both(found):
    first, second = (entry["faulty"] for entry in found)
    assert (second["step"], second["group"], second["names"]) == (2, "output", ["layers.0"])
    assert "Rank 1 failed" in first["message"]


def test_only_the_ranks_that_are_named_record(folder, found):
    """One that ends with an error has written what it met before."""
    ledger = read_ledger(folder / "faulty" / "fit-000")
    assert [len(list_batches(ledger, rank)) for rank in (0, 1)] == [0, 3]
