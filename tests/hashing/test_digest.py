"""The digest of plain tensors: the definition in docs/digest.md, and what must change it."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_d9m.errors import DigestError
from lightning_d9m.hashing.digest import digest, digest_many, digest_value
from lightning_d9m.hashing.xxh3 import cpu as xxh3_cpu

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


@pytest.mark.parametrize(("expression", "expected"), _vectors("tensor"))
def test_document_gives_the_digest_of_a_tensor(expression, expected):
    assert digest(eval(expression)) == expected  # noqa: S307 - the document's own example


@pytest.mark.parametrize(("expression", "expected"), _vectors("value"))
def test_document_gives_the_digest_of_a_value(expression, expected):
    assert digest_value(eval(expression)) == expected  # noqa: S307 - the document's own example


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


@pytest.fixture
def set_threads():
    """Set torch's number of threads, for this test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_number_of_threads_does_not_count(set_threads, monkeypatch):
    monkeypatch.setattr(xxh3_cpu, "_SHARE", 2)
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


def test_another_type_is_refused():
    with pytest.raises(DigestError, match=r"taken of a tensor; list was given\. digest_value\(\)"):
        digest([1.0])
