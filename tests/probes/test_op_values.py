"""Copies of values come back with their strides, without code, and operations run again."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.engine.hashing.digest import digest
from lightning_d9m.engine.probes.op_values import access_rng, keep, replay_op, revive
from lightning_d9m.errors import LedgerError


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.data())
def test_a_tensor_keeps_its_strides_whatever_they_are(shape, data):
    strides = [data.draw(st.integers(0, 4)) for _ in shape]
    base = torch.randn(64)
    tensor = base.as_strided(shape, strides, data.draw(st.integers(0, 3)))
    copy = revive(keep(tensor))
    assert copy.stride() == tensor.stride()
    assert digest(copy) == digest(tensor)
    assert copy.untyped_storage().nbytes() <= base.untyped_storage().nbytes()


def test_every_kind_of_argument_comes_back():
    generator = torch.Generator().manual_seed(7)
    value = [
        1, 2.5, None, True, "text", torch.float16, torch.device("cpu"), torch.strided,
        torch.channels_last, [torch.ones(1)], {"a": 1}, torch.Size([2]), 1j,
    ]  # fmt: skip
    back = revive(keep(value))
    assert back[:9] == value[:9]
    assert back[10:] == [{"a": 1}, [2], 1j]
    again = revive(keep(generator))
    assert torch.equal(torch.rand(3, generator=again), torch.rand(3, generator=generator))
    with pytest.raises(LedgerError, match="Only the text"):
        revive(keep([object()]))


def test_an_operation_runs_again_and_leaves_the_generator_as_it_was():
    a, b = torch.randn(3, 4), torch.randn(5, 4).t()
    state = torch.get_rng_state()
    drawn = torch.rand(4)
    now = torch.get_rng_state()
    product = {"op": "aten.mm.default", "args": keep((a, b)), "kwargs": {}}
    assert torch.equal(replay_op(product), a @ b)
    rng = {"rng": state, "rng_device": "cpu"}
    assert torch.equal(replay_op({"op": "aten.rand", "args": [[4]], "kwargs": {}, **rng}), drawn)
    assert torch.equal(torch.get_rng_state(), now)
    # One without outputs gives what it wrote.
    args = keep([[torch.zeros(2)], 1.0])
    written = replay_op({"op": "aten._foreach_add_.Scalar", "args": args, "kwargs": {}})
    assert written[0][0].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["aten.nothing.default", "os.system", "aten", "", "aten.mm.x"])
def test_a_name_that_is_no_operation_is_refused(name):
    with pytest.raises(LedgerError, match="is not one that this torch has"):
        replay_op({"op": name, "args": [], "kwargs": {}})


def test_the_generator_is_that_of_the_device_and_not_of_the_current_one(monkeypatch):
    states = {torch.device("cuda", 0): "a", torch.device("cuda", 1): "b"}
    module = SimpleNamespace(
        get_rng_state=lambda device: states[device],
        set_rng_state=lambda state, device: states.update({device: state}),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    read, write = access_rng(torch.device("cuda", 1))
    assert read() == "b"
    write("c")
    assert list(states.values()) == ["a", "c"]
