"""Dumps: what is saved comes back with its strides, without code, and operations run again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.errors import LedgerError
from lightning_d9m.hashing.digest import digest
from lightning_d9m.probes.dumps import (
    Dump,
    StateDump,
    find_dumps,
    find_states,
    keep,
    read_dump,
    read_index,
    replay_op,
    revive,
)
from lightning_d9m.probes.trace import ProbePoint, StatePoint

MOMENT = ProbePoint(0, 3, 5)


def save(folder, place, content):
    Dump(folder, 0).save(MOMENT, place, content)
    (file,) = find_dumps(folder, step=3, place=place)
    return read_dump(file)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.data(),
)
def test_a_tensor_keeps_its_strides_whatever_they_are(shape, data):
    strides = [data.draw(st.integers(0, 4)) for _ in shape]
    base = torch.randn(64)
    tensor = base.as_strided(shape, strides, data.draw(st.integers(0, 3)))
    copy = revive(keep(tensor))
    assert copy.stride() == tensor.stride()
    assert digest(copy) == digest(tensor)
    assert copy.untyped_storage().nbytes() <= base.untyped_storage().nbytes()


class Image(torch.Tensor):
    """A subclass, as torchvision's and MONAI's; what is loaded need not know it."""


def test_a_tensor_of_a_subclass_is_saved_as_a_plain_one(tmp_path):
    image = torch.arange(6.0).view(2, 3).t().as_subclass(Image)
    torch.save(keep({"image": image}), tmp_path / "kept.pt")
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)["image"]
    assert type(kept) is torch.Tensor
    assert (kept.stride(), kept.tolist()) == (image.stride(), image.tolist())


def test_a_place_is_saved_and_found(tmp_path):
    x = torch.randn(2, 3).t()
    dumped = save(tmp_path, ("output", "layers.0", 0), {"value": x})
    assert torch.equal(dumped["value"], x)
    assert dumped["value"].stride() == x.stride()
    assert not list(find_dumps(tmp_path, step=4, place=("output", "layers.0", 0)))


def test_the_state_of_a_moment_is_beside_the_batch_of_the_same_step(tmp_path):
    dump = Dump(tmp_path, 1, ["w", "0.group.0:lr"])
    dump.save(ProbePoint(0, 3, 0), ("weight", "w", 0), {"value": torch.zeros(2)})
    state = StateDump(dump, StatePoint(0, 3, "initial"))
    state.add_tensors("weight", {"w": torch.ones(2), "v": torch.ones(2)})
    state.add("optimizer", "0.group.0:lr", 0.5)
    (folder,) = find_states(tmp_path, step=3, rank=1, moment="initial")
    values = [read_dump(folder / entry["file"])["value"] for entry in read_index(folder)]
    assert [entry["name"] for entry in read_index(folder)] == ["w", "0.group.0:lr"]
    assert (values[0].tolist(), values[1]) == ([1, 1], 0.5)
    assert find_states(tmp_path, step=3, rank=1, moment="epoch") == []
    (file,) = find_dumps(tmp_path, step=3, place=("weight", "w", 0))
    assert read_dump(file)["value"].tolist() == [0, 0]


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


def test_what_was_kept_as_text_is_not_replayed():
    with pytest.raises(LedgerError, match="only the text"):
        revive(keep([object()]))


def test_an_operation_runs_again_on_its_inputs(tmp_path):
    a, b = torch.randn(3, 4), torch.randn(5, 4).t()
    content = {"op": "aten.mm.default", "args": keep((a, b)), "kwargs": {}, "outputs": [a @ b]}
    dumped = save(tmp_path, ("op", "(model)::aten.mm.default", 0), content)
    assert torch.equal(replay_op(dumped), a @ b)


def test_a_random_operation_draws_the_same_and_gives_the_generator_back():
    state = torch.get_rng_state()
    drawn = torch.rand(4)
    dumped = {
        "op": "aten.rand.default",
        "args": [[4]],
        "kwargs": {},
        "rng": state,
        "rng_device": "cpu",
    }
    now = torch.get_rng_state()
    assert torch.equal(replay_op(dumped), drawn)
    assert torch.equal(torch.get_rng_state(), now)


def test_an_operation_without_outputs_gives_what_it_wrote():
    dumped = {
        "op": "aten._foreach_add_.Scalar",
        "args": keep([[torch.zeros(2)], 1.0]),
        "kwargs": {},
    }
    assert replay_op(dumped)[0][0].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["aten.nothing.default", "os.system", "aten", "", "aten.mm.x"])
def test_a_name_that_is_no_operation_is_refused(name):
    with pytest.raises(LedgerError, match="does not have"):
        replay_op({"op": name, "args": [], "kwargs": {}})


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be written"):
        save(tmp_path / "file", ("output", "a", 0), {"value": 1})
