"""The files that a program saves are digested by their tensors, and compared by order and name."""

import builtins
import io
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_d9m import compare, read_ledger
from lightning_d9m.engine.hashing.digest import digest
from lightning_d9m.engine.ledger.folder import LEDGER_VARIABLE
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.integrations.autoload.entry_points import call_after_import
from lightning_d9m.integrations.loop.saved_files import SavedFiles


@contextmanager
def saves_digested():
    """Digest what is saved, as in a run."""
    saved = SavedFiles()
    saved.install(call_after_import)
    try:
        yield
    finally:
        saved.remove()


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Return a function that saves values in a run, and returns its ledger."""
    monkeypatch.chdir(tmp_path)

    def run(name, *values):
        monkeypatch.setenv(LEDGER_VARIABLE, str(tmp_path / name))
        with saves_digested():
            for number, value in enumerate(values):
                torch.save(value, f"{name}-{number}.pt")
            with Path("other.pt").open("wb") as file:
                torch.save({"made": np.ones(2), "at": name}, file)
            torch.save({"run": torch.tensor(len(name))}, io.BytesIO())
            sys.modules["safetensors.torch"].save_file({"x": torch.ones(2)}, "x.safetensors")
        return tmp_path / name / "saved-000"

    return run


def test_tensors_are_compared_whatever_the_file_is_called(save):
    before = torch.save, torch.serialization.save, sys.modules["safetensors.torch"].save_file
    model, average = nn.Linear(2, 1), torch.zeros(3)
    one, other = (save(name, model, {"ema": average}) for name in ("run1", "run20"))
    assert compare(one, other).equal
    found = [record for record in read_ledger(one).records(0) if isinstance(record, Digests)]
    assert [(own.moment, own.epoch) for own in found] == [
        ("saved run#-#.pt", 0),
        ("saved run#-#.pt", 1),
        ("saved other.pt", 0),
        ("saved x.safetensors", 0),
    ]
    assert found[0].groups["saved"] == {n: digest(p) for n, p in model.state_dict().items()}
    assert before == (torch.save, torch.serialization.save, save_file)
    third = compare(one, save("run3", model, {"ema": average + 1}))
    assert (third.first.where, third.first.name) == ("saved run#-#.pt (file 2 of this name)", "ema")
    assert [own.count for own in third.divergences] == [1]


def test_the_name_of_a_file_that_is_renamed_does_not_count(tmp_path, monkeypatch):
    """Programs that save atomically draw the name to which they write first."""
    ledgers = []
    for number, scale in enumerate((1, 1, 2)):
        monkeypatch.setenv(LEDGER_VARIABLE, str(tmp_path / str(number)))
        with saves_digested():
            for step in range(2):
                file, name = tempfile.mkstemp(dir=tmp_path, prefix="ck.", suffix=".tmp")
                os.close(file)
                torch.save({"w": torch.ones(2) * (1 + step * scale)}, name)
                Path(name).replace(tmp_path / "ck.pt")
        ledgers.append(tmp_path / str(number) / "saved-000")
    assert compare(*ledgers[:2]).equal
    assert compare(ledgers[0], ledgers[2]).first.where == "saved ck.#.tmp (file 2 of this name)"


def test_a_forked_process_of_multiprocessing_has_its_own_ledger(tmp_path, monkeypatch):
    monkeypatch.setenv(LEDGER_VARIABLE, str(tmp_path / "runs"))
    with saves_digested():
        arguments = {"w": torch.ones(2)}, tmp_path / "child.pt"
        child = get_context("fork").Process(target=torch.save, args=arguments)
        child.start()
        child.join()
    outcome = read_ledger(tmp_path / "runs" / "saved-000").outcome(0)
    assert (outcome.last.moment, outcome.end.status) == ("saved child.pt", "finished")


def test_arrays_of_objects_have_digests(save):
    """scvi-tools saves the names of genes so; an empty ledger made two equal runs differ."""
    names = [np.array(own, dtype=object) for own in (["a", "b"], ["a", "c"])]
    one, same, other = (save(f"run{n}", names[k]) for n, k in enumerate((0, 0, 1)))
    assert compare(one, same).equal
    assert compare(one, other).divergences[0].name == "value"


class Average:
    """As an exponential moving average that a program saves as an object."""

    def __init__(self, value):
        self.shadow = {"weight": torch.full((2,), value)}
        self.owner = self  # pickle allows it


class Wide(nn.Linear):
    def __init__(self, value):
        super().__init__(2, 1, bias=False)
        nn.init.zeros_(self.weight)
        self.plain = torch.full((1,), value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: {"ema": Average(x), "epoch": 3}, "ema.shadow.weight"),
        (lambda x: {"rows": np.array([Average(x)], dtype=object)}, "rows.0.shadow.weight"),
        (Wide, "plain"),
        (lambda x: {torch.full((1,), x): 1, "b": 2}, "#0"),
        (lambda x: [torch.full((1,), x).untyped_storage()], "0"),
        (lambda x: [partial(print, torch.full((1,), x))], "0.state.1.0"),
        (lambda x: {"days": {date.fromordinal(int(x))}}, "days"),
        (lambda x: torch.quantize_per_tensor(torch.ones(2), x, 0, torch.qint8), "value"),
    ],
)
def test_all_tensors_that_reach_the_file_count(save, make, name):
    found = [save(f"run{number}", make(value)) for number, value in enumerate((1.0, 1.0, 2.0))]
    assert compare(*found[:2]).equal
    assert compare(found[0], found[2]).divergences[0].name == name


class Cached:
    """Pickle stores less than it has, and more than its attributes."""

    __slots__ = ("cache", "items", "value")

    def __init__(self, value):
        self.cache, self.items, self.value = torch.rand(2), [torch.full((1,), value)], {}

    def __getstate__(self):
        return None, {"items": self.items, "value": self.value}


def test_what_pickle_leaves_out_does_not_count(save):
    found = [save(f"run{n}", {object: Cached(x)}) for n, x in enumerate((1.0, 1.0, 2.0))]
    assert compare(*found[:2]).equal
    assert compare(found[0], found[2]).divergences[0].name == "#0.state.1.items.0"


def test_a_large_list_a_shared_one_and_names_of_arguments(save, tmp_path):
    """What is shared is read once, as it is saved once."""
    shared = [torch.ones(1)]
    for _ in range(40):
        shared = [shared, shared]
    ledger = save("run1", [torch.tensor(n) for n in range(3000)], shared)
    first, second = [own for own in read_ledger(ledger).records(0) if "#-" in str(own)]
    assert [len(own.groups["saved"]) for own in (first, second)] == [3000, 1]
    with saves_digested():
        torch.save(obj={"a": torch.ones(1)}, f=tmp_path / "named.pt")
        with pytest.raises(TypeError, match="missing a required argument"):
            torch.save({})
    assert (tmp_path / "named.pt").exists()


def test_what_has_no_digest_is_named_and_an_empty_record_is_not_written(save):
    unread = {"dense": torch.ones(2, device="meta"), "ids": {torch.ones(1)}, "raw": bytes(2000)}
    values = {"w": torch.ones(1), **unread}, {"name": ["a"], "at": 1}
    records = [own for own in read_ledger(save("run1", *values)).records(0) if "#-" in str(own)]
    assert [sorted(own.groups) for own in records] == [["saved", "unread"]]
    assert list(records[0].groups["unread"]) == [*unread]


def read(path):
    return torch.load(path)["a"].item()


def test_a_segment_leaves_the_files_of_the_earlier_run_and_finds_its_own(tmp_path, monkeypatch):
    """The checkpoints that a loop saves itself have the names of those of that run."""
    monkeypatch.setenv("LIGHTNING_D9M_INTERRUPT", "stop:6")
    monkeypatch.setenv("LIGHTNING_D9M_CHECKPOINT_DIR", str(tmp_path / "segment"))
    monkeypatch.chdir(tmp_path)
    target, best = Path("model.pt"), Path("best.pt")
    target.write_bytes(b"of the run")
    best.write_bytes(b"of the run")
    before = builtins.open, os.replace, shutil.copyfile
    with saves_digested():
        for number in range(2):  # as programs save atomically
            torch.save({"a": torch.full((1,), number)}, "model.pt.tmp")
            assert Path("model.pt.tmp").exists()
            os.replace("model.pt.tmp", target)  # noqa: PTH105 - not yet replaced in Python 3.10
            assert (os.path.exists("model.pt.tmp"), read(target)) == (False, number)  # noqa: PTH110
        shutil.copyfile(target, best)
        Path("folder").mkdir()
        shutil.copy(best, "folder")
        torch.save({"a": torch.full((1,), 2)}, target)
        assert [*map(read, (target, best, tmp_path / "folder/best.pt"))] == [2, 1, 1]
        os.remove(target)  # noqa: PTH107 - as above
        sys.modules["safetensors.torch"].save_file({"x": torch.ones(2)}, "x.safetensors")
        assert sys.modules["safetensors.torch"].load_file("x.safetensors")["x"].sum() == 2
        torch.save({"a": torch.ones(1)}, buffer := io.BytesIO())
        Path("log.txt").write_text("as any other file")
    assert before == (builtins.open, os.replace, shutil.copyfile)
    assert target.read_bytes() == best.read_bytes() == b"of the run"
    names = sorted(str(path) for path in Path().rglob("*") if "segment" not in path.parts)
    assert names == ["best.pt", "folder", "log.txt", "model.pt"]
    assert torch.equal(torch.load(io.BytesIO(buffer.getvalue()))["a"], torch.ones(1))
