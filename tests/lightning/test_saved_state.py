"""The state in a checkpoint comes back as it was, or an error says what is wrong with it."""

import io

import pytest
import torch
from msgspec.structs import replace

from lightning_d9m.errors import CheckpointError
from lightning_d9m.hashing.checkpoint_manifest import make_manifest
from lightning_d9m.lightning.saved_state import (
    EMPTY_RANK,
    FORMAT,
    KEY,
    MANIFEST_KEY,
    LoopPosition,
    SavedState,
    check_checkpoint,
    find_manifest,
)

RANK = replace(
    EMPTY_RANK,
    rng={"torch": torch.arange(4, dtype=torch.uint8)},
    results=[{"key": "training_step.loss", "value": torch.tensor(1.5)}],
    ledger={"folder": "fit-000", "check": "0" * 16},
    pending={"loss": "0x1.8p+0", "evaluations": [{"kind": "evaluation"}]},
)
STATE = SavedState(
    seed=3,
    fit=1,
    settings={"seed": 3},
    world_size=2,
    position=LoopPosition(epoch=1, step=9, batch=3, phase="batch"),
    ranks=[RANK, EMPTY_RANK],
)


def save_and_load(checkpoint):
    stream = io.BytesIO()
    torch.save(checkpoint, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def test_comes_back_as_it_was():
    checkpoint = save_and_load({"callbacks": {KEY: STATE.as_plain()}})
    found = SavedState.from_checkpoint(checkpoint)
    assert repr(found) == repr(STATE)
    assert checkpoint["callbacks"][KEY].keys() == {*SavedState.__struct_fields__}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "has no lightning_d9m state"),
        ({}, f"has format None; this version reads {FORMAT}. Resume with the version of"),
        ({"format": 3, "place": {}}, f"has format 3; this version reads {FORMAT}."),
    ],
)
def test_a_state_of_another_version_is_refused(state, message):
    assert message in SavedState.from_checkpoint({"callbacks": {KEY: state}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("fit"), "missing required field `fit`"),
        (lambda state: state.update(more=1), "contains unknown field `more`"),
        (lambda state: state["ranks"][1].pop("rng"), r"missing .* `rng` - at `\$.ranks\[1\]`"),
        (lambda state: state["ranks"][0]["ledger"].update(check=1), "Expected `str`, got `int`"),
    ],
)
def test_a_damaged_state_is_an_error(change, message):
    state = STATE.as_plain()
    change(state)
    with pytest.raises(CheckpointError, match=f"state of the checkpoint is damaged: .*{message}"):
        SavedState.from_checkpoint({"callbacks": {KEY: state}})


def test_the_manifest_tells_damage():
    weights, state = torch.ones(3), STATE.as_plain()
    checkpoint = {"state_dict": {"weight": weights}, "callbacks": {"other": {"a": 1}, KEY: state}}
    manifest = state[MANIFEST_KEY] = make_manifest(checkpoint)
    assert find_manifest(checkpoint) is manifest
    assert check_checkpoint(checkpoint, "some.ckpt")
    weights.view(torch.uint8)[0] ^= 1
    with pytest.raises(CheckpointError, match=r"1 tensor differs .*: state_dict\.weight"):
        check_checkpoint(checkpoint, "some.ckpt")
