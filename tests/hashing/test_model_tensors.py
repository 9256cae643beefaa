"""What is remembered of a model's tensors is found out again as soon as it no longer holds."""

import pytest
import torch
from torch import nn

from lightning_d9m.errors import DigestError
from lightning_d9m.hashing import address_cache
from lightning_d9m.hashing.address_cache import AddressCache
from lightning_d9m.hashing.digest import digest_many
from lightning_d9m.hashing.digest_queue import DigestQueue
from lightning_d9m.hashing.model_tensors import ModelTensors, NamedTensors


def digest_named(named_tensors):
    """Return the digests of tensors where they are said to lie."""
    queue = DigestQueue()
    located = named_tensors.locate()
    if located is None:
        queue.add(named_tensors.values())
    else:
        queue.add_located(located)
    return queue.fetch()


def zero(weight):
    with torch.no_grad():
        weight.zero_()


def point_elsewhere(weight):
    weight.data = torch.ones_like(weight)


def reshape(weight):
    weight.data = weight.data.view(-1)


def cast(weight):
    weight.data = weight.data.double()


def view_as_integers(weight):
    weight.data = weight.data.view(torch.int32)


def transpose(weight):
    weight.data = weight.data.t()


def negate(weight):
    weight.data = torch._neg_view(weight.data)


CHANGES = [zero, point_elsewhere, reshape, cast, view_as_integers, transpose, negate]


@pytest.mark.parametrize("change", CHANGES)
def test_digests_are_those_of_the_tensors_as_they_are(change):
    weight = torch.randn(4, 4)
    named_tensors = NamedTensors([("weight", weight), ("other", torch.arange(3))])
    before = digest_named(named_tensors)
    assert before == digest_many(named_tensors.values())
    change(weight)
    after = digest_named(named_tensors)
    assert after == digest_many(named_tensors.values())
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_where_tensors_lie_is_found_out_once():
    named_tensors = NamedTensors([("weight", nn.Parameter(torch.randn(4, 4)))])
    found = named_tensors.locate()
    with torch.no_grad():
        assert named_tensors.locate() is found
    assert named_tensors.locate() is found


def test_of_tensors_that_moved_the_others_stay_located(monkeypatch):
    """As the state of a checkpoint whose weights stay and whose generators are copied."""
    sizes = [0, 1, 1024, 5000, 131072, 131073, 300000]
    cache, kept = AddressCache(), [torch.randn(size) for size in (3, *sizes, *sizes)]
    assert cache.digest(kept) == digest_many(kept)
    monkeypatch.setattr(address_cache, "_locate", None)
    for number in range(len(sizes)):
        moved = [*kept]
        moved[number] = torch.randn(kept[number].shape)
        assert cache.digest(moved) == digest_many(moved)
    assert cache.digest(kept) == digest_many(kept)


def test_what_is_freed_elsewhere_is_not_left_half_moved():
    cache, kept = AddressCache(), [torch.randn(9) for _ in range(5)]
    cache.find(kept)
    freed = torch.randn(9)
    freed.untyped_storage().resize_(0)
    with pytest.raises(DigestError, match="freed"):
        cache.find([torch.randn(9), freed, *kept[2:]])
    assert cache.digest(kept) == digest_many(kept)


def test_nothing_is_cached_if_torch_has_another_check(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    named_tensors = NamedTensors([("weight", nn.Parameter(torch.randn(4, 4)))])
    found = named_tensors.locate()
    assert named_tensors.locate() is not found
    assert digest_named(named_tensors) == digest_many(named_tensors.values())


def test_a_tensor_that_is_given_twice_is_located_anew():
    """The guards of torch take each tensor once."""
    weight = torch.randn(4, 4)
    named_tensors = NamedTensors([("weight", weight), ("tied", weight)])
    for _ in range(2):
        assert digest_named(named_tensors) == digest_many([weight, weight])
    cache = AddressCache()
    for others in ([weight + 1] * 3, [weight, *[weight + 2] * 2]):
        assert cache.digest(others) == digest_many(others)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 4).t(),
        torch.randn(4, dtype=torch.complex64),
        torch.randn(4).to_sparse(),
    ],
    ids=["out of order", "complex", "sparse"],
)
def test_what_has_no_bytes_in_order_is_not_remembered(tensor):
    assert NamedTensors([("tensor", tensor)]).locate() is None


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_becomes_sparse_is_found_out():
    """It has no strides, which the check would read."""
    named_tensors = NamedTensors([("weight", torch.randn(4, 4))])
    named_tensors.locate()
    for other in (torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()):
        assert named_tensors._addresses.find([other]) is None


def test_what_is_not_initialized_is_an_error():
    with pytest.raises(DigestError, match="not initialized"):
        NamedTensors([("tensor", nn.UninitializedParameter())]).locate()


def test_nothing_lies_anywhere():
    assert NamedTensors(()).locate() is None


def test_memory_that_was_freed_is_an_error():
    weight = torch.randn(4, 4)
    named_tensors = NamedTensors([("weight", weight)])
    named_tensors.locate()
    weight.untyped_storage().resize_(0)
    with pytest.raises(DigestError, match="freed"):
        named_tensors.locate()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_roster_has_what_a_torchscript_module_has():
    """Its tables are no dicts, so they cannot be watched."""
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(2)))
    roster = ModelTensors(model)
    assert list(roster.parameters) == ["0.weight", "0.bias"]
    assert list(roster.buffers) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    model[0].weight = nn.Parameter(torch.zeros(2))
    assert torch.equal(roster.parameters["0.weight"], torch.zeros(2))


def replace_parameter(model):
    model[0].weight = nn.Parameter(torch.zeros(2, 2))


def replace_directly(model):
    model[0]._parameters["weight"] = nn.Parameter(torch.zeros(2, 2))


def rename(model):
    model[0]._parameters["kernel"] = model[0]._parameters.pop("weight")


def add_module(model):
    model.append(nn.Linear(2, 2))


def add_deep(model):
    model[1].append(nn.Linear(2, 2))


def remove(model):
    model[0].bias = None


def exchange(model):
    model[0], model[1][0] = model[1][0], model[0]


def replace_buffer(model):
    model[1][1].running_mean = torch.ones(2)


CHANGES = [
    replace_parameter,
    replace_directly,
    rename,
    add_module,
    add_deep,
    remove,
    exchange,
    replace_buffer,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_roster_has_what_the_model_has(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    roster = ModelTensors(model, lambda _: True)
    before = (roster.parameters, roster.buffers)
    assert before[0] is roster.parameters
    assert before[1] is roster.buffers
    change(model)
    for own, entries in (
        (roster.parameters, model.named_parameters()),
        (roster.buffers, model.named_buffers()),
    ):
        expected = dict(entries)
        assert list(own) == list(expected)
        assert all(own[name] is tensor for name, tensor in expected.items())
    assert roster.names == {id(own): name for name, own in model.named_parameters()}


def test_a_roster_selects_by_name_and_names_all():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    roster = ModelTensors(model, lambda name: name.startswith("1."))
    assert list(roster.parameters) == ["1.weight", "1.bias"]
    assert len(roster.names) == 4
