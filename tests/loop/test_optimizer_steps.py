"""Programs without a recorder: the hooks around optimizer steps write their ledgers."""

import sys
from functools import partial

import pytest
import torch
from scripts import execute
from torch import nn
from torch.autograd.graph import get_gradient_edge

from lightning_d9m import (
    DriftError,
    Recorder,
    SettingError,
    compare,
    deterministic,
    read_ledger,
)
from lightning_d9m.engine.ledger.folder import list_fits
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.engine.recording import interruption
from lightning_d9m.integrations.loop import optimizer_steps
from lightning_d9m.integrations.loop.optimizer_steps import (
    OptimizerSteps,
    find_trained_module,
)
from lightning_d9m.tools.comparison.causes import find_cause

PROGRAM = """
import atexit
import os
atexit.register(print, "early")
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(7):
    loss = model(torch.randn(16, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Return a function that calls a program under the hooks and returns its ledgers."""

    def run(program, name="runs", **variables):
        monkeypatch.setenv("LIGHTNING_D9M_LEDGER_DIR", str(tmp_path / name))
        monkeypatch.setenv("LIGHTNING_D9M_EVERY_N_STEPS", "2")
        for variable, value in variables.items():
            monkeypatch.setenv(f"LIGHTNING_D9M_{variable}", str(value))
        steps = OptimizerSteps()
        with deterministic(seed=1):
            steps.install()
            try:
                program()
            finally:
                steps.remove()
        return list_fits(tmp_path / name) if (tmp_path / name).is_dir() else []

    return run


