"""The CUDA kernel, shown without a GPU: compiled for real ones, and its PTX executed."""

import ctypes
import functools
import re
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from ptx import APART, GAP, Block, Memory, Run, parse

from lightning_d9m.engine.hashing import digest as digest_module
from lightning_d9m.engine.hashing import xxh3
from lightning_d9m.errors import DigestError, SettingError

xxh3_cuda = pytest.importorskip(
    "lightning_d9m.engine.hashing.xxh3_cuda",
    reason="the kernel is written in Triton, for Linux alone",
)
CPU = torch.device("cpu")
KERNEL = xxh3_cuda.hash_chunks
CHUNK = 8192  # in place of the definition's, because executing is slow
DATA = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 700_000, np.uint8)).clone()


@functools.cache
def compile_kernel(capability, chunk=xxh3.CHUNK_BYTES):
    import triton
    from triton.backends.compiler import GPUTarget

    types = {"constants": "*i64", "table": "*i64", "leaves": "*i64"}
    types |= {"count": "i32", "CHUNK": "constexpr"}
    source = triton.compiler.ASTSource(KERNEL, types, {"CHUNK": chunk})
    options = {"num_warps": 1, "enable_fp_fusion": False}
    return triton.compile(source, GPUTarget("cuda", capability, 32), options)


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def launch(grid, constants, table, leaves, count, *, CHUNK, data=None, **_):  # noqa: N803
    """Execute the compiled kernel, which may read whole pairs of words."""
    table = table.clone()
    if data is None:
        addresses, sizes = table[count:].reshape(2, count)
        begin, end = int(addresses.min()), int((addresses + sizes).max())
        memory = (ctypes.c_uint8 * (-(-end // 16) * 16 - begin)).from_address(begin)
        data = torch.frombuffer(memory, dtype=torch.uint8)
    table[count : 2 * count] += GAP - data.data_ptr()
    memory = Memory([data, constants, table, leaves], unwritten=[leaves])
    compiled, draws = compile_kernel(80, CHUNK), np.random.default_rng(0)
    arguments = [*map(memory.find, (constants, table, leaves)), count]
    program = parse(compiled.asm["ptx"])
    Run(program, compiled.metadata.shared, grid[0], memory, arguments, draws).run()


@pytest.fixture
def executed(monkeypatch):
    """Let the kernel run on tensors of the CPU, with smaller chunks."""
    kernel = mock.MagicMock()
    kernel.__getitem__.side_effect = lambda grid: functools.partial(launch, grid)
    monkeypatch.setattr(xxh3_cuda, "hash_chunks", kernel)
    for module in (xxh3, xxh3_cuda):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


SIZES = [0, 1, 7, 8, 15, 16, 17, 1023, 1024, 1025, 2048, 4095, CHUNK - 1, CHUNK]
SPANS = {
    "sizes around every boundary": [(16, size) for size in (*SIZES, CHUNK + 1, 2 * CHUNK + 1025)],
    "many tensors": [(16 * n, (n * n * 7) % 1500) for n in range(30)] + [(0, 0), (16, 1)],
    "none": [],
    "an empty one": [(0, 0)],
}


@pytest.mark.parametrize("name", SPANS)
@pytest.mark.usefixtures("executed")
def test_the_kernel_agrees_with_the_cpu(name):
    memory = [(DATA.data_ptr() + begin, size) for begin, size in SPANS[name]]
    digests = xxh3_cuda.start_hashing(memory, CPU).numpy().tobytes()
    assert digests == b"".join(xxh3.hash_chunks(memory))


def test_the_definitions_chunks_are_hashed_also_at_offsets_beyond_32_bits():
    """A tensor begins 2.6 GB below, and the chunks up to here count as hashed before."""
    chunk = xxh3.CHUNK_BYTES
    before, size = 2_600_000_000 // chunk, chunk + 100
    table = torch.tensor([-before, DATA.data_ptr() - before * chunk, before * chunk + size])
    leaves = torch.empty(2, dtype=torch.int64)
    launch((2,), xxh3_cuda._load_constants(CPU), table, leaves, 1, CHUNK=chunk, data=DATA)
    assert [leaves.numpy().tobytes()] == xxh3.hash_chunks([(DATA.data_ptr(), size)])


class Chunk(Block):
    """One program of a launch, whose table has words that are computed from their places."""

    def access_global(self, place, bits, active, *, by_l2):
        found = super().access_global(place, bits, active, by_l2=by_l2)
        if place[0, 0] >> APART == 2:
            words = (place[:, :1] & (2**APART - 1)) // 8
            return np.vectorize(self.read_word, otypes=[np.int64])(words).view(np.uint8)
        return found


def run_chunk(number, total, sizes, count, read_word):
    """Execute program ``number`` of ``total``; return the bytes that it touches in each tensor."""
    compiled = compile_kernel(80, CHUNK)
    arguments = [1 << APART, 2 << APART, 3 << APART, count]
    known = {1: 5 * 1024, 2: 24 * count, 3: 8 * total, **sizes}
    one = Chunk(parse(compiled.asm["ptx"]), 0, number, total, known, arguments)
    one.read_word = read_word
    one.run()
    return one.touched


@pytest.mark.parametrize("size", [2**31 - 5, 2**31 + CHUNK, 2**32 + 70_001, 2**43])
def test_each_chunk_reads_its_bytes_at_any_size(size):
    """Behind a small tensor: in the first and the last chunk, and around 2**31 and 2**32 bytes."""
    total = 1 + -(-size // CHUNK)
    table = [0, 1, 5 << APART, 4 << APART, 100, size]
    around = {border // CHUNK + step for border in (0, 2**31, 2**32) for step in (0, 1, 2)}
    for number in sorted(one for one in {*around, total - 1} if one < total):
        sizes = {4: -(-size // 16) * 16, 5: 112}
        touched = run_chunk(number, total, sizes, 2, table.__getitem__)
        first = (number - 1) * CHUNK
        last = -(-min(first + CHUNK, size) // 16) * 16 - 1
        assert touched[4 if number else 5] == ((first, last) if number else (0, 111))
        assert touched[3] == (8 * number, 8 * number + 7)
        assert (4 in touched) == bool(number)


def test_each_chunk_finds_its_tensor_among_any_number():
    """A table of more than 2**32 bytes, of tensors with one chunk each."""
    count = 2**28 + 3
    words = (lambda n: n, lambda n: (4 << APART) + 16 * n, lambda _: 16)
    for number in (0, 2**27, count - 1):
        touched = run_chunk(
            number, count, {4: 16 * count}, count, lambda word: words[word // count](word % count)
        )
        assert touched[4] == (16 * number, 16 * number + 15)
        assert touched[2][1] == 8 * (2 * count + number) + 7


@pytest.mark.usefixtures("executed")
def test_the_check_before_the_first_use_finds_one_wrong_bit():
    assert xxh3_cuda.check_kernel(CPU)
    assert not xxh3_cuda.check_kernel(torch.device("cuda"))  # Triton interprets it on the CPU
    constants = xxh3_cuda._load_constants(CPU)
    constants[200] ^= 1
    assert not xxh3_cuda.check_kernel(CPU)
    constants[200] ^= 1


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_to_wide_loads_and_registers_alone(capability):
    compiled = compile_kernel(capability)
    text = compiled.asm["ptx"]
    # Four blocks on their way, each two loads of 16 bytes a thread; no shared memory, no spills.
    assert len(re.findall(r"@%p\d+ ld\.global\.v2\.b64", text)) == 8
    assert (compiled.metadata.shared, re.findall(r"[ls][dt]\.local", text)) == (0, [])


def test_a_digest_within_a_captured_cuda_graph_is_refused(monkeypatch):
    """Also by a probe, which digests the type of a value that has no digest."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with pytest.raises(SettingError, match="while a CUDA graph is captured") as refused:
        xxh3_cuda.start_hashing([(64, 8)], torch.device("cuda", 0))
    assert not isinstance(refused.value, DigestError)


class TritonError(Exception):
    """Stands for Triton's own, which is of no narrower class."""


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ({"return_value": False}, "its digests differ from the CPU's"),
        (
            {"side_effect": TritonError("Failed to find C compiler.")},
            r"TritonError: Failed to find C compiler\.; Triton needs gcc and",
        ),
    ],
)
def test_a_kernel_that_disagrees_or_cannot_be_compiled_is_not_used(check, reason):
    load = digest_module.load_kernel.__wrapped__
    expected = pytest.warns(UserWarning, match=rf"on cuda:0 \({reason}.*Digests are the same")
    with mock.patch.object(xxh3_cuda, "check_kernel", **check), expected:
        assert load(torch.device("cuda", 0)) is None
