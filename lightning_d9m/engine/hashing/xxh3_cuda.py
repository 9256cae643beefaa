# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202 - Triton's compiler reads the kernel's signatures, and types them
"""The chunk digests on CUDA: one launch for all tensors of a device, without copying them.

The constants (5 KiB) stay on the device. A table of the tensors is copied there, 24 bytes for each,
and the chunk digests are copied back, 8 bytes for each 128 KiB. Importing this module imports
Triton.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

from lightning_d9m.engine.hashing import xxh3
from lightning_d9m.engine.hashing.xxh3 import CHUNK_BYTES, count_chunks
from lightning_d9m.errors import SettingError

# The kernel computes XXH3-64 (seed 0) of every chunk. One program of one warp hashes one chunk. A
# block of XXH3 (16 stripes of 8 words) is one tile: the contributions of its stripes are sums
# modulo 2**64, so they are formed side by side and added, and only the scramble between two blocks
# is sequential. Three more blocks are always on their way from memory while one is hashed.
#
# The arithmetic is that of the xxHash specification (doc/xxhash_spec.md, "XXH3 Algorithm
# Overview"), for inputs that are a multiple of 1024 bytes. A block's 8 accumulators are kept as 4
# even and 4 odd ones, because XXH3 adds each word to the accumulator next to its own.
PRIME32_1 = tl.constexpr(0x9E3779B1)
PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
PRIME_AVALANCHE = tl.constexpr(0x165667919E3779F9)
# Words in a block, and the tiles of constants that the constants consist of.
WORDS = tl.constexpr(128)
KEYS, LAST_KEYS, START, SCRAMBLE, MERGE = (tl.constexpr(tile) for tile in range(5))


@triton.jit
def _sum_stripes(even, odd):
    """Adds the 16 stripes of a block: two tiles of 64 words become two vectors of 4."""
    return tl.sum(tl.reshape(even, [16, 4]), axis=0), tl.sum(tl.reshape(odd, [16, 4]), axis=0)


@triton.jit
def _load_tile(constants, tile, word):
    """Loads one tile of constants: its even and its odd words, (64,) each."""
    return tl.split(tl.load(constants + tile * WORDS + word).to(tl.uint64, bitcast=True))


@triton.jit
def _load_block(start, block, valid, word):
    """Loads one block of a chunk as (64, 2) words; what lies past the chunk's end is undefined."""
    # Every load is of an aligned pair of words that holds at least one byte of the chunk, so that
    # none can touch a page that is not the tensor's. One mask for both words of a pair keeps the
    # load one of 16 bytes.
    pair = tl.arange(0, 64)[:, None]
    return tl.load(start + (block * 128 + word), mask=block * 1024 + pair * 16 < valid, other=0)


@triton.jit
def _mix(words, even_keys, odd_keys):
    """Returns what one block adds to the accumulators, (4,) even and (4,) odd ones."""
    even, odd = tl.split(words)
    even_mixed = even ^ even_keys
    odd_mixed = odd ^ odd_keys
    even_product = (even_mixed & 0xFFFFFFFF) * (even_mixed >> 32)
    odd_product = (odd_mixed & 0xFFFFFFFF) * (odd_mixed >> 32)
    return _sum_stripes(even_product + odd, odd_product + even)


@triton.jit
def _scramble(sums, keys):
    return ((sums ^ (sums >> 47)) ^ keys) * PRIME32_1


@triton.jit
def _hash_chunk(constants, address, valid):
    """Returns XXH3-64 of ``valid`` bytes at ``address``, zero-padded to whole blocks."""
    word = tl.arange(0, 64)[:, None] * 2 + tl.arange(0, 2)[None, :]
    start = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    even, odd = _sum_stripes(*_load_tile(constants, START, word))
    even_scramble, odd_scramble = _sum_stripes(*_load_tile(constants, SCRAMBLE, word))
    even_keys, odd_keys = _load_tile(constants, KEYS, word)
    last = (valid + 1023) // 1024 - 1
    words = _load_block(start, 0, valid, word)
    second = _load_block(start, 1, valid, word)
    third = _load_block(start, 2, valid, word)
    block = 0
    while block < last:
        fourth = _load_block(start, block + 3, valid, word)
        even_sum, odd_sum = _mix(words, even_keys, odd_keys)
        even = _scramble(even + even_sum, even_scramble)
        odd = _scramble(odd + odd_sum, odd_scramble)
        words = second
        second = third
        third = fourth
        block += 1

    # In the last block, bytes past the end are zeros, and the last stripe has other keys. No
    # scramble follows.
    left = valid - last * 1024 - word * 8
    ones = tl.full([64, 2], 0xFFFFFFFFFFFFFFFF, tl.uint64)
    kept = ones >> (tl.minimum(tl.maximum(8 - left, 0), 7) * 8).to(tl.uint64)
    words = tl.where(left > 0, words & kept, 0)
    even_keys, odd_keys = _load_tile(constants, LAST_KEYS, word)
    even_sum, odd_sum = _mix(words, even_keys, odd_keys)
    even_merge, odd_merge = _sum_stripes(*_load_tile(constants, MERGE, word))
    even = (even + even_sum) ^ even_merge
    odd = (odd + odd_sum) ^ odd_merge
    folded = (even * odd) ^ tl.umulhi(even, odd)
    length = ((last + 1) * 1024).to(tl.uint64)
    leaf = tl.sum(folded, axis=0) + length * PRIME64_1
    leaf = (leaf ^ (leaf >> 37)) * PRIME_AVALANCHE
    return leaf ^ (leaf >> 32)


