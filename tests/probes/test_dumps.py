"""Dumps: what is saved comes back with its strides, without code, and operations run again."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.engine.hashing.digest import digest
from lightning_d9m.engine.probes.dumps import (
    Dump,
    access_rng,
    find_dumps,
    find_states,
    find_writer,
    keep,
    read_dump,
    read_index,
    replay_op,
    revive,
    trace_hooks,
)
from lightning_d9m.engine.probes.training import ProbePoint, StatePoint
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


class Image(torch.Tensor):
    """A subclass, as torchvision's and MONAI's; what is loaded need not know it."""


def test_places_of_batches_and_the_state_of_a_moment_are_saved_and_found(tmp_path):
    """A tensor of a subclass is saved as a plain one."""
    dump = Dump(tmp_path, 1, ["w", "0.group.0:lr"])
    weight = torch.arange(6.0).view(2, 3).t().as_subclass(Image)
    dump.save(ProbePoint(0, 3, 0), ("weight", "w", 0), {"value": weight})
    state = StatePoint(0, 3, "initial")
    for name, value in (("w", torch.ones(2)), ("v", torch.ones(2)), ("0.group.0:lr", 0.5)):
        dump.save(state, ("weight", name, 0), {"value": value})
    (folder,) = find_states(tmp_path, step=3, rank=1, moment="initial")
    values = [read_dump(folder / entry["file"])["value"] for entry in read_index(folder)]
    assert [entry["name"] for entry in read_index(folder)] == ["w", "0.group.0:lr"]
    assert (values[0].tolist(), values[1]) == ([1, 1], 0.5)
    assert find_states(tmp_path, step=3, rank=1, moment="epoch") == []
    (file,) = find_dumps(tmp_path, step=3, place=("weight", "w", 0))
    found = read_dump(file)["value"]
    assert type(found) is torch.Tensor
    assert (found.stride(), found.tolist()) == (weight.stride(), weight.tolist())
    assert not list(find_dumps(tmp_path, step=4, place=("weight", "w", 0)))


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
    with pytest.raises(LedgerError, match="only the text"):
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
    with pytest.raises(LedgerError, match="does not have"):
        replay_op({"op": name, "args": [], "kwargs": {}})


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be written"):
        Dump(tmp_path / "file", 0).save(ProbePoint(0, 3, 5), ("output", "a", 0), {"value": 1})


HOOKS = ("[Module]Net.on_fit_start", "[Callback]EMA.on_fit_end")
BETWEEN = "in no hook: by the training loop or a thread"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("aaaa", "aaaa", ""),
        ("abbb", "accc", "while Net.on_fit_start ran"),
        ("aaab", "aaac", "while EMA.on_fit_end ran"),
        ("aabb", "aacc", f"between Net.on_fit_start and EMA.on_fit_end, {BETWEEN}"),
        ("ab", "ac", "while Net.on_fit_start ran, before EMA.on_fit_end"),  # one within the other
    ],
)
def test_the_hook_that_wrote_when_the_state_of_two_runs_began_to_differ(
    tmp_path, one, other, expected
):
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, digests in zip(folders, (one, other), strict=True):
        left = iter(digests)
        profile = trace_hooks(folder / "rank-0", lambda left=left: next(left, None), nullcontext)
        if len(digests) == 2:
            with profile(HOOKS[0]), profile(HOOKS[1]):
                pass
        else:
            for hook in HOOKS:
                with profile(hook):
                    pass
    assert find_writer(folders, 0) == expected
    assert find_writer([folders[0], tmp_path / "absent"], 0) == ""


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
