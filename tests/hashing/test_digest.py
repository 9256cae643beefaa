"""The digest of tensors: the definition in docs/digest.md, and what must change it.

Of those, too, that are not plain: sparse, nested, distributed, wrapped, without data.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from torch._subclasses import FakeTensorMode

from lightning_d9m.engine.hashing import xxh3
from lightning_d9m.engine.hashing.digest import digest, digest_many, digest_value
from lightning_d9m.errors import DigestError

DOCUMENT = Path(__file__).parents[2] / "docs" / "digest.md"
CHUNK = 131072
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {v for v in vars(torch).values() if isinstance(v, torch.dtype)} - QUANTIZED, key=str
)
SIZES = [0, 1, 7, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 1025]


def _reference():
    """Return ``reference_digest`` as the document prints it."""
    code = re.search(
        r"```python\n(import torch\nimport xxhash\n.*?)```", DOCUMENT.read_text(), re.DOTALL
    )
    names = {}
    exec(code[1], names)  # noqa: S102 - the document's own example
    return names["reference_digest"]


def _vectors(title):
    section = DOCUMENT.read_text().split(f"| {title} | digest |")[1].split("\n\n")[0]
    return re.findall(r"^\| `(.+)` \| `([0-9a-f]{32})` \|$", section, re.MULTILINE)


def _bytes(size):
    return torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, np.uint8))


VECTORS = [(digest, *pair) for pair in _vectors("tensor")]
VECTORS += [(digest_value, *pair) for pair in _vectors("value")]


@pytest.mark.parametrize(("function", "expression", "expected"), VECTORS)
def test_the_document_gives_digests(function, expression, expected):
    assert function(eval(expression)) == expected  # noqa: S307 - the document's own example


@pytest.mark.parametrize("size", SIZES)
def test_every_boundary_agrees_with_the_reference(size):
    data = _bytes(size + 1)
    for tensor in (data[:size], data[1:]):
        assert digest(tensor) == _reference()(tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_agrees_with_the_reference(dtype):
    plain = _bytes(6 * dtype.itemsize).view(dtype).reshape(2, 3)
    assert digest(plain) == _reference()(plain)
    assert digest(plain[1, 2]) == _reference()(plain[1, 2])
    # Transposed twice: the same elements in another order of memory.
    data = _bytes(6 * dtype.itemsize).reshape(2, 3, -1).transpose(0, 1).contiguous()
    moved = data.view(-1).view(dtype).reshape(3, 2).t()
    assert not moved.is_contiguous()
    assert digest(moved) == digest(plain)


def test_memory_layout_does_not_count():
    image = torch.randn(2, 3, 4, 5)
    same = [
        image.to(memory_format=torch.channels_last),
        image.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.randn(9, 3, 4, 5).copy_(image[:1].expand(9, -1, -1, -1))[:2].copy_(image),
        torch.nn.Parameter(image),
        image.clone().requires_grad_() + 0,
    ]
    assert set(digest_many(same)) == {digest(image)}
    column = torch.randn(3, 1)
    assert digest(column.expand(3, 4)) == digest(column.repeat(1, 4))


def test_lazy_conjugation_and_negation_are_carried_out():
    numbers = torch.randn(5, dtype=torch.complex64)
    assert numbers.conj().is_conj()
    assert digest(numbers.conj()) == digest(numbers.conj().resolve_conj()) != digest(numbers)
    assert numbers.conj().imag.is_neg()
    assert digest(numbers.conj().imag) == digest(-numbers.imag)
    # What forward-mode differentiation makes has a size and no memory: reading it would crash.
    zeros = torch._efficientzerotensor((200_000,))
    assert zeros.data_ptr() == 0
    assert digest(zeros) == digest(torch.zeros(200_000))


def test_number_of_threads_does_not_count(set_threads, monkeypatch):
    monkeypatch.setattr(xxh3, "_SHARE", 2)
    large = _bytes(3_000_000).view(-1, 100)
    tensors = [large, large.t(), *(large[n : 3 * n + 2] for n in range(0, 9000, 300))]
    digests = {}
    for threads in (1, 2, 3, 4):
        set_threads(threads)
        digests[threads] = digest_many(tensors)
    assert digests[2] == digests[3] == digests[4] == digests[1]
    assert len(set(digests[1])) == len(tensors)


def test_digest_disturbs_nothing():
    tensor = torch.randn(3, 4, requires_grad=True)
    state, version = torch.get_rng_state(), tensor._version
    digest(tensor.t())
    assert tensor._version == version
    assert tensor.grad is None
    assert torch.equal(torch.get_rng_state(), state)


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
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner, factor):
        self.inner, self.factor = inner, factor

    def __tensor_flatten__(self):
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
from lightning_d9m.engine.hashing.digest import digest
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [1.0], r"taken of a tensor; list was given\. digest_value\(\)"),
        (
            lambda: torch.empty(3, device="meta"),
            r"on meta has no digest: a meta tensor has no data",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged).to("meta"),
            r"on meta has no digest: a meta tensor",
        ),
        (_fake, r"FakeTensor does not say where its elements are\. Pass a materialized tensor"),
        (lambda: torch.ones(4, 4).to_mkldnn(), r"the order .* torch\._mkldnn\. Pass its to_dense"),
        (
            _freed,
            r"its storage has 0 bytes, too few for 5 elements from 5 on\. Its memory was freed",
        ),
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


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_count_by_integers_scales_and_zero_points():
    values, zeros = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2, dtype=torch.long)

    def quantize(scale=0.1, zero=0, shift=0.0, dtype=torch.qint8):
        return torch.quantize_per_tensor(values + shift, scale, zero, dtype)

    def quantize_channels(scales=(0.1, 0.2), zero_points=zeros, axis=0):
        scales = torch.tensor(scales)
        return torch.quantize_per_channel(values, scales, zero_points, axis, torch.qint8)

    made = [quantize(), quantize(0.11), quantize(zero=1), quantize(shift=0.3)]
    made += [quantize(dtype=torch.quint8), quantize_channels(), quantize_channels((0.1, 0.3))]
    made += [quantize_channels(zero_points=zeros + 1), quantize_channels(axis=1)]
    assert len({digest(one) for one in made}) == len(made)
    assert [digest(one.clone()) for one in made] == [digest(one) for one in made]
    assert digest(quantize().T) == digest(quantize().T.contiguous())


def test_tensors_within_a_transform_are_refused():
    refused = pytest.raises(
        DigestError, match=r"no memory of its own\. Call digest\(\) outside transforms"
    )
    with refused:
        torch.vmap(digest)(torch.ones(2))


def test_of_tensors_in_other_orders_one_copy_exists_at_a_time(monkeypatch):
    values = [torch.randn(2, 3, 4, 5) for _ in range(4)]
    given = [value.contiguous(memory_format=torch.channels_last) for value in values]
    own, alive = {value.untyped_storage().data_ptr() for value in given}, []
    hash_all, expected = xxh3.hash_chunks, digest_many([values[0], *values])

    def note(memory):
        alive.append([size for address, size in memory if address not in own])
        return hash_all(memory)

    own.add(values[0].data_ptr())
    monkeypatch.setattr(xxh3, "hash_chunks", note)
    assert digest_many([values[0], *given]) == expected
    assert alive == [[], *[[480]] * 4]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_while_a_thread_hashes_can_hash():
    interval = sys.getswitchinterval()
    with xxh3._interval_changed:
        started = threading.Event()

        def fork():
            started.set()
            child = os.fork()
            if not child:
                signal.alarm(20)
                digest(torch.ones(3))
                os._exit(sys.getswitchinterval() != interval)
            return os.waitpid(child, 0)[1]

        with ThreadPoolExecutor(1) as pool:
            status = pool.submit(fork)
            started.wait()
            xxh3._interval_changed.release()
            try:
                assert status.result() == 0
            finally:
                xxh3._interval_changed.acquire()


def test_a_signal_handler_can_hash_while_its_thread_hashes(monkeypatch):
    """A handler that saves a checkpoint digests it; calls of one thread are nested alike."""
    expected, interval = digest(torch.ones(3)), sys.getswitchinterval()
    hash_chunk, found = xxh3.xxh3_64_intdigest, []

    def interrupted(data):
        monkeypatch.setattr(xxh3, "xxh3_64_intdigest", hash_chunk)
        found.append(digest(torch.ones(3)))
        return hash_chunk(data)

    monkeypatch.setattr(xxh3, "xxh3_64_intdigest", interrupted)
    # In a thread, which a lock that cannot be nested would stop for good.
    hashing = threading.Thread(target=lambda: found.append(digest(torch.ones(3))), daemon=True)
    hashing.start()
    hashing.join(20)
    assert found == [expected, expected]
    assert sys.getswitchinterval() == interval
