"""How a callback's run meets sessions, other callbacks that fail, metrics of time, and ranks."""

import copy
import time
from types import SimpleNamespace

import lightning.pytorch as lightning
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import BinaryAccuracy
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, DriftError, SettingError, enable
from lightning_d9m.engine.control import session
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.integrations.lightning import callback
from lightning_d9m.integrations.lightning.callback import AddedCallback
from lightning_d9m.integrations.lightning.trainer_session import resolve_settings
from lightning_d9m.integrations.trainer.trainer_attributes import ranks_of


def train(*callbacks, model=None, **options):
    trainer = lightning.Trainer(callbacks=[*callbacks], **QUIET | {"max_epochs": 1} | options)
    trainer.fit(model or make_model(), make_loader(), make_loader(shuffle=False))


def test_settings_left_at_their_default_are_those_of_the_active_session(fit):
    chosen = {"fill_uninitialized_memory": False, "patch_ops": True, "unpatched_ops": ("histc",)}
    with enable(seed=12, threads=1, **chosen):
        settings = fit(seed=None).header.settings
        assert settings["seed"] == 12
        other = fit(seed=None, threads=2).header.settings
    assert (settings["patch_ops"], settings["unpatched_ops"]) == (True, "histc")
    assert settings["fill_uninitialized_memory"] is False
    assert (settings["threads"], other["threads"]) == (1, 2)


def test_patches_of_the_session_cannot_be_refused_by_a_run():
    assert not resolve_settings({"patch_ops": False}).patch_ops
    with enable(patch_ops=True):
        assert resolve_settings({}).patch_ops
        with pytest.raises(SettingError, match=r"enable\(\) has patched the operations already"):
            resolve_settings({"patch_ops": False})


class CopiesTrainer(lightning.Callback):
    def on_train_start(self, trainer, _):
        self.copied = copy.deepcopy(trainer)


def test_a_program_may_copy_the_trainer_within_a_run(tmp_path):
    model = make_model()
    model.accuracy = BinaryAccuracy()  # its signature cannot be copied part by part
    copier = CopiesTrainer()
    train(DeterminismCallback(seed=3, ledger_dir=tmp_path), copier, model=model)
    assert copier.copied.lightning_module is not model
    (run,) = tmp_path.iterdir()
    assert read_ledger(run).outcome(0).end.status == "finished"


class FailsTwice(lightning.Callback):
    """A callback that fails, and again when it is told of it: those after it are not told."""

    def on_train_batch_end(self, *_):
        raise ZeroDivisionError("first")

    def on_exception(self, *_):
        raise ZeroDivisionError("second")


def test_a_run_that_nobody_ended_is_given_back_when_the_next_begins(tmp_path):
    determinism = DeterminismCallback(seed=3, ledger_dir=tmp_path)
    with pytest.raises(ZeroDivisionError, match="second") as caught:
        train(FailsTwice(), determinism)
    assert str(caught.value.__context__) == "first"
    assert session.active_session() is not None
    train(determinism)
    assert session.active_session() is None
    ends = [read_ledger(folder).outcome(0).end for folder in sorted(tmp_path.iterdir())]
    assert [end.status for end in ends] == ["failed", "finished"]


def timed(self):
    self.log("time/epoch", time.perf_counter())


def test_a_metric_that_measures_time_can_be_ignored(fit):
    reference = fit(model=make_model(on_train_epoch_end=timed))
    with pytest.raises(DriftError, match=r"time/epoch[\s\S]*ignored_metrics"):
        fit(model=make_model(on_train_epoch_end=timed), reference=reference.path)
    reference = fit(model=make_model(on_train_epoch_end=timed), ignored_metrics="time/*")
    fit(
        model=make_model(on_train_epoch_end=timed),
        ignored_metrics=["time/*"],
        reference=reference.path,
    )


class Stream(IterableDataset):
    """Samples that are drawn, without a length: Lightning fetches the first before the epoch."""

    def __iter__(self):
        for _ in range(48):
            yield torch.rand(64), torch.randint(10, ())


