"""The recorder of any loop: its ledgers repeat, detect, and continue after a resume."""

import io
import os
from pathlib import Path

import pytest
import torch
from interruptions import end_early, resume_points
from ledger_runs import list_batches
from recorded_loop import leave, make_parts, train
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from trainings import NoisyDigits, make_loader

from lightning_d9m import (
    Recorder,
    SettingError,
    compare,
    deterministic,
    read_ledger,
    record_final,
)
from lightning_d9m.engine.hashing.digest import digest_value
from lightning_d9m.engine.ledger.kinds import VALIDATION
from lightning_d9m.engine.probes.evidence import read_evidence
from lightning_d9m.engine.recording import interruption, run
from lightning_d9m.errors import (
    CheckpointError,
    InexactResumeError,
    LedgerError,
    ReferenceRefusedError,
)
from lightning_d9m.ops.portability import is_portable
from lightning_d9m.tools.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_torch.py"


class Stop(Exception):  # noqa: N818 - no error
    """Ends a run before its time."""


class Wrapped:
    """A loader that is not torch's, as Fabric's is not."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


def test_two_runs_leave_equal_ledgers(tmp_path):
    first, second = train(tmp_path), train(tmp_path)
    assert compare(first.ledger, second.ledger).verdict == "equal"
    final = read_ledger(first.ledger).outcome(0).final
    assert first.digest == second.digest == final.totals["weights"]
    records = read_ledger(first.ledger).records(0)
    kinds = [record.moment for record in records if hasattr(record, "moment")]
    assert kinds == ["initial", "epoch", "epoch", "final"]
    assert (final.step, set(final.scalars), final.loss is None) == (12, {"rate", "drawn"}, False)
    assert set(final.groups) == {"weights", "buffers", "optimizers", "schedulers"}
    assert repr(first) == (
        f"Recorder(ledger={str(first.ledger)!r}, epochs=2, steps=12, digest={first.digest!r})"
    )
    for words in ({"seed": 4}, {"size": 80}):
        with pytest.raises(ReferenceRefusedError):
            train(tmp_path, reference=first.ledger, **words)


def wrap(model, optimizer, loader):
    return leave(model, optimizer, Wrapped(loader))


@pytest.mark.parametrize("prepare", [leave, wrap], ids=["DataLoader", "other"])
def test_a_resumed_run_ends_at_the_same_bits(tmp_path, prepare):
    straight = train(tmp_path / "straight", prepare=prepare)
    for stop in (1, 5, 6, 9):
        state = train(tmp_path / str(stop), prepare=prepare, stop=stop)
        resumed = train(tmp_path / str(stop), prepare=prepare, state=state)
        assert resumed.digest == straight.digest
        comparison = compare(straight.ledger, resumed.ledger)
        assert comparison.verdict == "equal"
        assert [entry.step for entry in comparison.ranks[0].actual.breaks] == [stop]


class CountingSampler(Sampler):
    calls = 0

    def __len__(self):
        return 8

    def __iter__(self):
        self.calls += 1
        return iter([(number * self.calls) % 8 for number in range(8)])


class CountingDataset(Dataset):
    reads = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.reads += 1
        return torch.tensor([float(index), self.reads])


def list_rows(folder, sampler=None, validated=None, *, state=None, stop=None):
    """Return the rows of each epoch, or those of its validation; the state after one to stop."""
    seen = {}
    with deterministic(seed=3):
        model = nn.Linear(2, 1)
        loaders = [DataLoader(CountingDataset(), 4, sampler=sampler and sampler())]
        loaders += [DataLoader(Drawing(), 4, **validated)] if validated is not None else []
        before = dict(vars(loaders[-1]))
        with Recorder(folder, model) as run:
            if state is not None:
                run.load_state_dict(state)
            for epoch in range(run.next_epoch, 3):
                seen[epoch] = []
                for batch in run.batches(loaders[0]):
                    seen[epoch].append(batch.tolist())
                    run.step()
                if validated is not None:
                    seen[epoch] = [batch.tolist() for batch in run.validation(loaders[1])]
                run.epoch()
                if epoch == stop:
                    return run.state_dict()
    assert vars(loaders[-1]) == before
    return seen


@pytest.mark.parametrize("sampler", [CountingSampler, None])
def test_what_samplers_and_datasets_count_is_restored_between_epochs(tmp_path, sampler):
    straight = list_rows(tmp_path, sampler)
    for stop in (0, 1):
        state = list_rows(tmp_path, sampler, stop=stop)
        resumed = list_rows(tmp_path, sampler, state=state)
        assert resumed == {epoch: straight[epoch] for epoch in range(stop + 1, 3)}


def test_a_device_that_is_not_visible_makes_a_resume_inexact(tmp_path, monkeypatch):
    state = torch.load(io.BytesIO(train(tmp_path, stop=5)), weights_only=True)
    drawn = torch.ones(16, dtype=torch.uint8)
    state["run"]["rng"] |= {"devices": {"cuda": [drawn]}, "own": {"cuda": 0}}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with pytest.raises(InexactResumeError, match="the device cuda:0, and its generator cannot be"):
        train(tmp_path, state=buffer.getvalue())
    monkeypatch.setenv("LIGHTNING_D9M_ON_INEXACT_RESUME", "warn")
    with pytest.warns(UserWarning, match="the device cuda:0, and its generator cannot be"):
        resumed = train(tmp_path, state=buffer.getvalue())
    (found,) = compare(resumed.ledger, resumed.ledger).ranks[0].actual.breaks
    assert "the device cuda:0" in found.inexact[0]


@pytest.fixture
def interrupted(begin_run, tmp_path):
    """Return a function that trains under variables, as in a process of its own."""

    def run(*, interrupt="", resume="", **words):
        begin_run(interrupt, resume)
        return train(tmp_path / "runs", epochs=3, **words)

    return run


def test_a_loop_resumed_at_a_point_ends_at_the_same_bits(interrupted, tmp_path):
    """Three epochs of six steps. Steps are counted where batches are accumulated."""
    names = ("epoch-1", "step-7", "step-12")
    places = resume_points(interrupted, tmp_path, *names)
    assert places == {
        "epoch-1": (1, 6, 0), "epoch-2": (2, 12, 0), "step-7": (1, 7, 1), "step-12": (1, 12, 6),
    }  # fmt: skip
    places = resume_points(interrupted, tmp_path, "step-4", accumulated=2)
    assert places["step-4"] == (1, 4, 2)
    # Of two loaders in an epoch, the second has no points.
    assert resume_points(interrupted, tmp_path, loaders=2)["step-7"] == (1, 13, 1)


def test_a_segment_ends_after_its_epoch_or_step(interrupted, tmp_path):
    for request, last in (("epoch:1", 12), ("stop:8", 8)):
        outcome = end_early(interrupted, tmp_path, request).outcome(0)
        assert (outcome.end.status, outcome.last.step) == ("stopped", 12 if last == 12 else 6)


def test_a_checkpoint_that_lost_the_momentum_differs(interrupted, tmp_path):
    """The comparison of resumed runs can fail; a loop that begins at epoch 0 again is told."""
    straight = interrupted(interrupt="points")
    path = tmp_path / "points/step-7.ckpt"
    with pytest.raises(SettingError, match=r"in a run that resumes, from run\.next_epoch"):
        interrupted(resume=path, first=0)
    saved = torch.load(path, weights_only=True)
    saved["optimizer 0"]["state"][0]["exp_avg"].zero_()
    torch.save(saved, path)
    assert compare(straight.ledger, interrupted(resume=path).ledger).verdict == "different"


def test_the_command_interrupts_a_loop(tmp_path, monkeypatch, capsys, forking_python):
    """Real processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [forking_python, str(EXAMPLE), "--epochs", "2"]
    assert main(["repeat", "--interrupt", "--", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("equal: 2 of 2 segments that resume")
    assert "at the end of an epoch" in out


def add_ulp(model, _, step):
    if step == 8:
        model[0].weight.data.view(torch.int32)[2, 3] += 1


def change_rate(_, optimizer, step):
    if step == 8:
        optimizer.param_groups[0]["lr"] = 9.0


def test_probes_name_the_step(tmp_path):
    words = {"probes": ("weight", "optimizer", "batch", "output", "gradient", "loss", "scalar")}
    first, same = train(tmp_path, **words), train(tmp_path, **words)
    assert compare(first.ledger, same.ledger).verdict == "equal"
    for kind, disturb in (("weight", add_ulp), ("optimizer", change_rate)):
        other = train(tmp_path, disturb=disturb, **words)
        found = compare(first.ledger, other.ledger).divergences[0]
        assert (found.moment, found.step, found.batch, found.kind) == ("batch", 8, 2, kind)


@pytest.mark.parametrize(("moment", "step"), [("initial", 0), ("epoch", 6), ("final", 12)])
def test_the_state_at_a_record_is_saved_with_the_values(tmp_path, monkeypatch, moment, step):
    """`d9m locate` measures what differs across ranks outside of steps."""
    monkeypatch.setenv("LIGHTNING_D9M_EVIDENCE", "0.bias")
    run = train(tmp_path, probes="weight", probe_steps=f"{step}:{step + 1}")
    values = read_evidence(run.ledger, 0)["values"]
    states = [place for place in values if place[0].endswith(f".{moment}")]
    assert [place[1:] for place in states] == [("weight", "0.bias", 0)]


def test_an_error_is_in_the_ledger_and_the_loader_is_restored(tmp_path):
    loader = make_loader()
    before = dict(vars(loader))
    with deterministic(seed=1), pytest.raises(Stop), Recorder(tmp_path, make_parts()[0]) as run:
        for _ in run.batches(loader):
            assert dict(vars(loader)) != before
            raise Stop
    assert vars(loader) == before
    assert isinstance(loader.dataset, NoisyDigits)
    end = read_ledger(tmp_path / "fit-000").outcome(0).end
    assert (end.status, end.error) == ("failed", "Stop: ")


def test_batches_made_once_give_every_epoch(tmp_path):
    """As a loader does, with its length; what can be iterated once only is an error."""

    def iterate(folder, make_batches):
        with deterministic(seed=1), Recorder(tmp_path / folder, make_parts()[0]) as run:
            seen = []
            batches = make_batches(run)
            assert folder == "lacks a length" or len(batches) == len(loader)
            for epoch in range(2):
                for batch in batches if folder != "again" else make_batches(run):
                    seen.append(digest_value(batch))
                    run.step(loss=0.5)
                run.epoch(epoch)
        return seen

    loader = make_loader()
    seen = iterate("once", lambda run: run.batches(loader))
    assert seen == iterate("again", lambda run: run.batches(loader))
    assert len(seen) == 2 * len(loader) == 2 * len(set(seen[: len(loader)]))
    with pytest.raises(SettingError, match=r"Epoch 1 ends without a call of step\(\)"):
        iterate("lacks a length", lambda run: run.batches(iter([1, 2])))


class Drawing(CountingDataset):
    def __getitem__(self, index):
        return torch.rand(2) + index


@pytest.mark.parametrize("kind", ["workers", "generator", "neither"])
def test_a_validation_draws_the_same_numbers_after_a_resume(tmp_path, kind):
    """Workers that persist, and a generator of the program, continue their own streams."""
    words = {
        "workers": {"num_workers": 1, "persistent_workers": True},
        "generator": {"shuffle": True, "generator": torch.Generator()},
        "neither": {},
    }[kind]
    straight = list_rows(tmp_path, validated=words)
    state = list_rows(tmp_path, validated=words, stop=0)
    resumed = list_rows(tmp_path, validated=words, state=state)
    assert resumed == {epoch: straight[epoch] for epoch in (1, 2)}
    assert len({str(seen) for seen in straight.values()}) == 3


def test_optimizers_are_given_in_any_way_and_nothing_else_is_one(tmp_path):
    model, optimizer, _ = make_parts()
    for given in (optimizer, [optimizer], iter([optimizer])):
        assert Recorder(tmp_path, model, given)._optimizers == (optimizer,)
    assert Recorder(tmp_path, model, None, None)._optimizers == ()
    for wrong in ({"one": optimizer}, model.parameters(), 0.1):
        with pytest.raises(SettingError, match=r"allowed: a torch\.optim\.Optimizer, or a list"):
            Recorder(tmp_path, model, wrong)


def test_a_recorder_that_cannot_load_its_parts_leaves_nothing_on(tmp_path, monkeypatch):
    torch.save({"other": 1}, tmp_path / "saved.ckpt")
    monkeypatch.setenv("LIGHTNING_D9M_RESUME", str(tmp_path / "saved.ckpt"))
    monkeypatch.setattr(interruption._FaultState, "fits", 0)
    recorder = Recorder(tmp_path, make_parts()[0], portable=True)
    with deterministic(seed=1):
        with pytest.raises(CheckpointError, match=r"RESUME names, has \['other'\], and"), recorder:
            pass
        assert not is_portable()
    with pytest.raises(SettingError, match="The Recorder is not open"):
        recorder.state_dict()


def test_misuse_is_told(tmp_path):
    model = make_parts()[0]
    for words, message in (
        ({"reference": 5}, "reference is 5; allowed: a path, or None"),
        ({"on_drift": "ask"}, "on_drift is 'ask'; allowed: 'raise' or 'warn'"),
    ):
        with pytest.raises(SettingError, match=message):
            Recorder(tmp_path, model, **words)
    with pytest.raises(SettingError, match="There is no deterministic session"):
        Recorder(tmp_path, model).__enter__()
    with pytest.raises(SettingError, match=r"as one torch.nn.ModuleList"):
        Recorder(tmp_path, [model])
    with pytest.raises(SettingError, match="The Recorder is not open"):
        next(iter(Recorder(tmp_path, model).batches([])))
    with deterministic(seed=1), Recorder(tmp_path, model) as run:
        for call in (run.step, run.epoch, run.start_batch):
            with pytest.raises(SettingError, match=rf"{call.__name__}\(\) was called before the"):
                call()
        list(run.batches([1, 2]))
        with pytest.raises(SettingError, match=r"epoch\(1\) was called at the end of epoch 0"):
            run.epoch(1)
        state = run.state_dict()
        with pytest.raises(SettingError, match="was called after the first batch"):
            run.load_state_dict(state)
        list(run.batches([1, 2]))
        with pytest.raises(SettingError, match="the position in each loader is not known"):
            run.state_dict()
        run.step()
        run.epoch(0)
        assert run.state_dict()["epoch"] == 1
    (tmp_path / "file").write_text("")
    with (
        deterministic(seed=1),
        Recorder(tmp_path / "file", model) as run,
        pytest.raises(LedgerError),
    ):
        run.begin()


def test_a_state_of_another_run_is_refused(tmp_path):
    with deterministic(seed=1), Recorder(tmp_path, make_parts()[0]) as run:
        state = run.state_dict()
        for name, value, actual in (("seed", 9, 1), ("rank", 1, 0), ("world_size", 2, 1)):
            message = f"has {name} {value}, and this run has {actual}"
            with pytest.raises(CheckpointError, match=message):
                run.load_state_dict(state | {name: value})
        for name in ("format", "more"):
            message = r"reads format 1 with.* Pass what Recorder\.state_dict"
            with pytest.raises(CheckpointError, match=message):
                run.load_state_dict(state | {name: 2})


def test_batches_of_a_validation_are_probed_and_change_no_draw_of_the_training(tmp_path):
    """What a validation draws is the same in a run that resumes, which has drawn less before."""
    first = train(tmp_path, noise=0.0, probes="all").ledger
    numbers = [(e, s, b) for e, s, b, _ in list_batches(read_ledger(first)) if b > 5]
    assert numbers == [(e, 6 * e + 5, VALIDATION + n) for e in range(2) for n in range(2)]
    found = compare(first, train(tmp_path, noise=0.1, probes="all").ledger).divergences[0]
    assert (found.step, found.batch, found.kind) == (5, VALIDATION + 1, "op")
    drawn, same = (
        [r for r in list_batches(read_ledger(run.ledger)) if r[2] < 6]
        for run in (train(tmp_path, noise=own, probes=("batch", "rng")) for own in (0.0, None))
    )
    assert drawn == same


def test_a_validation_that_is_left_early_changes_no_draw_of_the_training(tmp_path):
    def draw(*validated):
        drawn, model = [], nn.Linear(1, 1)
        with deterministic(seed=3), Recorder(tmp_path, model) as run:
            for (batch,) in run.batches([(torch.ones(1, 1),)] * 3):
                run.step(model(batch).sum())
                kept = run.validation(validated)
                for _ in kept:
                    torch.rand(1)
                    break
                drawn.append(torch.rand(1).item())
                for iterator in map(iter, [kept] * len(validated)):
                    next(iterator)  # nothing closes it
                    run.step()
                    with pytest.raises(SettingError, match="continued after the training"):
                        next(iterator)
        return drawn

    assert draw(1, 2) == draw()


class Noise(nn.Module):
    """Adds numbers of a generator that no seed controls."""

    def forward(self, values):
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))
        return values + torch.randn(values.shape, generator=generator)


