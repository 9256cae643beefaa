"""Hugging Face's Trainer writes ledgers that repeat, detect, and continue after a resume."""

import gc
import weakref

import pytest
import torch
from interruptions import resume_points
from ledger_runs import list_batches
from scripts import load_script
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lightning_d9m import (
    CheckpointError,
    DriftError,
    SettingError,
    TransformersCallback,
    compare,
    deterministic,
    read_ledger,
)
from lightning_d9m.engine.ledger.kinds import VALIDATION
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.integrations.loop import recorder, transformers_callback
from lightning_d9m.tools.cli.main import main
from lightning_d9m.tools.segments.segment import RecordedRun

SMALL = {"vocab_size": 6, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 8, "max_position_embeddings": 6}
QUIET = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
QUIET |= {"save_strategy": "no", "eval_strategy": "epoch", "report_to": [], "disable_tqdm": True}
QUIET |= {"use_cpu": True, "dataloader_pin_memory": False}


@pytest.fixture(scope="module")
def example():
    """The module of the example, whose epochs have 10 steps."""
    return load_script("examples/transformers_trainer.py")


class At(TrainerCallback):
    """Calls a function after a step."""

    def __init__(self, step, func):
        self.step, self.func = step, func

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.func(control, kwargs["model"])


def stop(control, _):
    control.should_training_stop = True


def add_ulp(_, model):
    model.classifier.weight.data.view(torch.int32)[1, 3] += 1


def fail(*_):
    raise OSError("disk")


def test_a_training_repeats_and_one_ulp_is_a_drift_whose_step_probes_name(example, tmp_path):
    probes = {"probes": ("weight", "gradient", "output"), "probe_steps": "9:20"}
    arguments = {"num_train_epochs": 2, "save_strategy": "no"}
    first = example.train(tmp_path, settings=probes, **arguments)
    moments = [r.moment for r in read_ledger(first.ledger).records(0) if hasattr(r, "totals")]
    assert moments == ["initial", "epoch", "epoch", "final"]
    last = read_ledger(first.ledger).outcome(0).last
    assert (last.step, set(last.scalars)) == (20, {"epoch", "grad_norm", "learning_rate"})
    assert float.fromhex(last.loss) > 0
    assert set(last.groups) == {"weights", "buffers", "optimizers", "schedulers"}
    assert {"classifier.weight", "bert.pooler.dense.bias"} <= last.groups["weights"].keys()
    assert first.digest == last.totals["weights"]
    shown = f"ledger={str(first.ledger)!r}, digest={first.digest!r}"
    assert repr(first) == f"TransformersCallback({shown})"
    probes["reference"] = first.ledger
    same = example.train(tmp_path, settings=probes, **arguments)
    assert compare(first.ledger, same.ledger).verdict == "equal"
    with pytest.raises(DriftError) as caught:
        example.train(tmp_path, At(15, add_ulp), settings=probes, **arguments)
    assert (caught.value.epoch, caught.value.moment) == (1, "epoch")
    end = read_ledger(tmp_path / "fit-002").outcome(0).end
    assert (end.status, end.error.split(":")[0]) == ("failed", "DriftError")
    found = compare(first.ledger, tmp_path / "fit-002").divergences[0]
    assert (found.moment, found.step) == ("batch", 15)
    assert (found.kind, found.name) == ("weight", "classifier.weight")


def test_batches_of_training_and_validation_are_probed(tmp_path):
    """As the model gets them, so that a collate function that draws unseeded is named as data."""

    def train(noise):
        def collate(items):
            rows = torch.stack([item["input_ids"] for item in items])
            return {"input_ids": (rows + noise) % 6, "labels": torch.ones(len(rows)).long()}

        with deterministic(seed=1):
            callback = TransformersCallback(tmp_path, probes=("batch", "output", "weight"))
            samples = [{"input_ids": torch.arange(6), "labels": 1}] * 8
            Trainer(
                BertForSequenceClassification(BertConfig(**SMALL)),
                TrainingArguments(str(tmp_path / "ck"), **QUIET),
                train_dataset=samples,
                eval_dataset=samples,
                data_collator=collate,
                callbacks=[callback],
            ).train()
        return callback.ledger

    first, other = train(0), train(1)
    found = compare(first, other).divergences[0]
    assert (found.step, found.kind, found.name) == (0, "batch", "batch:1.input_ids")
    numbers = [(step, batch) for _, step, batch, _ in list_batches(read_ledger(first))]
    assert numbers == [(0, 0), (1, 1), (1, VALIDATION), (1, VALIDATION + 1)]


def test_a_resumed_training_ends_at_the_same_bits(example, tmp_path):
    """The checkpoint of step 10 is saved before the epoch's end."""
    straight = example.train(tmp_path / "straight", num_train_epochs=2)
    for step in (7, 10):
        folder = tmp_path / str(step)
        arguments = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": step}
        example.train(folder, At(step, stop), **arguments)
        resumed = example.train(folder, resume=True, **arguments)
        comparison = compare(straight.ledger, resumed.ledger)
        assert comparison.verdict == "equal"
        assert [entry.step for entry in comparison.ranks[0].actual.breaks] == [step]
    (weights,) = folder.glob("checkpoints/checkpoint-20/*.safetensors")
    assert main(["verify", str(weights), str(resumed.ledger)]) == 0