def test_what_an_iterable_dataset_draws_first_depends_on_the_rank(fit, monkeypatch):
    def first_batch(rank):
        seen = []

        def on_train_batch_start(self, batch, batch_idx):
            seen.append(batch[0])

        words = {"rank": rank}  # of data parallelism
        kind = lightning.strategies.SingleDeviceStrategy
        monkeypatch.setattr(kind, "distributed_sampler_kwargs", words, raising=False)
        fit(
            model=make_model(on_train_batch_start=on_train_batch_start),
            loader=DataLoader(Stream(), batch_size=16),
        )
        assert len({tensor.sum().item() for tensor in seen}) == len(seen)  # no draw comes twice
        return seen[0]

    assert torch.equal(first_batch(0), first_batch(0))
    assert not torch.equal(first_batch(0), first_batch(1))


def test_a_hash_seed_that_is_not_fixed_is_said_once(fit, monkeypatch, caplog):
    callback.report_hash_seed.cache_clear()
    monkeypatch.setattr(callback, "describe_hash_seed_problem", lambda: "not fixed!")
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit()
        fit()
    assert [record.message for record in caplog.records].count("not fixed!") == 1
    callback.report_hash_seed.cache_clear()


def test_control_off_seeds_and_records_but_switches_nothing(fit, monkeypatch):
    """The variable of ``d9m locate --no-determinism``."""
    seen = []

    def look(self):
        seen.append(torch.are_deterministic_algorithms_enabled())

    monkeypatch.setenv("LIGHTNING_D9M_CONTROL", "off")
    with pytest.warns(UserWarning, match="seeded and recorded, but not deterministic"):
        off = fit(model=make_model(on_train_epoch_end=look))
    monkeypatch.delenv("LIGHTNING_D9M_CONTROL")
    on = fit(model=make_model(on_train_epoch_end=look))
    assert seen == [False, False, True, True]
    # The same draws: where nothing is nondeterministic both end at the same bits.
    assert off.outcome(0).final.totals == on.outcome(0).final.totals
    assert [ledger.header.settings.get("control") for ledger in (off, on)] == ["off", None]


def test_cudnns_benchmark_mode_is_switched_off_logged_recorded_and_restored(
    tmp_path, caplog, monkeypatch, new_process
):
    """By the callback that is added; the program's own names its Trainer."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    plain, folder, during = tmp_path / "plain", tmp_path / "on", []
    train(AddedCallback(), default_root_dir=plain)
    model = make_model(on_train_start=lambda _: during.append(torch.backends.cudnn.benchmark))
    new_process()
    added = AddedCallback(reference=plain / "d9m")
    with caplog.at_level("INFO"):
        train(added, model=model, default_root_dir=folder, benchmark=True)
    assert (during, torch.backends.cudnn.benchmark) == ([False], True)
    (line,) = [r.message for r in caplog.records if "benchmark=True" in r.message]
    assert "as benchmark=True of this or of an earlier Trainer leaves it" in line
    ledgers = [read_ledger(path / "d9m") for path in (plain, folder)]
    overridden = [ledger.header.settings.get("overridden") for ledger in ledgers]
    assert overridden == [None, "cudnn.benchmark"]
    with pytest.raises(SettingError, match=r"^[^\n]*Remove benchmark=True from that Trainer"):
        train(DeterminismCallback(), default_root_dir=tmp_path, benchmark=True)


def test_a_gather_without_the_other_ranks_says_so_and_hides_no_error_of_the_program():
    """A Trainer of two ranks whose process group was never made."""
    strategy = SimpleNamespace(root_device="cpu", all_gather=lambda tensor: tensor)
    ranks = ranks_of(SimpleNamespace(world_size=2, global_rank=0, strategy=strategy))
    with pytest.raises(SettingError, match="The Trainer has 2 ranks, but all_gather of"):
        ranks.gather_json(1)
    with pytest.raises(SettingError, match="The Trainer has 2 ranks"):
        ranks.raise_on_all(lambda: None)
    with pytest.raises(KeyError, match="of the program"):
        ranks.raise_on_all(lambda: {}["of the program"])


def test_a_callback_alone_counts_fits_from_the_last_seed(fit):
    """The first seed comes before the callback, and a fit without one has numbers of its own."""
    weights = []
    for seed in (7, None, 7, 8, 7):
        if seed is not None:
            lightning.seed_everything(seed, verbose=False)
        ledger = fit(seed=1, again=True, trainer_max_epochs=1)
        weights.append(ledger.outcome(0).final.totals["weights"])
    assert [weights.index(digest) for digest in weights] == [0, 1, 0, 3, 0]
