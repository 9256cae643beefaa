"""The digest of tensors that are not plain: sparse, nested, distributed, wrapped, without data."""

import subprocess
import warnings

import pytest
import torch
import xxhash
from torch._subclasses import FakeTensorMode

from lightning_d9m.errors import DigestError
from lightning_d9m.hashing.digest import digest, digest_many


def _composite(header, components):
    content = f"d9m-digest-1 {header}\n".encode()
    return xxhash.xxh3_128_hexdigest(
        content + b"".join(map(bytes.fromhex, digest_many(components)))
    )


class Watched(torch.Tensor):
    """A subclass that keeps its elements itself and meddles with every function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


class Doubled(torch.Tensor):
    """A subclass that keeps its elements in another tensor, as torchao's do."""

    @staticmethod
    def __new__(cls, inner, factor):
        """Make a tensor that has no memory of its own."""
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner, factor):
        self.inner, self.factor = inner, factor

    def __tensor_flatten__(self):
        """Name the tensors within, and say what else there is."""
        return ["inner"], {"factor": self.factor}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


class Opaque(torch.Tensor):
    """A subclass that says nothing of its elements."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_sparse_compressed_tensors_have_digests_of_their_components(layout):
    dense = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 0, 4], [5, 0, 6, 0]])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")
        sparse = getattr(dense, f"to_sparse_{layout}")(*([(2, 2)] if layout[0] == "b" else []))
    rows = layout in {"csr", "bsr"}
    outer = sparse.crow_indices() if rows else sparse.ccol_indices()
    inner = sparse.col_indices() if rows else sparse.row_indices()
    components = [outer, inner, sparse.values()]
    assert digest(sparse) == _composite(f"sparse_{layout} float32 [4,4]", components)
    before = digest(sparse)
    sparse.values().mul_(-1)
    assert digest(sparse) != before


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly")  # torch 2.12's own
def test_sparse_coo_tensors_are_taken_as_stored():
    indices, values = torch.tensor([[1, 0, 1], [2, 0, 2]]), torch.tensor([1.0, 2.0, 3.0])
    stored = torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=True)
    assert digest(stored) == _composite("sparse_coo float32 [2,3]", [indices, values])
    assert digest(torch.nn.Parameter(stored)) == digest(stored)
    assert digest(stored) != digest(stored.coalesce())
    hybrid = torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 3), (2, 3), check_invariants=True)
    assert digest(hybrid) != digest(torch.ones(2, 3).to_sparse())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_digests_of_their_tensors(monkeypatch, tmp_path):
    # torch sets this variable when it makes a jagged tensor.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    parts = [torch.arange(3.0), torch.arange(5.0)]
    expected = _composite("nested float32 [2]", parts)
    assert digest(torch.nested.nested_tensor(parts)) == expected
    assert digest(torch.nested.nested_tensor(parts, layout=torch.jagged)) == expected


def test_subclasses_that_keep_their_elements_are_tensors():
    data = torch.arange(6.0).reshape(2, 3)
    for tensor in (data, data.t(), data.to(torch.complex64).conj()):
        assert digest(tensor.as_subclass(Watched)) == digest(tensor)
    assert digest(torch.nn.Buffer(data)) == digest(data)


def test_wrappers_have_digests_of_what_they_wrap():
    inner = torch.arange(4.0)
    one = digest(Doubled(inner, 1))
    assert one == digest(Doubled(inner.clone(), 1))
    others = [inner, Doubled(inner, 2), Doubled(inner + 1, 1), Doubled(Doubled(inner, 1), 1)]
    assert len({one, *digest_many(others)}) == 5


def test_dtensors_have_the_digest_of_the_local_shard(forking_python):
    script = """
import torch, torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from lightning_d9m.hashing.digest import digest
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, data = init_device_mesh("cpu", (1,)), torch.randn(4, 6)
for placement in (Replicate(), Shard(0), Shard(1)):
    tensor = distribute_tensor(data, mesh, [placement])
    assert digest(tensor) == digest(torch.nn.Parameter(tensor)) == digest(data)
    assert digest(tensor.t()) == digest(data.t()) != digest(data)
pending = collectives.all_reduce(data, "sum", dist.group.WORLD)
assert type(pending) is collectives.AsyncCollectiveTensor
assert digest(pending) == digest(data)
dist.destroy_process_group()
print("equal")
"""
    run = subprocess.run(
        [forking_python, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.stdout == "equal\n", run.stderr


def _freed():
    view = torch.arange(10.0)[5:]
    view.untyped_storage().resize_(0)
    return view


def _fake():
    with FakeTensorMode():
        return torch.empty(3)


def _quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.empty(3, device="meta"),
            r"on meta has no digest: a meta tensor has no data",
        ),
        (_fake, r"FakeTensor does not say where its elements are\. Pass a materialized tensor"),
        (_quantized, r"qint8 on cpu has no digest: .* Pass its int_repr\(\) and q_scale\(\)"),
        (lambda: torch.ones(4, 4).to_mkldnn(), r"the order .* torch\._mkldnn\. Pass its to_dense"),
        (_freed, r"its storage has 0 bytes, too few for 20 at 5\. Its memory was freed, as FSDP"),
        (torch.nn.parameter.UninitializedParameter, r"not initialized yet\. Run the module once"),
        (
            lambda: torch.Tensor._make_subclass(Opaque, torch.ones(1)),
            r"Opaque does not say where its elements are",
        ),
        (
            lambda: Doubled(torch.ones(1), object()),
            r"value\[1\]\['factor'\] is of type builtins\.object",
        ),
    ],
)
def test_what_has_no_bytes_is_refused(make, message):
    with pytest.raises(DigestError, match=message):
        digest(make())


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_tensors_within_a_transform_are_refused(transform):
    def take(tensor):
        return digest(tensor)

    with pytest.raises(
        DigestError, match=r"no memory of its own\. Call digest\(\) outside transforms"
    ):
        transform(take)(torch.ones(2))
