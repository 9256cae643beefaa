"""``d9m verify`` checks a checkpoint offline and finds it in a ledger."""

import json
import pickle
import shutil
import sys

import pytest
import torch
from resuming import Fits

from lightning_d9m.engine.hashing.checkpoint_manifest import make_manifest
from lightning_d9m.integrations.lightning.saved_state import MANIFEST_KEY
from lightning_d9m.integrations.trainer.trainer_attributes import KEY

pytestmark = pytest.mark.usefixtures("unseeded", "new_process")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the checkpoints and ledgers of a run, by place."""
    from lightning_d9m.engine.control import session

    found = {}
    for name, at in {"epoch": {"hook": "on_train_epoch_end"}, "batch": {"batch": 3}}.items():
        fits = Fits(tmp_path_factory.mktemp(name), session.restart_fits)
        found[name] = (fits.interrupt(at=at), fits.checkpoint)
    return found


@pytest.fixture
def verify(d9m):
    """Return a function that runs the command and returns its status and its output."""

    def run(*words):
        status, *printed = d9m("verify", *words)
        return status, "".join(printed)

    return run


@pytest.mark.parametrize("named", [True, False])
def test_an_epochs_checkpoint_is_found(saved, verify, named):
    ledger, checkpoint = saved["epoch"]
    status, text = verify(checkpoint, *([ledger] if named else []))
    assert status == 0
    assert "whole: " in text
    assert "saved before epoch 2 at step 12, seed 3" in text
    assert text.startswith(f"found: the weights of {checkpoint} are those of epoch 1 (step 12)\n")
    assert f"ledger: {ledger}\n" in text


def test_a_checkpoint_between_records_is_told_by_its_ledger(saved, verify, tmp_path):
    ledger, checkpoint = saved["batch"]
    status, text = verify(checkpoint)
    assert status == 0
    assert "saved within epoch 1 after 3 of its batches, at step 9" in text
    at = "the state at the exception (epoch 1, step 9)"
    assert text.startswith(f"found: the weights of {checkpoint} are those of {at}\n")
    assert f"ledger: {ledger}\n" in text
    killed = shutil.copytree(ledger, tmp_path / "fit-000")  # it has no record of an exception
    (lines := killed / "rank-0.jsonl").write_bytes(
        lines.read_bytes().partition(b'{"kind":"digests","moment":"exception"')[0]
    )
    status, text = verify(checkpoint, killed)
    assert status == 0
    assert text.startswith(
        f"between records: none of the 2 records of weights was taken where {checkpoint} was saved"
    )
    for one, other in (("batch", "epoch"), ("epoch", "batch")):
        status, text = verify(saved[one][1], saved[other][0])
        assert status == 1
        assert text.startswith("not found: none of the ")


def test_a_flipped_bit_is_found_and_named(saved, verify, tmp_path):
    data = bytearray(saved["epoch"][1].read_bytes())
    weights = torch.load(saved["epoch"][1], weights_only=True)["state_dict"]
    data[data.index(weights["layers.4.bias"].numpy().tobytes())] ^= 1
    damaged = tmp_path / "damaged.ckpt"
    damaged.write_bytes(data)
    status, text = verify(damaged)
    assert status == 1
    assert text.startswith("damaged: ")
    assert "state_dict.layers.4.bias" in text
    damaged.write_bytes(data[:1000])
    status, text = verify(damaged, "--json")
    assert (status, json.loads(text)["verdict"]) == (1, "damaged")


def test_without_a_seal_the_ledger_decides(saved, verify, tmp_path):
    ledger, checkpoint = saved["epoch"]
    content = torch.load(checkpoint, weights_only=True)
    del content["callbacks"][KEY]
    bare = tmp_path / "bare.ckpt"
    torch.save(content, bare)
    assert verify(bare, ledger)[0] == 0
    status, text = verify(bare)
    assert (status, "nothing to check it by" in text) == (2, True)


ALL = "layers.0.weight, layers.0.bias, layers.1.weight and 3 more, but "


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        (lambda name: f"module.{name}", f"{ALL}module.layers.0.weight"),
        (lambda name: name.removeprefix("layers."), f"{ALL}0.weight"),
        (lambda name: name.replace("4.bias", "4.offset"), "layers.4.bias"),
    ],
)
def test_a_tensor_that_a_file_lacks_does_not_differ(saved, verify, tmp_path, rename, said):
    ledger, checkpoint = saved["epoch"]
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    torch.save({rename(name): own for name, own in weights.items()}, tmp_path / "weights.pt")
    status, text = verify(tmp_path / "weights.pt", ledger)
    assert status == 1
    assert text.splitlines()[0].endswith(f"/weights.pt; it has no tensor named {said}")


@pytest.mark.parametrize("key", ["model", "ema", None])
def test_the_table_of_a_file_with_the_recorded_names_is_searched(saved, verify, tmp_path, key):
    """With two of them, nothing tells which one counts; a Trainer loads one of its own."""
    ledger, checkpoint = saved["epoch"]
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    other = {name: own + 1 for name, own in weights.items()}
    tables = {"model": weights, "ema": other, "state_dict": {"encoder.weight": torch.ones(1)}}
    if key is None:
        torch.save(tables, tmp_path / "both.pt")
        status, text = verify(tmp_path / "both.pt", ledger)
        assert (status, "in 'model' and 'ema', and" in text) == (2, True)
        tables = {"ema": other, "state_dict": weights, "pytorch-lightning_version": "2.6.0"}
    else:
        tables[key] = {name: own for name, own in weights.items() if key == "model"}
        tables = {name: own for name, own in tables.items() if name in (key, "state_dict")}
    torch.save(tables, tmp_path / "one.pt")
    assert verify(tmp_path / "one.pt", ledger)[0] == (key == "ema")


def test_a_file_whose_header_has_the_length_of_a_brace_is_not_a_verdict(saved, verify, tmp_path):
    """A file of safetensors begins with the length of its header."""
    header = json.dumps({"layers.0.bias": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    content = header.ljust(ord("{")).encode()
    (tmp_path / "w.safetensors").write_bytes(
        len(content).to_bytes(8, "little") + content + bytes(4)
    )
    status, text = verify(tmp_path / "w.safetensors", saved["epoch"][0])
    assert status == 1
    assert "it has no tensor named layers.0.weight" in text


def test_a_tensor_that_a_record_lacks_is_not_of_its_weights(saved, verify, tmp_path):
    """Unless it is a weight by a second name."""
    ledger, checkpoint = saved["epoch"]
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    torch.save(weights | {"head.weight": weights["layers.0.weight"]}, tmp_path / "shared.pt")
    assert verify(tmp_path / "shared.pt", ledger)[0] == 0
    torch.save(weights | {"trigger": torch.zeros(2)}, tmp_path / "more.pt")
    status, text = verify(tmp_path / "more.pt", ledger)
    assert status == 1
    assert text.startswith("not found: ")
    assert "differ trigger" in text


def test_json_holds_the_facts(saved, verify):
    ledger, checkpoint = saved["epoch"]
    found = json.loads(verify("--json", checkpoint)[1])
    assert (found["ok"], found["verdict"], found["checkpoint"]) == (True, "found", str(checkpoint))
    assert (found["seed"], found["epoch"], found["step"]) == (3, 2, 12)
    assert (found["ledger"], found["records"]) == (str(ledger), ["epoch 1 (step 12)"])
    assert found["tensors"] > 0


def test_a_file_that_is_not_a_checkpoint(verify, tmp_path):
    other = tmp_path / "numbers.pt"
    torch.save(torch.ones(3), other)
    assert verify(other)[0] == 1
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "old.ckpt").write_bytes(pickle.dumps({"state_dict": {}}))
    for name, said in (
        ("none.ckpt", "No such file: "),
        (".", "is a folder. Give the path of a checkpoint in it"),
        ("train.py", "and this file has another format"),
        ("old.ckpt", "and this file has another format"),
    ):
        status, text = verify(tmp_path / name)
        assert (status, said in text) == (2, True)


class Setting:
    """An object in a checkpoint."""


def test_objects_are_loaded_on_request_only(saved, verify, tmp_path):
    ledger, checkpoint = saved["epoch"]
    content = torch.load(checkpoint, weights_only=True)
    content["hyper_parameters"] = {"setting": Setting()}
    own = content["callbacks"][KEY]
    del own[MANIFEST_KEY]
    own[MANIFEST_KEY] = make_manifest(content)
    path = tmp_path / "objects.ckpt"
    torch.save(content, path)
    status, text = verify(path, ledger)
    assert status == 2
    assert "is not damaged, but holds Python objects (" in text
    assert f"{Setting.__module__}.Setting)" in text
    assert "add --allow-objects" in text
    assert "fit(..., weights_only=False)" in text
    status, text = verify("--allow-objects", path, ledger)
    assert status == 0, text
    assert "whole: " in text


def test_objects_that_cannot_be_imported(saved, verify, tmp_path, monkeypatch):
    path = tmp_path / "objects.ckpt"
    torch.save({"state_dict": {}, "setting": Setting()}, path)
    monkeypatch.delattr(sys.modules[Setting.__module__], "Setting")
    status, text = verify("--allow-objects", path)
    assert status == 2
    assert "cannot be loaded" in text
    assert "can import them" in text
