"""``d9m bundle --step``: a step runs again from its capsule, without the program and its data."""

import json
import sys
import zipfile
from functools import cache
from types import SimpleNamespace

import msgspec
import pytest
import torch
from ledger_runs import make_header
from scripts import ROOT, execute
from torch import nn

from lightning_d9m import deterministic
from lightning_d9m.engine.ledger.stack import capture_stack
from lightning_d9m.engine.probes.step_tape import StepTape, refer
from lightning_d9m.engine.recording.interruption import STEP_FILE
from lightning_d9m.errors import CommandError, SettingError
from lightning_d9m.tools.cli import bundle as bundle_module
from lightning_d9m.tools.history.capsule import (
    CAPSULE_FACTS,
    CapsuleFacts,
    find_step,
    run_step,
    write_capsule,
)

PROGRAM = str(ROOT / "tests/support/goto_training.py")


@pytest.fixture(scope="module")
def capsule(tmp_path_factory, forking_python):
    """Return a function that trains, and writes a capsule of step 10: its path and the result."""

    def run(*words, folder):
        own = {"RANKS": "1", "OMP_NUM_THREADS": "1"}
        return execute(forking_python, *words, folder=folder, **own).stdout

    @cache
    def make(what="", *options):
        folder = tmp_path_factory.getbasetemp() / f"capsule-{what}"
        program = (PROGRAM, folder, *filter(None, [what]))
        place = tmp_path_factory.mktemp("work")
        if not folder.exists():
            run(*program, folder=place)
        words = ("bundle", folder, "--step", "10", "--json", "-o", "c.zip", *options, "--")
        found = run("-m", "lightning_d9m", *words, forking_python, *program, folder=place)
        return place / "c.zip", json.loads(found)

    return make


def read(path):
    with zipfile.ZipFile(path) as archive:
        facts = msgspec.json.decode(archive.read(CAPSULE_FACTS), type=CapsuleFacts)
        with archive.open(STEP_FILE) as member:
            return facts, torch.load(member, weights_only=True)


@pytest.mark.parametrize("what", ["", "loop"])
def test_a_step_runs_again_in_another_place(capsule, what, d9m, tmp_path, monkeypatch):
    path, found = capsule(what, "--with-data")
    assert (found["verdict"], found["ran"], found["left_out"]) == ("equal", found["ops"], 0)
    # Of the model of 8 x 4, the batch of 8 x 8 and its classes.
    assert found["sizes"]["state"] >= 4 * (8 * 4 + 4)
    assert found["sizes"]["data"] >= 4 * 8 * 8 + 8 * 8
    assert [own.name for own in path.parent.rglob("d9m-runs/*")] == [".gitignore"]
    monkeypatch.chdir(tmp_path)
    status, out, errors = d9m("bundle", "open", path)
    assert status == 0, errors
    assert out.startswith(f"equal: {found['ops']} operations of step 10 leave the bits of the run.")
    ops = read(path)[1]["ops"]
    assert any("cross_entropy" in str(entry["source"]) and entry["backward"] for entry in ops)
    with zipfile.ZipFile(path) as archive:
        assert "def fingerprint" in archive.read("source/0-goto_training.py").decode()


def test_an_error_leaves_the_log_and_not_the_batch(tmp_path, monkeypatch, d9m):
    def fail(_, __, runs, **___):
        folder = runs.output / "trace/segment"
        folder.mkdir(parents=True)
        (folder / STEP_FILE).write_text("the batch")
        (runs.output / "trace/output.log").write_text("boom")
        raise CommandError("boom")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundle_module, "trace_step", fail)
    monkeypatch.setattr(bundle_module, "RecordedRun", lambda _: None)
    monkeypatch.setattr("lightning_d9m.tools.history.capsule.find_step", lambda *_: None)
    assert d9m("bundle", "run", "--step", "1", "--", "true")[0] == 3
    left = [own.name for own in (tmp_path / "d9m-runs/000").rglob("*")]
    assert left == ["trace", "output.log"]


def gates(layer, x):  # of a GRU are parts of one tensor, each written in place
    return layer(x)[0].square().mean()


def draws(layer, x, generator=torch.Generator().manual_seed(3)):  # noqa: B008 - one for all calls
    noise = torch.randn(x.shape, generator=generator) + torch.rand(1)
    return layer(x + noise).square().mean()


def conjugates(layer, x):
    found = torch.fft.rfft(layer(x))
    return (found * found.conj()).real.sum()


@pytest.mark.parametrize(
    ("loss", "layer", "x"),
    [
        (gates, nn.GRU(4, 3), torch.ones(5, 2, 4)),
        (draws, nn.Linear(4, 3), torch.ones(2, 4)),
        (conjugates, nn.EmbeddingBag(9, 4, sparse=True, mode="sum"), torch.ones(2, 3).long()),
    ],
)
def test_steps_of_several_kinds(tmp_path, loss, layer, x):
    if "torch._dynamo.utils" in sys.modules:  # other tests of this process have compiled
        sys.modules["torch._dynamo.utils"].counters.clear()
    with deterministic(seed=1, threads=1):
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        with StepTape() as tape:
            loss(layer, x).backward()
            optimizer.step()
        tape.save(tmp_path / "step.pt", 0)
        header = {"settings": {}, "seed": 1, "stack": capture_stack()}
    content = torch.load(tmp_path / "step.pt", weights_only=True)
    assert run_step(CapsuleFacts(0, 0, header, {}, 0, 0, ""), content).verdict == "equal"


