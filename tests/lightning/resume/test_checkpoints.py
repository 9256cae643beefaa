"""Checkpoints as users save, copy, damage and load them."""

import shutil
from functools import partial

import lightning.pytorch as L
import pytest
import torch
import trainings
from ledger_runs import find_breaks
from lightning.pytorch.callbacks import LearningRateFinder
from resuming import Fits, agree, evidence, stream
from trainings import QUIET, make_exception_saver, make_loader, make_model

from lightning_d9m import D9mError, DeterminismCallback
from lightning_d9m.engine.hashing.checkpoint_manifest import make_manifest
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.state.plain_data import encode_plain, pack_bytes
from lightning_d9m.errors import CheckpointError, DriftError, InexactResumeError
from lightning_d9m.integrations.lightning import saved_state
from lightning_d9m.integrations.lightning.saved_state import (
    MANIFEST_KEY,
    check_checkpoint,
    find_state,
)
from lightning_d9m.integrations.trainer.trainer_attributes import KEY
from lightning_d9m.tools.cli.main import main


def test_a_run_that_is_resumed_twice_counts_as_a_straight_one(fits, capsys):
    """Compare says where the breaks were."""
    straight = fits.fit()
    interrupted = fits.interrupt(at={"epoch": 0, "batch": 3})
    first = fits.checkpoint.rename(fits.folder / "first.ckpt")
    fits.interrupt(at={"epoch": 1, "batch": 4}, resume=first)
    last = fits.resume()
    breaks, problem = find_breaks(last / "rank-0.jsonl")
    assert ([(b.epoch, b.batch) for b in breaks], problem) == ([(0, 3), (1, 4)], "")
    assert [*evidence(last).items()] == [*evidence(straight).items()]
    assert main(["compare", str(straight), str(last)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "this run was interrupted and resumed at epoch 0, batch 3 (step 3)" in said
    assert "epoch 1, batch 4 (step 10)" in said
    assert main(["compare", str(straight), str(interrupted)]) == 1


def test_the_check_against_a_reference_goes_on(fits):
    """What was passed before the break is not asked for again; what comes after it is checked."""

    def disturb(self):
        if self.current_epoch == 2:
            with torch.no_grad():
                self.layers[4].bias[0] += 1e-3

    words = {"words": {"reference": fits.fit()}}
    fits.interrupt(at={"batch": 3}, **words)
    fits.resume(**words)
    with pytest.raises(DriftError, match=r"They last agreed in epoch 1") as caught:
        fits.resume(**words, model=lambda: make_model(on_train_epoch_start=disturb))
    assert caught.value.epoch == 2


def test_a_checkpoint_that_names_code_is_refused(fits):
    """It loads with ``weights_only=True``, and its manifest is right."""
    fits.interrupt(at={"batch": 3})

    @edit
    def attack(content):
        state = find_state(content)
        entry = ["trainings", ["print"], form := {"an enum"}]
        enum = "enum", [["subprocess", "os"], "system"]
        data = encode_plain(entry, lambda own: enum if own is form else None)
        state["ranks"][0]["program"]["trainings.print"] = pack_bytes(data)
        del state[MANIFEST_KEY]
        state[MANIFEST_KEY] = make_manifest(content)

    attack(fits.checkpoint)
    assert main(["verify", str(fits.checkpoint)]) == 0
    with pytest.raises(InexactResumeError, match=r"or that take others: trainings\.print"):
        fits.resume()
    assert not hasattr(trainings, "print")


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_break_is_recorded_where_the_user_goes_on(fits):
    fits.interrupt(at={"batch": 3})
    edit(lambda content: content["callbacks"].pop(KEY))(fits.checkpoint)
    with pytest.warns(UserWarning, match="with a break that the ledger records"):
        folder = fits.resume(words={"on_inexact_resume": "warn"})
    (found,), _ = find_breaks(folder / "rank-0.jsonl")
    assert "has no lightning_d9m state" in found.inexact[0]
    assert (found.epoch, found.step, found.batch) == (1, 9, 3)


def test_training_that_had_ended_goes_on(fits):
    straight = fits.fit()
    fits.fit(max_epochs=2)
    fits.trainer.save_checkpoint(fits.checkpoint)
    agree(straight, fits.resume(max_epochs=3))


def test_a_checkpoint_is_loaded_for_a_test_alone(fits):
    fits.interrupt()
    callback = DeterminismCallback(seed=9, ledger_dir=fits.folder)
    trainer = L.Trainer(**QUIET, callbacks=[callback], default_root_dir=fits.folder)
    trainer.test(make_model(), make_loader(shuffle=False), ckpt_path=fits.checkpoint)
    trainer.save_checkpoint(fits.folder / "tested.ckpt")
    assert find_state(torch.load(fits.folder / "tested.ckpt", weights_only=True)) is None


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_a_run_without_the_callback_reads_it_too(fits):
    fits.interrupt(at={"hook": "on_train_epoch_end"})
    trainer = L.Trainer(**QUIET, max_epochs=3, default_root_dir=fits.folder)
    trainer.fit(make_model(), make_loader(), make_loader(shuffle=False), ckpt_path=fits.checkpoint)
    assert trainer.current_epoch == 3


@pytest.mark.filterwarnings("ignore:.*ckpt_path:UserWarning")
def test_a_checkpoint_of_half_a_batch_is_refused(fits):
    """It is saved where a training step fails, or is interrupted by Ctrl-C."""

    def step(self, batch, batch_idx):
        if self.trainer.global_step == 8:
            raise ZeroDivisionError
        return self.layers(batch[0]).square().mean()

    saver = make_exception_saver(fits.folder / "saved", "ended")
    model = partial(make_model, training_step=step)
    with pytest.raises(ZeroDivisionError):
        fits.fit(model=model, extra=[saver], enable_checkpointing=True)
    with pytest.raises(InexactResumeError, match="saved while batch 2 of epoch 1 was trained"):
        fits.fit(model=model, resume=fits.folder / "saved" / "ended.ckpt")


class Refusal(Exception):  # noqa: N818 - it stands for any error
    """An error of the program."""


def test_an_error_in_on_save_checkpoint_leaves_the_strategy_as_it_was(fits):
    def refuse(self, checkpoint):
        if self.refuses:
            raise Refusal

    fits.fit(model=partial(make_model, on_save_checkpoint=refuse, refuses=False), max_epochs=1)
    fits.model.refuses = True
    with pytest.raises(Refusal):
        fits.trainer.save_checkpoint(fits.checkpoint)
    fits.model.refuses = False
    fits.trainer.save_checkpoint(fits.checkpoint)
    saved = torch.load(fits.checkpoint, weights_only=True)
    assert check_checkpoint(saved, fits.checkpoint)  # one manifest, without that of the error
    assert "save_checkpoint" not in vars(fits.trainer.strategy)


def edit(change):
    """Return a function that changes what a file holds, as a program does."""

    def apply(path):
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)

    return apply


def flip(tensor):
    tensor.view(-1).view(torch.uint8)[2] ^= 1


def swap(content):
    weights, norm = content["state_dict"], ("layers.1.weight", "layers.1.bias")
    weights[norm[0]], weights[norm[1]] = (weights[name] for name in norm[::-1])


def double_rate(content):
    content["optimizer_states"][0]["param_groups"][0]["lr"] *= 2


def cut(kept):
    """Return a function that keeps the first part of a file."""
    return lambda path: path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])


