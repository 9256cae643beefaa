"""``d9m audit inference``: modules that vary or depend on their batch, and modes that do not."""

import json
import sys

import pytest
import torch

from lightning_d9m.audit.inference.trace import split_samples
from lightning_d9m.cli.main import main

# Each model breaks by construction, so that no kernel of this machine decides the test.
MODELS = """
import torch
from torch import nn

SAMPLES = torch.linspace(-1, 1, 18).view(6, 3)

class Elementwise(nn.Module):
    def forward(self, x):
        return x * 2

class Crowded(nn.Module):
    "Other samples in the batch change the output."
    def forward(self, x):
        return torch.sub(x, 2.0**-20 * (len(x) > 1))

class Placed(nn.Module):
    "The position in the batch changes the output."
    def forward(self, x):
        return x + 2.0**-20 * torch.arange(len(x))[:, None]

class Counting(nn.Module):
    "Each call gives something else."
    calls = 0
    def forward(self, x):
        self.calls += 1
        return x + self.calls

class Folding(nn.Module):
    "Folds three heads into the batch and back."
    def __init__(self):
        super().__init__()
        self.inner = Elementwise()
    def forward(self, x):
        return self.inner(x.reshape(-1, 1)).view(x.shape)

class Mixing(nn.Module):
    "The samples are mixed: no output belongs to one sample."
    def forward(self, x):
        return x @ x.t()

class Masked(nn.Module):
    def forward(self, x, mask):
        return x * mask

class Own(nn.Module):
    "Computes something itself, between its parts."
    def __init__(self):
        super().__init__()
        self.before, self.after = Elementwise(), Elementwise()
    def forward(self, x):
        return self.after(self.before(x) + 2.0**-20 * (len(x) > 1))

def steady():
    return nn.Sequential(Elementwise(), Folding()), SAMPLES
def crowded():
    return nn.Sequential(Elementwise(), Crowded(), Elementwise(), Placed()), SAMPLES
def placed():
    return nn.Sequential(Placed()), SAMPLES
def counting():
    return nn.Sequential(Elementwise(), Counting(), Elementwise()), SAMPLES
def mixing():
    return Mixing(), SAMPLES
def own():
    return Own(), SAMPLES
def named():
    return Masked(), [{"x": row, "mask": torch.ones(3)} for row in SAMPLES]
def paired():
    return Masked(), [(row, torch.ones(3)) for row in SAMPLES]
def real():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), SAMPLES
def predicting():
    import lightning
    class Module(lightning.LightningModule):
        def predict_step(self, batch, batch_idx):
            images, labels = batch
            return images * 2
    return Module(), [(row, 1) for row in SAMPLES]
def wrong():
    return SAMPLES
def lonely():
    return Elementwise(), SAMPLES[:1]
def ragged():
    return Elementwise(), [torch.ones(2), torch.ones(3)]
module = Elementwise()
def failing():
    raise ValueError("no data here")
def unfit():
    return Masked(), SAMPLES
"""


@pytest.fixture
def audit(tmp_path, monkeypatch, capsys):
    """Return a function that audits a model of the list above: status, result or output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "models.py").write_text(MODELS)

    def run(name, *words, parse=True):
        status = main(["audit", "inference", f"models.py:{name}", *words, *["--json"] * parse])
        captured = capsys.readouterr()
        sys.modules.pop("models", None)
        return status, json.loads(captured.out) if parse and captured.out else captured

    return run


def modules(result, field):
    return {entry["name"]: entry[field] for entry in result["modules"]}


def outputs(result):
    return {mode["mode"]: mode["outputs"] for mode in result["modes"]}


def test_a_steady_model(audit):
    status, result = audit("steady")
    assert status == 0
    assert result["first"] is None
    assert set(modules(result, "repeatability").values()) == {"repeatable"}
    assert set(modules(result, "invariance").values()) == {"invariant"}
    assert outputs(result) == {"as it is": 1, "fixed shape": 1, "per sample": 1}


def test_what_depends_on_its_batch_is_named_with_its_op(audit):
    status, result = audit("crowded", "--batch-sizes", "2", "6")
    assert status == 1
    assert result["first"] == {"module": "1", "op": "aten.sub.Tensor", "size": 2, "sample": 0}
    assert modules(result, "invariance") == {
        "": "contains one that is not",
        "0": "invariant",
        "1": "not invariant",
        "2": "invariant",  # its inputs differ; with those of batches of one, its outputs do not
        "3": "not invariant",
    }
    assert result["modes"][0]["differing"] == {"1": 0, "2": 6, "6": 6}


def test_a_module_that_computes_itself_is_named(audit):
    _, result = audit("own")
    assert (result["first"]["module"], result["first"]["op"]) == ("", "aten.add.Tensor")
    assert modules(result, "invariance")["after"] == "invariant"


def test_the_mode_that_mends_it_is_offered(audit):
    _, captured = audit("own", "--batch-sizes", "2", "6", parse=False)
    assert "first in the model itself, in aten.add.Tensor" in captured.out
    assert "FixedShape(module, 6)" in captured.out or "PerSample(module)" in captured.out
    _, result = audit("own")
    assert outputs(result) == {"as it is": 2, "fixed shape": 1, "per sample": 1}


def test_a_fixed_shape_does_not_mend_what_depends_on_the_place(audit):
    _, result = audit("placed")
    found = outputs(result)
    assert found["fixed shape"] > 1
    assert found["per sample"] == 1


def test_what_is_not_repeatable_is_named(audit):
    status, result = audit("counting", "--runs", "4")
    assert status == 1
    assert result["outputs"] == 4
    assert modules(result, "repeatability") == {
        "": "inherits",
        "0": "repeatable",
        "1": "varies",
        "2": "inherits",
    }


def test_outputs_that_belong_to_no_sample_are_said_to_be_unknown(audit):
    status, captured = audit("mixing", parse=False)
    assert status == 1
    assert "cannot be assigned to samples" in captured.out


@pytest.mark.parametrize("name", ["named", "paired", "predicting"])
def test_samples_are_passed_on_as_they_are(audit, name):
    """A mapping by name, a tuple in order, and a LightningModule's own ``predict_step`` whole."""
    status, result = audit(name)
    assert status == 0
    assert outputs(result)["as it is"] == 1


