# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202 - Triton's compiler reads these signatures, and types them itself
"""The Triton kernel of the digest: XXH3-64 (seed 0) of every chunk of many tensors, in one launch.

One program of one warp hashes one chunk. A block of XXH3 (16 stripes of 8 words) is one tile: the
contributions of its stripes are sums modulo 2**64, so they are formed side by side and added, and
only the scramble between two blocks is sequential. Three more blocks are always on their way from
memory while one is hashed.

The arithmetic is that of the xxHash specification (doc/xxhash_spec.md, "XXH3 Algorithm Overview"),
for inputs that are a multiple of 1024 bytes. A block's 8 accumulators are kept as 4 even and
4 odd ones, because XXH3 adds each word to the accumulator next to its own.
"""

import triton
import triton.language as tl

PRIME32_1 = tl.constexpr(0x9E3779B1)
PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
PRIME_AVALANCHE = tl.constexpr(0x165667919E3779F9)
# Words in a block, and the tiles of constants that the constants consist of (see xxh3_cuda.py).
WORDS = tl.constexpr(128)
KEYS, LAST_KEYS, START, SCRAMBLE, MERGE = (tl.constexpr(tile) for tile in range(5))


@triton.jit
def _sum_stripes(even, odd):
    """Adds the 16 stripes of a block: two tiles of 64 words become two vectors of 4."""
    return tl.sum(tl.reshape(even, [16, 4]), axis=0), tl.sum(tl.reshape(odd, [16, 4]), axis=0)


@triton.jit
def _load_constants(constants, tile, word):
    """Loads one tile of constants: its even and its odd words, (64,) each."""
    return tl.split(tl.load(constants + tile * WORDS + word).to(tl.uint64, bitcast=True))


@triton.jit
def _load_block(start, block, valid, word, skew, ALIGNED: tl.constexpr):  # noqa: N803
    """Loads one block of a chunk as (64, 2) words; what lies past the chunk's end is undefined.

    Every load is of whole aligned words that hold at least one byte of the chunk (aligned pairs
    of words in the aligned case), so that none can touch a page that is not the tensor's.
    """
    if ALIGNED:
        # One mask for both words of a pair keeps the load one of 16 bytes.
        pair = tl.arange(0, 64)[:, None]
        mask = block * 1024 + pair * 16 < valid
        words = tl.load(start + (block * 128 + word), mask=mask, other=0)
    else:
        position = block * 1024 + word * 8
        reach = valid + skew
        low = tl.load(start + (block * 128 + word), mask=position < reach, other=0)
        high = tl.load(start + (block * 128 + word + 1), mask=position + 8 < reach, other=0)
        bits = (skew * 8).to(tl.uint64)
        # In two shifts, because a shift by 64 (when the skew is 0) is undefined.
        words = (low >> bits) | ((high << (63 - bits)) << 1)
    return words


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
def _hash_chunk(constants, address, valid, ALIGNED: tl.constexpr):  # noqa: N803
    """Returns XXH3-64 of ``valid`` bytes at ``address``, zero-padded to whole blocks."""
    word = tl.arange(0, 64)[:, None] * 2 + tl.arange(0, 2)[None, :]
    if ALIGNED:
        skew = 0
        start = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    else:
        skew = (address & 7).to(tl.int32)
        start = (address - skew).to(tl.pointer_type(tl.uint64))

    even, odd = _sum_stripes(*_load_constants(constants, START, word))
    even_scramble, odd_scramble = _sum_stripes(*_load_constants(constants, SCRAMBLE, word))
    even_keys, odd_keys = _load_constants(constants, KEYS, word)
    last = (valid + 1023) // 1024 - 1
    words = _load_block(start, 0, valid, word, skew, ALIGNED)
    second = _load_block(start, 1, valid, word, skew, ALIGNED)
    third = _load_block(start, 2, valid, word, skew, ALIGNED)
    block = 0
    while block < last:
        fourth = _load_block(start, block + 3, valid, word, skew, ALIGNED)
        even_sum, odd_sum = _mix(words, even_keys, odd_keys)
        even = _scramble(even + even_sum, even_scramble)
        odd = _scramble(odd + odd_sum, odd_scramble)
        words = second
        second = third
        third = fourth
        block += 1

    # The last block: its bytes past the end are zeros, its last stripe has keys of its own, and
    # it is not followed by a scramble.
    left = valid - last * 1024 - word * 8
    ones = tl.full([64, 2], 0xFFFFFFFFFFFFFFFF, tl.uint64)
    kept = ones >> (tl.minimum(tl.maximum(8 - left, 0), 7) * 8).to(tl.uint64)
    words = tl.where(left > 0, words & kept, 0)
    even_keys, odd_keys = _load_constants(constants, LAST_KEYS, word)
    even_sum, odd_sum = _mix(words, even_keys, odd_keys)
    even_merge, odd_merge = _sum_stripes(*_load_constants(constants, MERGE, word))
    even = (even + even_sum) ^ even_merge
    odd = (odd + odd_sum) ^ odd_merge
    folded = (even * odd) ^ tl.umulhi(even, odd)
    length = ((last + 1) * 1024).to(tl.uint64)
    leaf = tl.sum(folded, axis=0) + length * PRIME64_1
    leaf = (leaf ^ (leaf >> 37)) * PRIME_AVALANCHE
    return leaf ^ (leaf >> 32)


@triton.jit
def _hash_at(constants, address, begin, size, CHUNK: tl.constexpr):  # noqa: N803
    """Returns the leaf of the chunk that begins ``begin`` bytes after ``address``."""
    valid = tl.minimum(size - begin, CHUNK).to(tl.int32)
    place = address + begin
    if place % 16 == 0:
        leaf = _hash_chunk(constants, place, valid, ALIGNED=True)
    else:
        leaf = _hash_chunk(constants, place, valid, ALIGNED=False)
    return leaf.to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def hash_chunks(constants, table, leaves, count, CHUNK: tl.constexpr):  # noqa: N803
    """Writes the leaf of chunk ``program_id`` of many tensors to ``leaves``.

    Args:
        constants: int64; the tiles of constants.
        table: int64; for the ``count`` tensors the number of chunks before each, their addresses,
            and their sizes in bytes (none of them 0).
        leaves: int64; one element for each chunk of all tensors, in order.
        count: The number of tensors.
        CHUNK: Bytes in a chunk.
    """
    chunk = tl.program_id(0).to(tl.int64)
    # The last tensor that begins at or before this chunk.
    low = chunk * 0
    high = low + count - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(table + middle) <= chunk
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    begin = (chunk - tl.load(table + low)) * CHUNK
    address = tl.load(table + count + low)
    size = tl.load(table + 2 * count + low)
    tl.store(leaves + chunk, _hash_at(constants, address, begin, size, CHUNK))