def test_operations_are_probed_within_forward_and_backward(tmp_path):
    """The hooks of the optimizer's step keep its operations out."""
    ledgers = []
    for _ in range(2):
        with deterministic(seed=1):
            model = nn.Sequential(nn.Linear(4, 4), Noise(), nn.Linear(4, 1))
            optimizer = torch.optim.Adam(model.parameters())
            with Recorder(tmp_path, model, optimizer, probes=("op", "gradient")) as run:
                for batch in run.batches(list(torch.randn(3, 2, 4))):
                    loss = model(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                    run.step(loss=loss)
                    torch.ones(3).erfinv()  # after the step: not recorded
                run.epoch()
        ledgers.append(run.ledger)
    found = compare(*ledgers).divergences[0]
    assert (found.moment, found.step, found.kind) == ("batch", 0, "op")
    assert (found.name, found.call) == ("1::aten.randn.generator", 0)
    layouts = [r for r in read_ledger(ledgers[0]).records(0) if hasattr(r, "places")]
    names = {name for layout in layouts for _, name, _ in layout.places}
    assert {"0::aten.addmm.default", "0::aten.sum.dim_IntList", "0.weight"} <= names
    assert not [n for n in names if "sqrt" in n or "addcdiv" in n or "erfinv" in n]
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


FINAL = """
import os, torch, lightning_d9m
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
with lightning_d9m.deterministic(), lightning_d9m.Recorder("runs", model) as run:
    run.begin()
    run.step(loss=0.5)
torch.nn.init.constant_(model.bias, int(os.environ["LIGHTNING_D9M_LEDGER_DIR"][-1]))
lightning_d9m.record_final(model, accuracy=0.5)
"""


def test_the_model_with_which_a_program_ends_is_compared(
    tmp_path, monkeypatch, capsys, forking_python
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(FINAL)
    assert main(["repeat", "-n", "2", "--", forking_python, "train.py"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("different: ")
    assert "the final state" in " ".join(out.split())


def test_a_final_model_and_a_loop_without_a_loader(tmp_path):
    model = make_parts()[0]
    with deterministic(seed=1), Recorder(tmp_path, model) as run:
        run.begin()
        run.step(loss=0.5)
    last = read_ledger(run.ledger).outcome(0).last
    assert (last.moment, last.step, last.loss) == ("final", 1, (0.5).hex())
    folder = record_final(model, ledger_dir=tmp_path, accuracy=0.5)
    assert folder == tmp_path / "final-000"
    final = read_ledger(folder).outcome(0).final
    assert final.groups["weights"] == last.groups["weights"]
    assert final.scalars == {"accuracy": (0.5).hex()}
    assert compare(folder, folder).equal


def test_a_final_model_has_no_backward_pass(tmp_path, monkeypatch):
    """Rank 0 alone records it, so a pass of DDP would wait for the others."""
    passes = []
    monkeypatch.setattr(run, "settle_buckets", passes.append)
    with deterministic(seed=1):
        model = nn.Linear(2, 1)
        record_final(model, ledger_dir=tmp_path)
        assert passes == []
        with Recorder(tmp_path, model) as recorder:
            recorder.begin()
        assert passes == [model]


def test_a_recorder_records_one_training_whose_losses_are_numbers(tmp_path):
    with deterministic(seed=1):
        model = nn.Linear(2, 1)
        with Recorder(tmp_path, model) as recorder:
            recorder.begin()
            loss = model(torch.ones(1, 2)).mean()
            recorder.step(loss=loss, kl=loss * 2)
            assert not recorder._scalars["kl"].requires_grad
            with pytest.raises(SettingError, match=r"shape \(2,\); allowed: one number"):
                recorder.step(loss=torch.ones(2))
        with pytest.raises(SettingError, match="Make a new Recorder for each training"), recorder:
            pass
