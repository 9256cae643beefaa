"""The chunk digests on CUDA: one launch for all tensors of a device, without copying them.

The constants (5 KiB) stay on the device. For several tensors a table is copied there (24 bytes for
each); a table of tensors that stay where they are is kept. The chunk digests are copied back (8
bytes for each 128 KiB). Importing this module imports Triton.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from triton.runtime import JITFunction

from lightning_d9m.errors import SettingError
from lightning_d9m.hashing.xxh3 import cpu, triton_kernel
from lightning_d9m.hashing.xxh3.cpu import CHUNK_BYTES

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


def _make_constants() -> npt.NDArray[np.int64]:
    """Return the constants as ``triton_kernel`` expects them: tiles of 16 stripes of 8 words.

    A tile of keys has the secret's words for each stripe of a block: stripe n reads the secret at
    byte 8n, the last stripe of the input at byte 121. The other tiles have their 8 words in stripe
    0.
    """
    tiles = np.zeros((5, 16, 8), np.uint64)
    tiles[0] = tiles[1] = [_secret_at(8 * stripe) for stripe in range(16)]
    tiles[1, 15] = _secret_at(121)
    tiles[2, 0] = _START
    tiles[3, 0] = _secret_at(128)
    tiles[4, 0] = _secret_at(11)
    return tiles.reshape(-1).view(np.int64)


_CONSTANTS = _make_constants()
# A table takes the host longer than this many launches (benchmarks/digest_host.py).
_MAX_SPANS_ALONE = 2


class AddressTable:
    """Memory that one launch hashes: the addresses and sizes of tensors, on their device.

    Keep this object for memory that is hashed repeatedly: it is copied to the device once.

    Attributes:
        chunks: The number of chunks.
        bounds: Begin and end of each span's chunk digests, in bytes.
    """

    def __init__(self, memory: Sequence[tuple[int, int]], device: torch.device) -> None:
        counts = [-(-size // CHUNK_BYTES) for _, size in memory]
        ends = [0, *accumulate(counts)]
        self.chunks = ends[-1]
        self.bounds = [(8 * begin, 8 * end) for begin, end in pairwise(ends)]
        self._device = device
        filled = [(end, *span) for end, span in zip(ends, memory, strict=False) if span[1]]
        self._count = len(filled)
        self._table = upload(np.array(filled, np.int64).T, device) if filled else None

    def start(self, chunk_digests: torch.Tensor, first: int) -> None:
        """Start hashing on the current stream; write from place ``first`` on."""
        if self._table is not None:
            arguments = (self._table, chunk_digests, first, self._count)
            _launch(triton_kernel.hash_chunks, self.chunks, self._device, *arguments)


def start_hashing(memory: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Start hashing memory of one device on its current stream, without waiting.

    Args:
        memory: Addresses and sizes in bytes. Their owners must be alive until the digests are
            fetched.
        device: The device of the memory.

    Returns:
        int64 on ``device``: the XXH3-64 of each chunk of the first, the second, ...
    """
    chunk_digests = allocate(count_chunks(memory), device)
    hash_into(chunk_digests, 0, memory, device)
    return chunk_digests


def hash_into(
    chunk_digests: torch.Tensor,
    first: int,
    memory: Sequence[tuple[int, int]],
    device: torch.device,
) -> None:
    """Start hashing on the current stream; write the chunk digests from place ``first`` on.

    A few spans get a launch each, which needs no table and so no copy to the device.
    """
    if len(memory) > _MAX_SPANS_ALONE:
        AddressTable(memory, device).start(chunk_digests, first)
        return
    for address, size in memory:
        chunks = -(-size // CHUNK_BYTES)
        if size:
            arguments = (chunk_digests, first, address, size)
            _launch(triton_kernel.hash_tensor, chunks, device, *arguments)
        first += chunks


def count_chunks(memory: Sequence[tuple[int, int]]) -> int:
    """Return the number of chunks of all spans."""
    return sum(-(-size // CHUNK_BYTES) for _, size in memory)


def allocate(elements: int, device: torch.device) -> torch.Tensor:
    """Return int64 memory on a device."""
    return torch.empty(elements, dtype=torch.int64, device=device)


def upload(numbers: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copy numbers to a device on its current stream, without waiting, as one row."""
    cuda = device.type == "cuda"
    # A copy from pinned memory does not wait for the device.
    here = torch.empty(numbers.size, dtype=torch.int64, device="cpu", pin_memory=cuda)
    here.numpy()[:] = numbers.reshape(-1)
    return here.to(device, non_blocking=True)


def start_copy(chunk_digests: torch.Tensor) -> torch.Tensor:
    """Copy chunk digests to pinned memory on the current stream, without waiting."""
    here = torch.empty(chunk_digests.shape, dtype=torch.int64, pin_memory=True)
    return here.copy_(chunk_digests, non_blocking=True)


@functools.cache
def _load_constants(device: torch.device) -> torch.Tensor:
    """Return the constants on a device; copied once, and waited for: every stream reads them."""
    return torch.from_numpy(_CONSTANTS).to(device)


def _launch(kernel: Any, programs: int, device: torch.device, *arguments: object) -> None:
    cuda = device.type == "cuda"
    with torch.cuda.device(device if cuda else -1):
        if cuda and torch.cuda.is_current_stream_capturing():
            raise SettingError(
                f"A digest of memory on {device} was requested while a CUDA graph is captured: a "
                "replay of the graph would repeat the kernel, but not read its result. Capture the "
                "graph before the training starts, or leave the captured modules out of the probes "
                "(probe_modules)."
            )
        kernel[(programs,)](
            _load_constants(device),
            *arguments,
            CHUNK=CHUNK_BYTES,
            num_warps=1,
            enable_fp_fusion=False,  # the kernel has no floats; Triton 3.9 warns if this is unset
        )


def fetch_chunk_digests(
    chunk_digests: torch.Tensor, memory: Sequence[tuple[int, int]]
) -> list[bytes]:
    """Wait for the device and return the chunk digests of each span of memory.

    Returns:
        For each span, 8 bytes for each chunk, as ``cpu.hash_chunks`` does.
    """
    return cpu.split_chunk_digests(chunk_digests.cpu().numpy().tobytes(), memory)


def check_kernel(device: torch.device) -> bool:
    """Return whether the kernel agrees with the CPU on this device, for any alignment."""
    if device.type == "cuda" and not isinstance(triton_kernel.hash_chunks, JITFunction):
        return False  # TRITON_INTERPRET=1 runs the kernel on the CPU, which cannot read CUDA memory
    generator = torch.Generator("cpu").manual_seed(0)
    size = CHUNK_BYTES + 1500
    data = torch.randint(256, (size,), dtype=torch.uint8, device="cpu", generator=generator)
    there = data.to(device)
    spans = [(skew, length) for skew in (0, 1, 8) for length in (1, 1024, 1500)]
    spans += [(0, size), (3, size - 3)]
    memory = [(there.data_ptr() + skew, length) for skew, length in spans]
    actual = fetch_chunk_digests(start_hashing(memory, device), memory)
    # One by one, with the other kernel.
    alone = [fetch_chunk_digests(start_hashing([span], device), [span])[0] for span in memory]
    here = [(data.data_ptr() + skew, length) for skew, length in spans]
    return actual == alone == cpu.hash_chunks(here)
