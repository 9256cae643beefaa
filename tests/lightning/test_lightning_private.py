"""The private attributes of Lightning that this package uses, checked on the installed version."""

import ast
import importlib
import inspect
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.compile import from_compiled
from torch.utils.data import BatchSampler
from trainings import QUIET

from lightning_d9m.lightning import lightning_private


@pytest.fixture
def trainer(tmp_path):
    """A Trainer that trains one epoch of two batches."""
    return pl.Trainer(default_root_dir=tmp_path, max_epochs=1, limit_train_batches=2, **QUIET)


def test_the_loaders_of_a_loop_are_listed_flat(trainer):
    assert lightning_private.list_loaders(trainer.fit_loop) == []
    assert not lightning_private.has_loaders(trainer.fit_loop)
    first, second = (BoringModel().train_dataloader() for _ in range(2))

    class NestedModel(BoringModel):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["b"][0], batch_idx)

        def train_dataloader(self):
            return {"a": first, "b": [second]}

    trainer.fit(NestedModel())
    assert lightning_private.list_loaders(trainer.fit_loop) == [first, second]
    assert lightning_private.has_loaders(trainer.fit_loop)
    assert lightning_private.has_loaders(trainer.fit_loop.epoch_loop.val_loop)


def test_the_data_sources_of_a_fit_give_its_loaders(trainer):
    model = BoringModel()
    trainer.fit(model)
    sources = lightning_private.fit_data_sources(trainer)
    for stage, hook in (("train", "train_dataloader"), ("validate", "val_dataloader")):
        setattr(model, hook, lambda stage=stage: [stage])
        assert sources[stage].dataloader() == [stage]


def test_the_fit_that_is_set_up_resumes_from_the_checkpoint(trainer, tmp_path):
    path = tmp_path / "saved.ckpt"
    model = BoringModel()
    trainer.fit(model)
    trainer.save_checkpoint(path)

    class ResumeInSetup(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            lightning_private.resume_next_fit(trainer, path)

    resumed = pl.Trainer(
        default_root_dir=tmp_path, max_epochs=1, callbacks=[ResumeInSetup()], **QUIET
    )
    other = BoringModel()
    resumed.fit(other)
    assert (resumed.global_step, resumed.current_epoch) == (2, 1)
    for expected, actual in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, actual)
    assert "resume_start" not in vars(resumed._checkpoint_connector)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_launches_of_a_trainer_are_wrapped_once(package, monkeypatch):
    launchers = importlib.import_module(f"{package}.strategies.launchers")
    launcher = launchers._MultiProcessingLauncher
    monkeypatch.setattr(
        launcher, "launch", lambda self, function, *args, trainer=None: function(*args)
    )
    calls = []

    def around(trainer, run, start):
        calls.append(trainer)
        return start(lambda number: run(number) * 10)

    for _ in range(2):
        lightning_private.wrap_launches(package, around)
    launched = object.__new__(launcher)
    assert launched.launch(abs, -3) == 3
    wrapper = inspect.signature(launcher.launch, follow_wrapped=False)
    assert list(wrapper.parameters)[:2] == ["self", "function"]
    assert launched.launch(abs, -3, trainer="trainer") == 30
    assert calls == ["trainer"]


def fit(model, tmp_path, ckpt_path=None, **options):
    """Train a model, one epoch of two batches by default."""
    options = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, **options}
    trainer = pl.Trainer(
        default_root_dir=tmp_path, num_sanity_val_steps=0, log_every_n_steps=1, **QUIET | options
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(("mode", "cycles"), [("max_size_cycle", True), ("min_size", False)])
def test_the_mode_of_the_loaders_is_found(trainer, mode, cycles):
    class CombinedModel(BoringModel):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx)

        def train_dataloader(self):
            return CombinedLoader({"a": super().train_dataloader()}, mode)

    trainer.fit(CombinedModel())
    assert lightning_private.cycles_shorter_loaders(trainer) is cycles


