"""A manifest tells every change of a checkpoint's content, and names the tensor."""

import io

import pytest
import torch

from lightning_d9m.hashing.checkpoint_digests import check_manifest, make_manifest


def content():
    return {
        "state_dict": {"a": torch.arange(4.0), "b": torch.arange(4.0) + 1, "none": None},
        "states": [{"lr": 0.1, "text": "x", "step": torch.tensor(3)}, (1, True)],
        "other": object(),
    }


@pytest.fixture
def manifest():
    """Return a manifest as a checkpoint gives it back."""
    buffer = io.BytesIO()
    torch.save(make_manifest(content()), buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def test_equal_content_fits(manifest):
    assert not check_manifest(content(), manifest)
    assert manifest["tensors"].shape == (3, 16)


def test_a_changed_tensor_is_named(manifest):
    changed = content()
    changed["state_dict"]["a"].view(torch.int32)[2] ^= 1
    assert check_manifest(changed, manifest).changed == ("state_dict.a",)


@pytest.mark.parametrize(
    "change", [lambda t: t.double(), lambda t: t.reshape(2, 2)], ids=["dtype", "shape"]
)
def test_another_dtype_or_shape_is_a_change(manifest, change):
    changed = content()
    changed["state_dict"]["b"] = change(changed["state_dict"]["b"])
    assert check_manifest(changed, manifest).changed == ("state_dict.b",)


def test_swapped_tensors_are_named(manifest):
    changed = content()
    weights = changed["state_dict"]
    weights["a"], weights["b"] = weights["b"], weights["a"]
    assert check_manifest(changed, manifest).changed == ("state_dict.a", "state_dict.b")


def test_missing_and_added_tensors_are_told(manifest):
    changed = content()
    changed["state_dict"]["c"] = changed["state_dict"].pop("a")
    damage = check_manifest(changed, manifest)
    assert (damage.added, damage.missing, damage.changed) == (("state_dict.c",), 1, ())


@pytest.mark.parametrize("value", [0.2, "0.1", None, -0.1])
def test_another_number_is_told(manifest, value):
    changed = content()
    changed["states"][0]["lr"] = value
    assert check_manifest(changed, manifest).values