def test_a_real_model_within_a_session(audit, tmp_path):
    status, result = audit("real", "--deterministic", "--threads", "1", "-o", "page.md")
    assert status in (0, 1)  # by this machine's kernels
    assert result["repeatable"]
    assert result["threads"] == 1
    assert result["modes"][2]["outputs"] == 1
    assert "| per sample | 1 |" in (tmp_path / "page.md").read_text()


def test_an_importable_module_serves_as_a_target(audit, capsys):
    assert main(["audit", "inference", "models:steady"]) == 0
    assert "batch-invariant: each sample gave one output" in capsys.readouterr().out
    sys.modules.pop("models", None)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("models.py", "allowed: module:function or path/to/script.py:function"),
        ("models.py:nothing", "models.py has no function 'nothing'"),
        ("nowhere.py:make", "The script nowhere.py does not exist"),
        ("no_such_module:make", "no_such_module cannot be imported"),
        ("models.py:wrong", "returned a Tensor; allowed: a pair (module, samples)"),
        ("models.py:lonely", "returned 1 samples; at least 2 are needed"),
        ("models.py:ragged", "do not fit into one batch"),
        ("models.py:module", "models.py:module is the module Elementwise, not a function"),
        ("models.py:failing", "models.py:failing raised ValueError: no data here. Correct it"),
        ("models.py:unfit", "a batch of the first sample, raised TypeError: Masked.forward()"),
        ("broken.py:make", "The script broken.py raised NameError: name 'nothing'"),
    ],
)
def test_targets_that_are_none(audit, tmp_path, capsys, target, message):
    (tmp_path / "broken.py").write_text("nothing")
    assert main(["audit", "inference", target]) == 2
    assert message in capsys.readouterr().err
    sys.modules.pop("models", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-sizes", "1"], "include at least one size above 1"),
        (["--device", "nowhere"], "--device is 'nowhere'"),
    ],
)
def test_values_that_are_not_allowed(audit, words, message):
    status, captured = audit("steady", *words, parse=False)
    assert status == 2
    assert message in captured.err


def test_samples_are_found_in_any_dimension_and_either_folding():
    one, other = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    rows = split_samples(torch.cat([one, other]), torch.Size([1, 2]), 2)[0]
    assert [row.tolist() for row in rows] == [one.tolist(), other.tolist()]
    columns = torch.cat([one.t(), other.t()], 1)
    assert torch.equal(split_samples(columns, torch.Size([2, 1]), 2)[0][1], other.t())
    steps = torch.tensor([1.0, 3.0, 2.0, 4.0])  # two steps of two samples, steps first
    folded = split_samples(steps, torch.Size([2]), 2)
    assert [part.tolist() for part in folded[1]] == [[1, 2], [3, 4]]
    shared = torch.ones(3)
    assert split_samples(shared, torch.Size([3]), 2) == [[shared, shared]]
    assert split_samples(torch.ones(2, 2), torch.Size([1, 1]), 2) is None
    assert split_samples(torch.ones(3), torch.Size([1]), 2) is None