class StatefulLoader:
    """A loader with a state, which counts its iterators."""

    def __init__(self):
        self.batches = BoringModel().train_dataloader()
        self.loaded = []
        self.iterators = 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.iterators += 1
        return iter(self.batches)

    def state_dict(self):
        return {"saved": True}

    def load_state_dict(self, state):
        self.loaded.append(state)


class StatefulModel(BoringModel):
    def __init__(self):
        super().__init__()
        self.loader = StatefulLoader()

    def train_dataloader(self):
        return self.loader


def test_the_pending_states_of_loaders_are_read_and_replaced(tmp_path):
    path = tmp_path / "saved.ckpt"

    def save(trainer, module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.save_checkpoint(path)

    fit(StatefulModel(), tmp_path, callbacks=[LambdaCallback(on_train_batch_end=save)])
    seen = []

    def wrap(trainer, module):
        load = getattr(trainer.fit_loop, lightning_private.LOAD_LOADER_STATES)
        assert not lightning_private.has_loaded_progress(trainer)

        def load_replaced():
            seen.append(lightning_private.list_pending_loader_states(trainer))
            assert lightning_private.has_loaded_progress(trainer)
            lightning_private.set_pending_loader_states(trainer, [{"replaced": True}])
            load()
            seen.append(lightning_private.list_pending_loader_states(trainer))
            lightning_private.load_loader_states(trainer, [{"loaded": True}])

        setattr(trainer.fit_loop, lightning_private.LOAD_LOADER_STATES, load_replaced)

    class WrapInSetup(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            wrap(trainer, pl_module)

    model = StatefulModel()
    trainer = fit(model, tmp_path, path, callbacks=[WrapInSetup()])
    assert seen == [[{"saved": True}], []]
    assert model.loader.loaded == [{"replaced": True}, {"loaded": True}]
    assert not lightning_private.has_loaded_progress(trainer)


def test_the_iterator_of_the_loaders_is_created_again(tmp_path):
    model, created = StatefulModel(), []

    def create(trainer, module):
        before = model.loader.iterators
        lightning_private.create_loader_iterator(trainer)
        created.append(model.loader.iterators - before)

    trainer = fit(model, tmp_path, callbacks=[LambdaCallback(on_train_epoch_start=create)])
    assert created == [1]
    assert trainer.global_step == 2


@pytest.mark.parametrize("reloaded", ["train", "validate"])
@pytest.mark.parametrize("moved", [False, True])
def test_the_epoch_of_the_last_reload_is_read_and_set(tmp_path, reloaded, moved):
    loads = {"train": 0, "validate": 0}

    class CountingModel(BoringModel):
        def train_dataloader(self):
            loads["train"] += 1
            return super().train_dataloader()

        def val_dataloader(self):
            loads["validate"] += 1
            return super().val_dataloader()

    epochs = []

    class MoveAfterEpoch(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            epochs.append(lightning_private.get_reload_epoch(trainer, reloaded))

        def on_train_epoch_end(self, trainer, pl_module):
            epochs.append(lightning_private.get_reload_epoch(trainer, reloaded))
            if moved and trainer.current_epoch == 0:
                lightning_private.set_reload_epoch(trainer, reloaded, -1)

    fit(
        CountingModel(),
        tmp_path,
        max_epochs=2,
        reload_dataloaders_every_n_epochs=2,
        callbacks=[MoveAfterEpoch()],
    )
    assert loads == {"train": 1, "validate": 1} | {reloaded: 2 if moved else 1}
    assert epochs == [None, 0, int(moved)]


def test_one_loop_is_marked_as_not_restarting(trainer):
    loop = trainer.fit_loop.epoch_loop
    loop.restarting = True
    lightning_private.clear_restart(loop)
    assert not loop.restarting
    assert loop.val_loop.restarting


def test_due_validations_and_accumulated_gradients_are_found(tmp_path):
    found = []

    def find(trainer, module, outputs, batch, batch_idx):
        found.append(
            (
                lightning_private.is_validation_due(trainer),
                lightning_private.accumulates_gradients(trainer),
            )
        )

    fit(
        BoringModel(),
        tmp_path,
        limit_train_batches=6,
        val_check_interval=3,
        accumulate_grad_batches=2,
        callbacks=[LambdaCallback(on_train_batch_end=find)],
    )
    assert [due for due, _ in found] == [False, False, True] * 2
    assert [accumulates for _, accumulates in found] == [True, False] * 3


@pytest.mark.parametrize("counted", [0, 3])
def test_the_step_of_loggers_counts_the_batches(tmp_path, counted):
    class LoggingModel(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("a", float(batch_idx))
            return super().training_step(batch, batch_idx)

    class StepLogger(Logger):
        name, version, steps = "steps", 0, ()

        def log_metrics(self, metrics, step=None):
            self.steps += (step,)

        def log_hyperparams(self, *args, **kwargs):
            pass

    def count(trainer, module):
        for _ in range(counted):
            lightning_private.count_step_batch(trainer)

    logger = StepLogger()
    fit(LoggingModel(), tmp_path, logger=logger, callbacks=[LambdaCallback(on_train_start=count)])
    assert logger.steps == (counted, counted + 1)


def test_steps_without_backward_passes_are_recognized(tmp_path):
    model = BoringModel()
    model.norm = torch.nn.BatchNorm1d(2)
    skipped = []

    def find(trainer, *_):
        skipped.append(lightning_private.skips_backward(trainer))

    averaging = StochasticWeightAveraging(0.1, 1)
    callbacks = [averaging, LambdaCallback(on_train_batch_end=find)]
    fit(model, tmp_path, max_epochs=2, limit_train_batches=2, callbacks=callbacks)
    assert skipped == [False] * 4 + [True] * 2


@pytest.mark.filterwarnings("ignore")  # Lightning's advice to a search that is this short
def test_the_search_of_a_tuner_is_no_fit(trainer):
    found = []

    def setup(trainer, *_, **__):
        found.append(lightning_private.is_search(trainer))

    trainer.callbacks.append(LambdaCallback(setup=setup))
    model = BoringModel()
    search = {"num_training": 3, "early_stop_threshold": None, "update_attr": False}
    Tuner(trainer).lr_find(model, **search)
    trainer.fit(model)
    assert found == [True, False]


def test_the_metrics_for_callbacks_are_updated(trainer):
    trainer.fit(BoringModel())
    lightning_private.update_callback_metrics(trainer, {"a": torch.tensor(2.0)})
    assert trainer.callback_metrics["a"] == 2


@pytest.mark.parametrize(("keep", "mean"), [(True, 13 / 3), (False, 3 / 2)])
def test_a_result_that_is_created_counts_in_the_mean_of_the_epoch(tmp_path, keep, mean):
    states = []

    class LoggingModel(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("a", batch_idx + 1.0, on_step=True, on_epoch=True, batch_size=1)
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx > 0:
                return
            result = lightning_private.create_result(
                self.trainer,
                {"fx": "training_step", "name": "a", "on_step": True, "on_epoch": True},
                is_tensor=True,
                synced=False,
                rank_zero_only=False,
            )
            result.value, result.cumulated_batch_size = torch.tensor(10.0), torch.tensor(1)
            result._update_count, result._forward_cache = 5, torch.tensor(10.0)
            states.append((result._update_count, result._forward_cache))
            results = lightning_private.list_result_collections(self.trainer)[0]
            results["training_step.a"] = result
            if keep:
                lightning_private.keep_results_at_next_batch(self.trainer)

        def on_train_epoch_end(self):
            results = lightning_private.list_result_collections(self.trainer)[0]
            result = results["training_step.a"]
            states.append((result._update_count, result._forward_cache))

    trainer = fit(LoggingModel(), tmp_path)
    assert trainer.callback_metrics["a_epoch"].item() == pytest.approx(mean)
    assert states == [(5, 10), (7 if keep else 2, 2)]


def test_a_compiled_module_is_found():
    assert not lightning_private.is_compiled(BoringModel())
    assert lightning_private.is_compiled(
        from_compiled(torch.compile(BoringModel(), backend="eager"))
    )


# Underscored names that other files use, with the package that has them.
def test_the_wrapper_of_a_predicted_loader_keeps_its_indices():
    wrapper = pl.overrides.distributed._IndexBatchSamplerWrapper(BatchSampler(range(3), 2, False))
    doubled = lightning_private.replace_batch_sampler(
        wrapper, lambda inner: [[2 * index for index in batch] for batch in inner]
    )
    assert isinstance(doubled, type(wrapper))
    assert list(doubled) == doubled.seen_batch_indices == [[0, 2], [4]]
    assert list(wrapper) == [[0, 1], [2]]
    assert lightning_private.replace_batch_sampler([1], tuple) == (1,)


def test_the_results_of_a_step_can_be_set(trainer):
    seen = {}

    class LoggingModel(BoringModel):
        def training_step(self, batch, batch_idx):
            lightning_private.set_logged_batch(self.trainer, torch.zeros(7))
            self.log("a", torch.tensor(1.0), on_step=True, on_epoch=True)
            results = lightning_private.get_current_results(self.trainer)
            assert results in lightning_private.list_result_collections(self.trainer)
            result = results["training_step.a"]
            seen["size"] = int(result.cumulated_batch_size)
            result._forward_cache = torch.tensor(2.0)
            result._computed = torch.tensor(3.0)
            return super().training_step(batch, batch_idx)

    trainer.fit(LoggingModel())
    assert seen["size"] == 14
    assert trainer.callback_metrics["a_step"] == 2
    assert trainer.callback_metrics["a_epoch"] == 3
    connector = lightning_private.get_logger_connector(trainer)
    assert callable(connector.on_batch_end)
    assert callable(connector.epoch_end_reached)
    results = lightning_private.list_result_collections(trainer)[0]
    assert results["training_step.a"]._computed is None


def test_the_module_calls_its_hook_before_a_transfer():
    model = BoringModel()
    model.on_before_batch_transfer = lambda batch, dataloader_idx: (batch, dataloader_idx)
    model.trainer = pl.Trainer(**QUIET)
    model.trainer.strategy.connect(model)
    model.trainer._data_connector.attach_datamodule(model)
    assert getattr(model, lightning_private.BEFORE_BATCH_TRANSFER)(3, dataloader_idx=1) == (3, 1)


NOT_OF_LIGHTNING = {
    "the callback of this package": {"_auto_added", "_recorder"},
    "Python": {"_getframe", "_initializing"},
    "torch's bindings": {
        "_C",
        "_dispatch_get_all_op_names",
    },
    "torch's modules and tensors": {
        "_compiled_call_impl",
        "_orig_mod",
        "_version",
    },
    "torchmetrics": {
        *("_computed", "_defaults", "_forward_cache"),
        *("_reductions", "_update_count"),
    },
}


def find_private_names(source):
    """Yield (line, name) of underscored attributes of other objects, and of imported names."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if own else [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr"):
                names = [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("_") and not name.startswith("__"):
                yield node.lineno, name


def test_no_other_file_uses_private_names_of_lightning():
    package = Path(lightning_private.__file__).parents[1]
    allowed = set().union(*NOT_OF_LIGHTNING.values())
    seen = set()
    for path in [*(package / "lightning").rglob("*.py"), *(package / "horovod").rglob("*.py")]:
        source = path.read_text()
        found = dict(map(reversed, find_private_names(source)))
        if path.name == "lightning_private.py":
            assert {"_combined_loader", "_compiler_ctx", "_logger_connector"} <= found.keys()
            continue
        assert "# ruff: noqa: SLF001" not in source, path
        unknown = {name: line for name, line in found.items() if name not in allowed}
        assert not unknown, f"{path}: move these to lightning_private.py, or list them: {unknown}"
        seen |= found.keys()
    assert seen == allowed, "the list has names that no file uses"