def rename(path):
    """Flip a bit in a name."""
    path.write_bytes(path.read_bytes().replace(b"layers.4.weight", b"Layers.4.weight", 1))


TENSOR, MOMENT = r"1 tensor differs from what was saved.*", "optimizer_states.0.state.0.exp_avg"
TRUNCATED = "is damaged: it is truncated.*Copy the file again, or take"
DAMAGES = {
    "a weight": (
        edit(lambda saved: flip(saved["state_dict"]["layers.4.weight"])),
        rf"{TENSOR}state_dict\.layers\.4\.weight",
    ),
    "an optimizer": (
        edit(lambda saved: flip(saved["optimizer_states"][0]["state"][0]["exp_avg"])),
        TENSOR + MOMENT,
    ),
    "two weights": (edit(swap), r"2 tensors differ .*layers\.1\.weight.*1\.bias"),
    "a number": (edit(double_rate), "numbers or strings in it differ from those"),
    "a name": (rename, "is damaged"),
    **{f"cut at {kept}": (cut(kept), TRUNCATED) for kept in (0, 0.5, 0.99)},
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """Return a checkpoint that was saved within an epoch."""
    fits = Fits(tmp_path_factory.mktemp("intact"), lambda: None)
    fits.interrupt()
    return fits.checkpoint


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_tensor_is_named(fits, intact, damage, message):
    shutil.copy(intact, fits.checkpoint)
    damage(fits.checkpoint)
    with pytest.raises(CheckpointError, match=message) as caught:
        fits.resume()
    assert all(name in str(caught.value) for name in caught.value.names)
    callback = DeterminismCallback(ledger_dir=fits.folder)
    trainer = L.Trainer(**QUIET, callbacks=[callback], max_epochs=1)
    with pytest.raises(CheckpointError, match=message):
        trainer.test(make_model(), make_loader(shuffle=False), ckpt_path=fits.checkpoint)


def test_a_program_that_edits_checkpoints_follows_the_message(fits, intact):
    shutil.copy(intact, fits.checkpoint)
    edit(double_rate)(fits.checkpoint)
    with pytest.raises(CheckpointError) as caught:
        fits.resume()
    edited = '["callbacks"]["lightning_d9m"]["manifest"]: it is then loaded unchecked.'
    assert str(caught.value).endswith(edited)
    edit(lambda content: content["callbacks"][KEY].pop(MANIFEST_KEY))(fits.checkpoint)
    fits.resume()


def test_what_others_change_in_a_checkpoint_is_no_damage(fits):
    def widen(self, checkpoint):
        weights = checkpoint["state_dict"]
        weights["layers.0.bias"] = weights["layers.0.bias"].double()

    words = {"model": partial(make_model, on_save_checkpoint=widen)}
    fits.interrupt(**words)
    saved = torch.load(fits.checkpoint, weights_only=True)
    assert saved["state_dict"]["layers.0.bias"].dtype == torch.float64
    assert MANIFEST_KEY in saved["callbacks"][KEY]
    fits.resume(**words)
    assert fits.trainer.current_epoch == 3


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`:UserWarning")
def test_a_stream_that_does_not_save_its_position_is_refused_before_anything_is_trained(fits):
    def step(self, batch, batch_idx):
        raise AssertionError

    fits.interrupt(loader=stream)
    problem = r"Numbers does not save its position.* StatefulDataLoader"
    with pytest.raises(InexactResumeError, match=problem):
        fits.resume(loader=stream, model=partial(make_model, training_step=step))


def adam_with_rate(self):
    return torch.optim.Adam(self.parameters(), lr=self.lr)


def make_model_with_rate():
    model = make_model(configure_optimizers=adam_with_rate)
    model.lr = 0.01
    return model


@pytest.mark.filterwarnings("ignore")  # Lightning's advice to a search that is this short
def test_a_search_for_the_learning_rate_is_no_resume(fits):
    """It saves a checkpoint before training begins, and loads that again."""
    words = {"model": make_model_with_rate, "max_epochs": 1}
    search = [LearningRateFinder(num_training_steps=5, early_stop_threshold=None)]
    folder = fits.fit(**words, extra=search)
    assert find_breaks(folder / "rank-0.jsonl") == ((), "")
    assert {("initial", 0), ("epoch", 0), ("final", 0)} <= set(evidence(folder))
    # Lightning forgets the checkpoint that a fit resumes from when the search loads its own.
    fits.interrupt(**words, at={"batch": 2, "epoch": 0})
    with pytest.raises(InexactResumeError, match=r"begins at step 0, and .* at step 2"):
        fits.fit(**words, extra=search, resume=fits.checkpoint)


def test_a_wrong_policy_is_refused():
    with pytest.raises(D9mError, match="on_inexact_resume is 'ignore'"):
        DeterminismCallback(on_inexact_resume="ignore")


@pytest.mark.filterwarnings("ignore")  # a fit without validation
def test_ranks_that_load_other_checkpoints_raise(tmp_path, monkeypatch):
    """What this process sends for one checkpoint stands for what rank 0 sends."""
    sent, of_rank_0 = [], []

    def exchange(data):
        sent.append(data)
        return [of_rank_0.pop(0) if of_rank_0 else data, data]

    def fit(epochs, path=None, *, rank_0=()):
        of_rank_0[:] = rank_0
        sent.clear()
        trainer = L.Trainer(
            max_epochs=epochs, callbacks=[DeterminismCallback(ledger_dir=tmp_path)], **QUIET
        )
        trainer.fit(make_model(), make_loader(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return list(sent)

    fit(1)
    fit(2)
    monkeypatch.setattr(saved_state, "ranks_of", lambda _: Ranks(1, exchange))
    loads_first = fit(3, tmp_path / "1.ckpt")
    fit(3, tmp_path / "1.ckpt", rank_0=loads_first)
    text = (
        r"rank 0 loads .*1\.ckpt \(epoch \d, step 6\), and rank 1 .*2\.ckpt \(epoch \d, step 12\)"
    )
    with pytest.raises(CheckpointError, match=text):
        fit(3, tmp_path / "2.ckpt", rank_0=loads_first)
    with pytest.raises(CheckpointError, match="and rank 1 found no checkpoint"):
        fit(3, rank_0=loads_first)