def fit(model, *optimizers, steps=5, disturb=None):
    for step in range(steps):
        loss = model(torch.randn(8, 4)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        if step == disturb:
            with torch.no_grad():
                model.weight.view(torch.int32)[0, 0] ^= 1
        for optimizer in optimizers:
            optimizer.step()


def train(**words):
    model = nn.Linear(4, 1)
    fit(model, torch.optim.Adam(model.parameters()), **words)


def moments(folder):
    return [
        (record.moment, record.epoch, record.step)
        for record in read_ledger(folder).line_records(0)
        if isinstance(record, Digests)
    ]


def test_every_nth_step_is_recorded_and_one_flipped_bit_is_found_or_stops_the_run(record):
    first, again = (record(train, name)[0] for name in ("first", "again"))
    places = [("initial", 0, 0), ("epoch", 0, 2), ("epoch", 1, 4), ("final", 2, 5)]
    assert moments(first) == places
    assert read_ledger(first).outcome(0).end.status == "finished"
    assert "gradients" in read_ledger(first).outcome(0).final.totals
    assert compare(first, again).verdict == "equal"
    (changed,) = record(lambda: train(disturb=2), "changed")
    result = compare(first, changed)
    found = result.ranks[0].divergence
    assert (result.verdict, found.moment, found.step) == ("different", "epoch", 4)
    with pytest.raises(DriftError, match="weight"):
        record(lambda: train(disturb=0), "second", REFERENCE=first)


def test_a_compiled_model_has_the_names_of_the_plain_one(record):
    def run(**words):
        model = torch.compile(nn.Linear(4, 1), backend="eager", **words)
        fit(model, torch.optim.SGD(model.parameters()))

    (plain,), (compiled,) = record(partial(run, disable=True), "plain"), record(run, "compiled")
    assert compare(plain, compiled).verdict == "equal"


def train_by_hand(disturb=None):
    """As libraries do that have their own optimizers: ``data`` hides a change from autograd."""
    model = nn.Linear(4, 1)
    for step in range(6):
        model(torch.randn(8, 4)).square().mean().backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None
        if step == disturb:
            model.weight.data.view(torch.int32)[0, 0] ^= 1


def test_a_misspelled_variable_is_not_ignored(record):
    assert record(train, IGNORED_METRICS="time")
    with pytest.raises(SettingError, match="Did you mean LIGHTNING_D9M_PROBE_STEPS"):
        record(train, "again", PROBE_STEPP="1")


class Centered(nn.Module):
    """Keeps a mean as a parameter without a gradient, as Keras keeps statistics."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        self.mean.data = self.mean * 0.9 + x.mean(0) * 0.1
        return self.linear(x - self.mean)


def test_what_a_forward_pass_writes_is_not_said_to_be_written_by_other_code(record):
    """Without an optimizer of torch a step begins after its forward pass."""

    def train(other=0.0):
        model = Centered()
        for step in range(6):
            x = torch.randn(8, 4) + (other if step == 4 else 0.0)
            model(x).square().mean().backward()
            for parameter in model.linear.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None

    ledgers = [record(partial(train, n), f"{n}", PROBES="weight,gradient")[0] for n in (0.0, 1.0)]
    cause = find_cause(compare(*ledgers))
    assert (cause.kind, cause.narrows) == ("weights", True)
    assert "after its forward pass" in cause.text


def test_steps_without_an_optimizer_are_recorded_from_the_second_on(record):
    first, again = (record(train_by_hand, name)[0] for name in ("first", "again"))
    places = [("initial", 0, 0), ("epoch", 0, 2), ("epoch", 1, 4), ("final", 1, 4)]
    assert moments(first) == places
    assert compare(first, again).verdict == "equal"
    (changed,) = record(lambda: train_by_hand(disturb=2), "changed")
    found = compare(first, changed).ranks[0].divergence
    assert (found.moment, found.step) == ("epoch", 2)
    assert [name for name in found.names if "weight" in name]


def test_backward_passes_that_change_nothing_are_no_steps(record):
    """They leave no ledger, and accumulated gradients do not hide the first step."""

    def program(step_every):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters()) if step_every else None
        for step in range(1, 9):
            model(torch.randn(8, 4)).sum().backward()
            if optimizer is not None and step % step_every == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert record(lambda: program(0), "none") == []
    (folder,) = record(lambda: program(2))
    assert [moment for moment, *_ in moments(folder)] == ["initial", "epoch", "epoch", "final"]


@pytest.mark.parametrize(
    "give",
    [
        iter,
        lambda roots: [*map(get_gradient_edge, roots)],
        lambda roots: get_gradient_edge(*roots),
    ],
    ids=["iterator", "edges", "edge"],
)
def test_roots_of_any_kind_get_their_gradients(record, give):
    weight = torch.ones(3, requires_grad=True)

    def program():
        torch.autograd.backward(give([(weight * 2).sum()]), [torch.ones(())])

    assert record(program) == []
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_probes_see_the_first_steps_forward_pass(record):
    (folder,) = record(train, PROBES="output,gradient,weight")
    records = [r for r in read_ledger(folder).records(0) if type(r).__name__ != "Digests"]
    places = str([getattr(r, "places", None) or getattr(r, "layouts", None) for r in records])
    assert "output" in places


def test_all_that_optimizers_change_is_held_under_stable_names():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.Linear(2, 2), nn.Linear(2, 1)

    class Critic(nn.Linear):
        pass

    agent, extra, twin = Agent(), Critic(2, 1), Critic(2, 1)
    temperature = torch.zeros((), requires_grad=True)
    optimizers = [
        torch.optim.SGD(agent.actor.parameters()),
        torch.optim.SGD([*twin.parameters(), *extra.parameters()]),
        torch.optim.SGD([temperature]),
    ]
    found = find_trained_module(optimizers)
    assert [name for name, _ in found.named_children()] == ["Agent", "Critic", "Critic_2"]
    assert found.Critic is twin
    assert dict(found.named_buffers()) == {"loose_0": temperature}
    assert "Agent.critic.weight" in dict(found.named_parameters())
    assert find_trained_module(optimizers[:1]) is agent


def test_an_optimizer_of_the_same_model_continues_the_ledger_and_another_model_begins_one(record):
    def program():
        model = nn.Linear(4, 1)
        fit(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        fit(model, torch.optim.Adam(model.parameters()), steps=2)
        train(steps=3)

    first, second = record(program)
    assert moments(first)[-1] == ("final", 1, 4)
    assert moments(second)[-1] == ("final", 1, 3)


def test_tensors_that_replace_those_of_an_optimizer_begin_a_ledger(record):
    def program():
        model, other = nn.Linear(4, 1), nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        fit(model, optimizer, steps=2)
        optimizer.param_groups[0]["params"] = [*other.parameters()]
        fit(other, optimizer, steps=3)

    first, second = record(program)
    assert moments(first)[-1] == ("final", 0, 2)
    assert moments(second)[-1] == ("final", 1, 3)


@pytest.mark.parametrize(
    ("most", "variables", "warning"),
    [
        (9, {"EVERY_N_STEPS": 0}, "is 0; allowed: a number of optimizer steps from 1"),
        (9, {"INTERRUPT": "points", "CHECKPOINT_DIR": "x"}, "\nAdd a Recorder to the loop"),
        (9, {"LEDGER_DIR": __file__}, "no longer records the optimizer steps"),
        (0, {}, "has written 0 ledgers, one for each model"),
    ],
)
def test_a_program_goes_on_where_it_cannot_be_recorded(
    record, monkeypatch, most, variables, warning
):
    monkeypatch.setattr(optimizer_steps, "_MOST_LEDGERS", most)
    monkeypatch.setattr(interruption._FaultState, "fits", 0)
    with pytest.warns(UserWarning, match=warning):
        assert record(train, **variables) == []


def test_a_ledger_that_is_the_last_one_does_not_seem_complete(record, monkeypatch):
    """Two runs of a program with too many models would be equal by what was recorded."""
    monkeypatch.setattr(optimizer_steps, "_MOST_LEDGERS", 1)

    def program():
        train()
        train()

    with pytest.warns(UserWarning, match="has written 1 ledgers, one for each model"):
        (first,), (second,) = record(program, "first"), record(program, "second")
    end = read_ledger(first).outcome(0).end
    assert (end.status, end.error.partition(":")[0]) == ("failed", "D9mError")
    assert compare(first, second).verdict == "incomplete"


def test_sharded_parameters_need_a_recorder(record, monkeypatch):
    monkeypatch.setattr(optimizer_steps, "is_sharded_dtensor", lambda _: True)
    with pytest.warns(UserWarning, match=r"are sharded, .*\nAdd a Recorder to the loop"):
        assert record(train) == []


def test_a_recorder_takes_precedence(record, tmp_path):
    def program():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(tmp_path, model, optimizer) as run:
            run.begin()
            fit(model, optimizer)
            run.step()
            run.epoch()

    assert len(record(program)) == 1


def test_flags_that_the_program_changes_are_set_again(record):
    def program():
        torch.use_deterministic_algorithms(True, warn_only=True)  # as ultralytics does
        train(steps=1)
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        torch.backends.mkldnn.deterministic = False
        with pytest.warns(UserWarning, match=r"mkldnn.deterministic .* sets the flag again"):
            train(steps=2)

    first, _ = record(program)
    overridden = read_ledger(first).header.settings["overridden"]
    assert overridden == "torch.deterministic_warn_only"


def test_a_store_gives_ranks_one_folder_and_does_not_wait_without_end(tmp_path, monkeypatch):
    from torch.distributed import HashStore, distributed_c10d

    store = HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(optimizer_steps, "_FOLDER_SECONDS", 0.1)
    monkeypatch.setenv("LIGHTNING_D9M_LEDGER_DIR", str(tmp_path))
    folder = optimizer_steps._make_folder(0, 2, 0)
    assert optimizer_steps._make_folder(1, 2, 0) == folder
    with pytest.raises(optimizer_steps.D9mError, match="rank 0 made none within"):
        optimizer_steps._make_folder(1, 2, 1)


@pytest.fixture
def run_program(tmp_path, forking_python):
    """Return a function that runs the program, which does not know us, in a process."""

    def run(end="", python=forking_python, **variables):
        own = {"LIGHTNING_D9M": "1", "LIGHTNING_D9M_EVERY_N_STEPS": "3"} | variables
        own["PYTHONHASHSEED"] = "0"  # as in forks
        words, without = (python, "-c", PROGRAM + end), ["LIGHTNING_"]
        return execute(*words, folder=tmp_path, fails=True, without=without, **own)

    return run


DRIFT = """
log = open("program.log", "w")
log.write("written")
class Deleted:
    def __del__(self, say=print):
        say("deleted")
deleted = Deleted()
atexit.register(print, "registered")
with torch.no_grad(): model[0].weight.view(torch.int32)[0, 0] ^= 1
"""


def test_a_program_that_does_not_know_us_leaves_a_ledger(run_program, tmp_path):
    """Without a name for the folder nothing is written into the working folder.

    A difference that only the final state shows is the exit status of the next run.
    """
    done = run_program(XDG_STATE_HOME=str(tmp_path / "state"))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    (folder,) = list_fits(next((tmp_path / "state" / "lightning_d9m").iterdir()))
    assert f"recorded in {folder}" in done.stderr
    assert [record[2] for record in moments(folder)] == [0, 3, 6, 7]
    variables = {"LIGHTNING_D9M_LEDGER_DIR": str(tmp_path), "LIGHTNING_D9M_REFERENCE": str(folder)}
    done = run_program(DRIFT, sys.executable, **variables)  # a fork does not end as Python does
    assert done.returncode == 1
    assert "DriftError" in done.stderr
    # What the program has written and wanted to do at its end is not lost for that.
    assert (tmp_path / "program.log").read_text() == "written"
    assert done.stdout.split() == ["registered", "early", "deleted"]


def test_a_child_process_keeps_its_own_ledger_and_a_failure_is_recorded(run_program, tmp_path):
    end = (
        "if os.fork(): os.wait()\nelse: optimizer.step(); os._exit(0)\nraise ValueError('planted')"
    )
    done = run_program(end, LIGHTNING_D9M_LEDGER_DIR=str(tmp_path))
    assert "planted" in done.stderr
    parent, child = list_fits(tmp_path)
    end = read_ledger(parent).outcome(0).end
    assert (end.status, end.error) == ("failed", "ValueError: planted")
    assert read_ledger(child).outcome(0).end is None


FORKED = """
def train():
    for step in range(4):
        optimizer.step()
    {end}
import multiprocessing, sys
process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
"""


def test_a_forked_process_of_multiprocessing_is_recorded_to_its_end(run_program, tmp_path):
    """Its parent's ledger is open, and multiprocessing forgets the parent's finalizers."""
    run_program(FORKED.format(end=""), LIGHTNING_D9M_LEDGER_DIR=str(tmp_path))
    _, child = list_fits(tmp_path)
    assert [step for _, _, step in moments(child)] == [0, 3, 4]
    assert read_ledger(child).outcome(0).end.status == "finished"


CAUGHT = "try: 1 / 0\n    except ZeroDivisionError: sys.exit(1)"


@pytest.mark.parametrize(
    ("place", "end", "error"),
    [
        (0, "import sys; sys.exit('planted')", "SystemExit: planted"),
        (0, "import sys; sys.exit(0)", None),
        (0, "import sys; sys.last_value = NameError('of a cell')\noptimizer.step()", None),
        (1, FORKED.format(end="raise ValueError('planted')"), "ValueError: planted"),
        (1, FORKED.format(end=CAUGHT), "ZeroDivisionError: division by zero"),  # as torch spawns
    ],
)
def test_the_end_names_the_error_that_no_step_followed(run_program, tmp_path, place, end, error):
    run_program(end, LIGHTNING_D9M_LEDGER_DIR=str(tmp_path))
    found = read_ledger(list_fits(tmp_path)[place]).outcome(0).end
    assert (found.status, found.error) == ("failed" if error else "finished", error)