@pytest.fixture
def told(monkeypatch):
    """Let each rank be one of two that do the same; return whether it tells of an error."""
    failures = []

    def exchange(own):
        failures.append(own[:9] == bytes([1, 0, 0, 0, 0, 0, 0, 0]) + b"1")
        return [own, own]

    for module in (transformers_callback, recorder):
        monkeypatch.setattr(module, "find_ranks", lambda: (Ranks(0, exchange), 2))
    return failures


def test_a_checkpoint_of_a_training_without_the_callback_is_refused(example, tmp_path, told):
    """And an error of one rank reaches the others, which would wait for it."""
    example.train(tmp_path, num_train_epochs=1)
    (state,) = tmp_path.glob("checkpoints/checkpoint-10/d9m-0.pt")
    moved = state.rename(tmp_path / "d9m-0.pt")
    assert True not in told
    with pytest.raises(CheckpointError, match=r"If the checkpoint is not .*checkpoint-10, name it"):
        example.train(tmp_path, resume=True)
    assert told[-1]
    assert moved.exists()
    resumed = example.train(tmp_path, resume=True, settings={"resumed_from": tmp_path})
    assert read_ledger(resumed.ledger).outcome(0).last.step == 30
    last = tmp_path / "checkpoints/checkpoint-30"
    (last.with_name("checkpoint-40") / "d9m-0.pt").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="open file failed"):
        example.train(tmp_path, resume=str(last), num_train_epochs=4)
    assert told[-1]


def test_a_training_that_failed_is_closed_with_its_session_or_by_the_next(example, tmp_path):
    with pytest.raises(OSError, match="disk"):
        example.train(tmp_path, At(3, fail), num_train_epochs=1)
    with deterministic(seed=1):
        with pytest.raises(OSError, match="disk"):
            example.train(tmp_path, At(3, fail), num_train_epochs=1)
        example.train(tmp_path, num_train_epochs=1)
    ends = [read_ledger(tmp_path / f"fit-00{number}").outcome(0).end for number in range(3)]
    assert [end.status for end in ends] == ["failed", "failed", "finished"]
    assert ends[0].error == "RuntimeError: The training was given up."


def test_the_extra_is_required(monkeypatch):
    monkeypatch.setattr(transformers_callback, "TrainerCallback", None)
    with pytest.raises(SettingError, match=r"pip install \"lightning-d9m\[transformers\]\""):
        TransformersCallback()


@pytest.fixture
def train(example, begin_run, tmp_path):
    """Return a function that trains under variables, as in a process of its own."""

    def run(*, interrupt="", resume="", **arguments):
        begin_run(interrupt, resume)
        given = {"num_train_epochs": 2, "save_strategy": "no", **arguments}
        return example.train(tmp_path / "runs", **given)

    return run


def test_a_training_resumed_at_a_point_ends_at_the_same_bits(train, tmp_path):
    original = Trainer.train
    places = resume_points(train, tmp_path, "epoch-1", "step-12")
    assert {name: step for name, (_, step, _) in places.items()} == {
        "epoch-1": 10, "epoch-2": 20, "step-7": 7, "step-12": 13,
    }  # fmt: skip
    assert Trainer.train is original
    # The program saves none, and has none.
    assert not list((tmp_path / "runs").rglob("checkpoint-*"))


def test_the_programs_checkpoints_are_those_without_points(train, tmp_path):
    made = train(interrupt="points", save_strategy="steps", save_steps=8, save_total_limit=2)
    saved = [point.path for point in RecordedRun(made.ledger).saved]
    own = [path for path in saved if path.parent != tmp_path / "points"]
    assert [path.name for path in own] == ["checkpoint-8", "checkpoint-16", "checkpoint-20"]
    assert {*(tmp_path / "runs").rglob("checkpoint-*")} == {*own[1:]}


def test_what_cannot_be_resumed_is_refused(example, train, tmp_path, monkeypatch):
    """What the program resumes from gives way to the variable; a new start would prove nothing."""

    class Stubborn(Trainer):
        def train(self, resume_from_checkpoint=None):
            return self._inner_training_loop(self._train_batch_size, self.args)

    with pytest.raises(SettingError, match=r"Leave out save_only_model=True\.$"):
        train(interrupt="points", save_only_model=True)
    with pytest.raises(SettingError, match=r"LIGHTNING_D9M_RESUME is '.*', which does not exist"):
        train(resume=tmp_path / "nothing")
    train(interrupt="points", save_strategy="steps", save_steps=2)
    resumed = train(resume=tmp_path / "points/step-12.ckpt")
    assert resumed.recorder.global_step == 20
    assert read_ledger(resumed.ledger).outcome(0).last.step == 20
    monkeypatch.setattr(Trainer, "train", Trainer.train)  # put back, because none is called
    monkeypatch.setattr(example, "Trainer", Stubborn)
    with pytest.raises(SettingError, match=r"Call super\(\)\.train"):
        train(resume=tmp_path / "points/step-12.ckpt")


def test_an_open_session_keeps_no_model_of_a_training_that_ended(tmp_path):
    with deterministic(seed=1):
        model = BertForSequenceClassification(BertConfig(**SMALL))
        samples = [{"input_ids": torch.arange(6), "labels": torch.tensor(n % 2)} for n in range(4)]
        callback = TransformersCallback(tmp_path)
        arguments = TrainingArguments(tmp_path, **QUIET | {"eval_strategy": "no"})
        trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[callback])
        trainer.train()
        kept = weakref.ref(model)
        del model, trainer, callback
        gc.collect()
        assert kept() is None