def test_a_batch_of_two_steps_is_one_capsule_and_is_entered_at_its_first_step(capsule, d9m):
    path, found = capsule("twice", "--with-data")
    assert (found["verdict"], found["step"], found["last"]) == ("equal", 10, 11)
    assert (
        "operations of step 10 to 11, which one batch makes, leave"
        in d9m("bundle", "open", path)[1]
    )
    folder = path.parents[1] / "capsule-twice"
    words = (folder, "--step", "11", "--", sys.executable, PROGRAM, folder, "twice")
    status, _, errors = d9m("bundle", *words)
    assert status == 3
    assert "Step 11 cannot be entered: its batch begins with step 10" in " ".join(errors.split())
    status, _, errors = d9m("goto", "11", folder, "--trace", *words[3:])
    assert (status, "Give step 10." in errors) == (3, True)


def test_without_data_a_capsule_holds_none_and_says_what_it_cannot_do(capsule, d9m):
    path, found = capsule()
    given = read(capsule("", "--with-data")[0])[1]["values"]
    values = read(path)[1]["values"]
    lacking = [own for key, own in given.items() if key not in values]
    assert 8 * 8 in [own.numel() for own in lacking]
    assert found["left_out"] == sum(own.nbytes for own in lacking)
    assert (found["verdict"], found["sizes"].get("data")) == ("incomplete", None)
    status, out, _ = d9m("bundle", "open", path)
    assert status == 3
    assert "they lack data (" in out


def test_a_flipped_bit_is_named_at_the_first_operation_that_it_changes(capsule):
    facts, content = read(capsule("", "--with-data")[0])
    (weight,) = (own for own in content["values"].values() if own.shape == (32,))
    weight.view(torch.int32)[3] ^= 1
    outcome = run_step(facts, content)
    assert (outcome.verdict, outcome.ran) == ("different", outcome.ops)
    # The program hashes its weights first.
    assert outcome.first.startswith("operation 1, aten.detach.default, ")
    assert "in <listcomp>: local = [getattr(" in outcome.first
    facts, content = read(capsule("", "--with-data")[0])
    content["ops"][-1]["digest"] = 32 * "0"
    assert run_step(facts, content).first.startswith(f"operation {len(content['ops'])}, ")


@pytest.mark.parametrize(
    "name",
    [
        "aten.save.default",
        "aten.from_file.default",
        "os.system",
        "profiler.x",
        "aten.absent.default",
    ],
)
def test_only_operations_on_tensors_run(capsule, tmp_path, name):
    """TorchScript's operations can write files, and one of torch's maps a file into memory."""
    facts, content = read(capsule("", "--with-data")[0])
    target = tmp_path / "written"
    entry = {"op": name, "args": [str(target), True, 4], "kwargs": {}, "left": [], "digest": ""}
    if name == "aten.save.default":
        entry["args"] = [torch.ones(1), str(target)]
    content["ops"] = [entry | {"source": None, "backward": False}]
    outcome = run_step(facts, content)
    assert (outcome.verdict, outcome.ran) == ("incomplete", 0)
    assert f"{name} is not one" in outcome.obstacle
    assert not target.exists()


@pytest.mark.parametrize("name", ["_sparse_coo_tensor_unsafe", "_sparse_csr_tensor_unsafe"])
def test_indices_outside_of_a_sparse_tensor_are_refused(capsule, name):
    """An operation on such a tensor would write outside of its memory."""
    facts, content = read(capsule("", "--with-data")[0])
    parts = [torch.tensor([[10**9]]), torch.ones(1)]
    if "csr" in name:
        parts = [torch.tensor([0, 1]), torch.tensor([10**9]), torch.ones(1)]
    size = [1, 4] if "csr" in name else [4]
    content["values"] = {str(number): part.flatten() for number, part in enumerate(parts)}
    given = [
        refer(part) | {"key": str(number), "device": "cpu"} for number, part in enumerate(parts)
    ]
    entry = {"op": f"aten.{name}.default", "args": [*given, size], "kwargs": {}, "left": []}
    content["ops"] = [entry | {"source": None, "backward": False, "digest": ""}]
    outcome = run_step(facts, content)
    assert (outcome.verdict, outcome.ran) == ("incomplete", 0)
    assert "size is inconsistent with indices" in outcome.obstacle or "ncols" in outcome.obstacle


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "16"], "has no step 16; allowed: 0 to 15."),
        ([PROGRAM, "--step", "3"], "--step takes one ledger"),
        (["--with-data"], "--with-data, --timeout and a command are for --step"),
        (["--step", "3", "-o", PROGRAM], "exists already, so nothing can be written to it"),
    ],
)
def test_a_wrong_request(capsule, d9m, tmp_path, monkeypatch, words, message):
    run = capsule("", "--with-data")[0].parents[1] / "capsule-"
    monkeypatch.chdir(tmp_path)
    status, _, errors = d9m("bundle", run, *words, "--", "python", PROGRAM)
    assert status == 2
    assert message in " ".join(errors.split())
    assert not list(tmp_path.iterdir())


def test_a_damaged_capsule(capsule, d9m, tmp_path):
    source, path = capsule("", "--with-data")[0], tmp_path / "bad.zip"
    for replaced in ({STEP_FILE: b"PK"}, {CAPSULE_FACTS: b"{}"}):
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                new.writestr(name, replaced.get(name, old.read(name)))
        status, _, errors = d9m("bundle", "open", path)
        assert (status, "or is damaged" in errors) == (2, True), errors


def test_what_has_no_capsule(tmp_path):
    with pytest.raises(CommandError, match="Step 9 was not recorded"):
        write_capsule(tmp_path / "c.zip", 9, None, tmp_path / STEP_FILE, with_data=True, differs="")
    run = SimpleNamespace(ledger=SimpleNamespace(header=make_header(world_size=2)))
    with pytest.raises(SettingError, match="a step of one process, and the run has 2"):
        find_step(run, 9)
