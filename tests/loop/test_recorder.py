"""The recorder of any loop: its ledgers repeat, detect, and continue after a resume."""

import io
import os

import pytest
import torch
from ledger_runs import list_batches
from torch import nn
from trainings import NoisyDigits, make_loader

from lightning_d9m import Recorder, SettingError, compare, deterministic, read_ledger
from lightning_d9m.errors import (
    CheckpointError,
    InexactResumeError,
    LedgerError,
    ReferenceRefusedError,
)
from lightning_d9m.hashing.digest import digest_value
from lightning_d9m.ledger.kinds import VALIDATION
from lightning_d9m.probes.dumps import find_states, read_index

EPOCHS = 2


class Stop(Exception):  # noqa: N818 - no error
    """Ends a run before its time."""


class Wrapped:
    """A loader that is not torch's, as Fabric's is not."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


def make_parts():
    model = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def train(folder, *, state=None, stop=None, disturb=None, wrap=lambda loader: loader, **words):
    """Train; return the recorder, or the bytes of the state that was saved at batch ``stop``."""
    with deterministic(seed=words.pop("seed", 3), threads=1):
        model, optimizer, scheduler = parts = make_parts()
        loader = wrap(make_loader(size=words.pop("size", 96)))
        with Recorder(folder, model, optimizer, scheduler, **words) as run:
            if state is not None:
                saved = torch.load(io.BytesIO(state), weights_only=True)
                for part, own in zip(parts, saved["parts"], strict=True):
                    part.load_state_dict(own)
                run.load_state_dict(saved["run"])
            for epoch in range(run.next_epoch, EPOCHS):
                for images, classes in run.batches(loader):
                    loss = nn.functional.cross_entropy(model(images), classes)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    run.step(loss=loss, rate=scheduler.get_last_lr()[0])
                    if disturb is not None:
                        disturb(model, optimizer, run.global_step)
                    if run.global_step == stop:
                        states = [part.state_dict() for part in parts]
                        buffer = io.BytesIO()
                        torch.save({"parts": states, "run": run.state_dict()}, buffer)
                        return buffer.getvalue()
                scheduler.step()
                run.epoch(epoch, drawn=torch.rand(()).item())
    return run


def one_ulp(step):
    """Return what changes one weight by one unit in the last place after a step."""

    def disturb(model, _, now):
        if now == step:
            model[0].weight.data.view(torch.int32)[2, 3] += 1

    return disturb


def test_two_runs_leave_equal_ledgers(tmp_path):
    first, second = train(tmp_path), train(tmp_path)
    assert compare(first.ledger, second.ledger).verdict == "equal"
    assert (
        first.digest
        == second.digest
        == read_ledger(first.ledger).outcome(0).final.totals["weights"]
    )
    kinds = [
        record.moment
        for record in read_ledger(first.ledger).records(0)
        if hasattr(record, "moment")
    ]
    assert kinds == ["initial", "epoch", "epoch", "final"]
    last = read_ledger(first.ledger).outcome(0).last
    assert (last.step, set(last.scalars), last.loss is None) == (12, {"rate", "drawn"}, False)
    assert set(last.groups) == {"weights", "buffers", "optimizers", "schedulers"}
    assert repr(first) == (
        f"Recorder(ledger={str(first.ledger)!r}, epochs=2, steps=12, digest={first.digest!r})"
    )


def test_another_experiment_is_refused(tmp_path):
    reference = train(tmp_path).ledger
    for words in ({"seed": 4}, {"size": 80}):
        with pytest.raises(ReferenceRefusedError):
            train(tmp_path, reference=reference, **words)


# Of the resume after the last batch of an epoch, where no step precedes the scheduler's.
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("wrap", [lambda loader: loader, Wrapped], ids=["DataLoader", "other"])
def test_a_resumed_run_ends_at_the_same_bits(tmp_path, wrap):
    straight = train(tmp_path / "straight", wrap=wrap)
    for stop in (1, 5, 6, 9):
        state = train(tmp_path / str(stop), wrap=wrap, stop=stop)
        resumed = train(tmp_path / str(stop), wrap=wrap, state=state)
        assert resumed.digest == straight.digest
        comparison = compare(straight.ledger, resumed.ledger)
        assert comparison.verdict == "equal"
        assert [entry.step for entry in comparison.ranks[0].actual.breaks] == [stop]


def test_a_device_that_is_not_visible_makes_a_resume_inexact(tmp_path):
    state = torch.load(io.BytesIO(train(tmp_path, stop=5)), weights_only=True)
    drawn = torch.ones(16, dtype=torch.uint8)
    state["run"]["rng"] |= {"devices": {"cuda": [drawn]}, "own": {"cuda": 0}}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with pytest.raises(InexactResumeError, match="the device cuda:0, and its generator cannot be"):
        train(tmp_path, state=buffer.getvalue())


def change_rate(_, optimizer, step):
    if step == 8:
        optimizer.param_groups[0]["lr"] = 9.0


def test_probes_name_the_step(tmp_path):
    words = {"probes": ("weight", "optimizer", "batch", "output", "gradient", "loss", "scalar")}
    first, same = train(tmp_path, **words), train(tmp_path, **words)
    assert compare(first.ledger, same.ledger).verdict == "equal"
    for kind, disturb in (("weight", one_ulp(8)), ("optimizer", change_rate)):
        other = train(tmp_path, disturb=disturb, **words)
        found = compare(first.ledger, other.ledger).divergences[0]
        assert (found.moment, found.step, found.batch, found.kind) == ("batch", 8, 2, kind)


@pytest.mark.parametrize(("moment", "step"), [("initial", 0), ("epoch", 6), ("final", 12)])
def test_the_state_at_a_record_is_saved_with_the_values(tmp_path, monkeypatch, moment, step):
    """`d9m locate` measures what differs across ranks outside of steps."""
    monkeypatch.setenv("LIGHTNING_D9M_DUMP", str(tmp_path / "dump"))
    monkeypatch.setenv("LIGHTNING_D9M_DUMP_NAMES", "0.bias")
    train(tmp_path, probes="weight", probe_steps=f"{step}:{step + 1}")
    (folder,) = find_states(tmp_path / "dump", step=step, rank=0, moment=moment)
    assert [entry["name"] for entry in read_index(folder)] == ["0.bias"]


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


def test_a_loop_without_a_loader(tmp_path):
    model = make_parts()[0]
    with deterministic(seed=1), Recorder(tmp_path, model) as run:
        run.begin()
        run.step(loss=0.5)
    last = read_ledger(run.ledger).outcome(0).last
    assert (last.moment, last.step, last.loss) == ("final", 1, (0.5).hex())


def test_no_step_of_a_loop_is_run_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_REPLAY_EVERY", "2")
    with (
        deterministic(seed=1),
        pytest.raises(SettingError, match="REPLAY_EVERY is 2, and a Recorder cannot run a step of"),
    ):
        Recorder(tmp_path, make_parts()[0]).__enter__()


def test_batches_made_once_give_every_epoch(tmp_path):
    """As a loader does, with its length; what can be iterated once only is an error."""

    def train(folder, make_batches):
        model = make_parts()[0]
        with deterministic(seed=1), Recorder(tmp_path / folder, model) as run:
            seen = []
            batches = make_batches(run)
            for epoch in range(2):
                for batch in batches if folder == "once" else make_batches(run):
                    seen.append(digest_value(batch))
                    run.step(loss=0.5)
                run.epoch(epoch)
        return seen

    loader = make_loader()
    seen = train("once", lambda run: run.batches(loader))
    assert seen == train("anew", lambda run: run.batches(loader))
    assert len(seen) == 2 * len(loader) == 2 * len(set(seen[: len(loader)]))
    with deterministic(seed=1), Recorder(tmp_path / "length", make_parts()[0]) as run:
        assert len(run.batches(loader)) == len(loader)
    with pytest.raises(SettingError, match=r"Epoch 1 ends without a call of step\(\)"):
        train("once", lambda run: run.batches(iter([1, 2])))


def test_misuse_is_told(tmp_path):
    with pytest.raises(SettingError, match="reference is 5; allowed: a path, or None"):
        Recorder(tmp_path, make_parts()[0], reference=5)
    model = make_parts()[0]
    with pytest.raises(SettingError, match="There is no deterministic session"):
        Recorder(tmp_path, model).__enter__()
    with pytest.raises(SettingError, match="on_drift is 'ask'; allowed: 'raise' or 'warn'"):
        Recorder(tmp_path, model, on_drift="ask")
    with pytest.raises(SettingError, match=r"as one torch.nn.ModuleList"):
        Recorder(tmp_path, [model])
    with pytest.raises(SettingError, match="The Recorder is not open"):
        next(iter(Recorder(tmp_path, model).batches([])))
    with deterministic(seed=1), Recorder(tmp_path, model) as run:
        with pytest.raises(SettingError, match=r"step\(\) was called before the training began"):
            run.step()
        with pytest.raises(SettingError, match=r"epoch\(\) was called before the training began"):
            run.epoch()
        with pytest.raises(SettingError, match=r"start_batch\(\) was called before the training"):
            run.start_batch()
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


def validate(folder, noise=0.0, *, validates=True, probes="all"):
    """Train with a validation in each epoch; noise disturbs the second batch of the first one."""
    with deterministic(seed=3, threads=1):
        model, optimizer, _ = make_parts()
        loader, others = make_loader(), make_loader(size=32)
        with Recorder(folder, model, optimizer, probes=probes) as run:
            for epoch in range(EPOCHS):
                for images, classes in run.batches(loader):
                    loss = nn.functional.cross_entropy(model(images), classes)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    run.step(loss=loss)
                for number, (images, _) in enumerate(run.validation(others) if validates else ()):
                    model(images + noise * (number == 1 and epoch == 0))
                run.epoch(epoch)
    return run


def test_batches_of_a_validation_are_probed(tmp_path):
    first, same = validate(tmp_path), validate(tmp_path)
    assert compare(first.ledger, same.ledger).verdict == "equal"
    numbers = [(e, s, b) for e, s, b, _ in list_batches(read_ledger(first.ledger)) if b > 5]
    assert numbers == [(e, 6 * e + 5, VALIDATION + n) for e in range(EPOCHS) for n in range(2)]
    found = compare(first.ledger, validate(tmp_path, noise=0.1).ledger).divergences[0]
    assert (found.step, found.batch, found.kind) == (5, VALIDATION + 1, "op")


def test_a_validation_changes_no_draw_of_the_training(tmp_path):
    """What it draws is the same in a run that resumes, which has drawn less before."""
    with_one, without = (
        read_ledger(validate(tmp_path, validates=validates, probes=("batch", "rng")).ledger)
        for validates in (True, False)
    )
    drawn, same = ([r for r in list_batches(one) if r[2] < 6] for one in (with_one, without))
    assert drawn == same


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