# Triton would compile the kernel again for a count of 1 and for each multiple of 16.
@triton.jit(do_not_specialize=["count"])
def hash_chunks(constants, table, leaves, count, CHUNK: tl.constexpr):  # noqa: N803
    """Writes the leaf of chunk ``program_id`` of many tensors to ``leaves``.

    Args:
        constants: int64; the tiles of constants.
        table: int64; for the ``count`` tensors the number of chunks before each, their addresses,
            multiples of 16, and their sizes in bytes (none of them 0).
        leaves: int64; one element for each chunk of all tensors, in order.
        count: The number of tensors.
        CHUNK: Bytes in a chunk.
    """
    chunk = tl.program_id(0).to(tl.int64)
    # The last tensor that begins at or before this chunk, by bisection: a table with an entry for
    # each chunk would be as long as the digests, and be copied to the device for each launch.
    low = chunk * 0
    high = low + count - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(table + middle) <= chunk
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    begin = (chunk - tl.load(table + low)) * CHUNK
    address = tl.load(table + count + low) + begin
    valid = tl.minimum(tl.load(table + 2 * count + low) - begin, CHUNK).to(tl.int32)
    leaf = _hash_chunk(constants, address, valid)
    tl.store(leaves + chunk, leaf.to(tl.int64, bitcast=True))


# XXH3's default secret and primes, from the xxHash specification (doc/xxhash_spec.md).
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip


def _secret_at(offset: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(_SECRET, "<u8", 8, offset)


def start_hashing(memory: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Hash memory of one device on its current stream, without waiting.

    Args:
        memory: Addresses, which are multiples of 16, and sizes in bytes. Their owners must be alive
            until the digests are fetched.
        device: The device of the memory.

    Returns:
        The XXH3-64 of each chunk, int64, on the device.
    """
    counts = [count_chunks(size) for _, size in memory]
    begins = accumulate(counts, initial=0)
    spans = [(begin, *span) for begin, span in zip(begins, memory, strict=False) if span[1]]
    cuda = device.type == "cuda"
    with torch.cuda.device(device if cuda else -1):
        if cuda and torch.cuda.is_current_stream_capturing():
            raise SettingError(
                f"A digest of memory on {device} was requested while a CUDA graph is captured: a "
                "replay of the graph would repeat the kernel, but not read its result. Capture the "
                "graph before the training starts, or leave the captured modules out of the probes "
                "(probe_modules)."
            )
        chunk_digests = torch.empty(sum(counts), dtype=torch.int64, device=device)
        if not spans:
            return chunk_digests
        # A copy from pinned memory does not wait for the device.
        table = torch.empty(3 * len(spans), dtype=torch.int64, device="cpu", pin_memory=cuda)
        table.numpy()[:] = np.array(spans, np.int64).T.reshape(-1)
        kernel: Any = hash_chunks
        kernel[(len(chunk_digests),)](
            _load_constants(device),
            table.to(device, non_blocking=True),
            chunk_digests,
            len(spans),
            CHUNK=CHUNK_BYTES,
            num_warps=1,
            enable_fp_fusion=False,  # the kernel has no floats; Triton 3.9 warns if this is unset
        )
    return chunk_digests


def start_copy(launched: list[torch.Tensor]) -> torch.Tensor:
    """Copy chunk digests to pinned memory on the current stream, without waiting."""
    chunk_digests = torch.cat(launched)
    here = torch.empty(chunk_digests.shape, dtype=torch.int64, pin_memory=True, device="cpu")
    return here.copy_(chunk_digests, non_blocking=True)


@functools.cache
def _load_constants(device: torch.device) -> torch.Tensor:
    """Return the constants as the kernel expects them: tiles of 16 stripes of 8 words.

    A tile of keys has the secret's words for each stripe of a block: stripe n reads the secret at
    byte 8n, the last stripe of the input at byte 121. The other tiles have their 8 words in stripe
    0.
    """
    # They are copied once, and waited for: every stream reads them.
    tiles = np.zeros((5, 16, 8), np.uint64)
    tiles[0] = tiles[1] = [_secret_at(8 * stripe) for stripe in range(16)]
    tiles[1, 15] = _secret_at(121)
    tiles[2, 0] = _START
    tiles[3, 0] = _secret_at(128)
    tiles[4, 0] = _secret_at(11)
    return torch.from_numpy(tiles.reshape(-1).view(np.int64)).to(device)


def check_kernel(device: torch.device) -> bool:
    """Return whether the kernel agrees with the CPU on this device."""
    if device.type == "cuda" and not isinstance(hash_chunks, JITFunction):
        return False  # TRITON_INTERPRET=1 runs the kernel on the CPU, which cannot read CUDA memory
    generator = torch.Generator("cpu").manual_seed(0)
    size = CHUNK_BYTES + 1500
    data = torch.randint(256, (size,), dtype=torch.uint8, device="cpu", generator=generator)
    there = data.to(device)
    spans = [(begin, length) for begin in (0, 16) for length in (1, 1024, 1500)] + [(0, size)]
    memory = [(there.data_ptr() + begin, length) for begin, length in spans]
    here = [(data.data_ptr() + begin, length) for begin, length in spans]
    digests = start_hashing(memory, device).cpu().numpy().tobytes()
    return digests == b"".join(xxh3.hash_chunks(here))
