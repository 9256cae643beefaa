"""A manifest tells every change of a checkpoint's content, and names the tensor."""

import io
from collections import deque

import pytest
import torch
from torch import nn

from lightning_d9m.engine.hashing.checkpoint_manifest import check_manifest, make_manifest
from lightning_d9m.errors import CheckpointError


def content():
    return {
        "state_dict": {"a": torch.arange(4.0), "b": torch.arange(4.0) + 1, "none": None},
        "states": [{"lr": 0.1, "text": "x", "step": torch.tensor(3)}, (1, True)],
        "norms": deque([torch.ones(2)]),
        "other": object(),
    }


@pytest.fixture
def manifest():
    """Return a manifest as a checkpoint gives it back."""
    buffer = io.BytesIO()
    torch.save(make_manifest(content()), buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


A, B = "state_dict.a", "state_dict.b"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda w, _: w["a"].view(torch.int32)[2].bitwise_xor_(1),
            (["1 tensor differs from what was saved: state_dict.a"], [A]),
        ),
        (
            lambda w, _: w.update(b=w["b"].double()),
            (["1 tensor differs from what was saved: state_dict.b"], [B]),
        ),
        (
            lambda w, _: w.update(a=w["b"], b=w["a"]),
            (["2 tensors differ from what was saved: state_dict.a, state_dict.b"], [A, B]),
        ),
        (
            lambda w, _: w.update(c=w.pop("a")),
            (
                [
                    "1 of the saved tensors are missing",
                    "it holds tensors that were not saved: state_dict.c",
                ],
                [],
            ),
        ),
        (
            lambda _, states: states[0].update(lr=0.2),
            (["numbers or strings in it differ from those that were saved"], []),
        ),
    ],
)
def test_each_change_is_named(manifest, change, expected):
    changed = content()
    change(changed["state_dict"], changed["states"])
    assert check_manifest(changed, manifest) == expected


@pytest.mark.parametrize("number", range(5))
def test_leaves_with_the_same_dotted_path_are_told_apart(number):
    """A change of each one is found, and that of two which change places."""
    makers = [
        lambda x: {"a.b": x[0], "a": {"b": x[1], "c.0": x[2], "c": [x[3], {"0": x[4]}, {0: x[4]}]}},
        lambda x: {"a": {"b": x[0]}, "a.b": x[1], "a.c": {"0": x[2]}, "a.c.0": [x[3]], "z": x[4]},
    ]
    for make, of in zip(makers, (torch.tensor, float), strict=True):
        values = [of(float(at)) for at in range(5)]
        manifest = make_manifest(make(values))
        assert not check_manifest(make(values), manifest)[0]
        changed = [*values]
        changed[number] = of(9.0)
        assert check_manifest(make(changed), manifest)[0]
        swapped = [*values]
        swapped[number], swapped[number - 1] = swapped[number - 1], swapped[number]
        assert check_manifest(make(swapped), manifest)[0]


@pytest.mark.parametrize("kind", [dict, list])
def test_a_container_that_holds_itself_is_a_leaf_where_it_occurs_again(kind):
    value = {"tensor": torch.ones(1), "inner": {} if kind is dict else [0]}
    value["inner"][0] = value
    manifest = make_manifest(value)
    assert len(manifest["tensors"]) == 1
    assert not check_manifest(value, manifest)[0]
    value["tensor"] += 1
    assert check_manifest(value, manifest)[1] == ["tensor"]


def test_a_key_counts_without_its_address():
    def make(number=1.0):
        keys = (lambda: 0), (make, object(), 2), object(), object(), ("x", 1)
        return {"table": {key: torch.tensor([number + n]) for n, key in enumerate(keys)}}

    manifest = make_manifest(make())
    assert not check_manifest(make(), manifest)[0]
    assert len(check_manifest(make(2.0), manifest)[1]) == 5


def test_a_parameter_without_a_shape_counts_by_its_type():
    """As a checkpoint has it that is saved before the first batch."""
    state = {"weight": torch.ones(1), "late": nn.LazyLinear(3).weight}
    manifest = make_manifest(state)
    assert not check_manifest(state, manifest)[0]
    assert check_manifest({**state, "late": None}, manifest)[0]


def test_a_manifest_of_another_version_is_refused():
    manifest = make_manifest(content())
    for version in (2, "3"):
        with pytest.raises(CheckpointError, match="checkpoint's manifest has version"):
            check_manifest(content(), manifest | {"version": version})


def test_a_tensor_in_any_container_is_named(manifest):
    changed = content()
    changed["norms"][0] += 1
    damaged = ["1 tensor differs from what was saved: norms.0"]
    assert check_manifest(changed, manifest) == (damaged, ["norms.0"])
