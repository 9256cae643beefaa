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
from triton.runtime import JITFunction

from lightning_d9m.errors import SettingError
from lightning_d9m.hashing.xxh3 import cpu, triton_kernel
from lightning_d9m.hashing.xxh3.cpu import CHUNK_BYTES, count_chunks

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
        memory: Addresses and sizes in bytes. Their owners must be alive until the digests are
            fetched.
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
        kernel: Any = triton_kernel.hash_chunks
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
    here = torch.empty(chunk_digests.shape, dtype=torch.int64, pin_memory=True)
    return here.copy_(chunk_digests, non_blocking=True)


@functools.cache
def _load_constants(device: torch.device) -> torch.Tensor:
    """Return the constants as ``triton_kernel`` expects them: tiles of 16 stripes of 8 words.

    A tile of keys has the secret's words for each stripe of a block: stripe n reads the secret at
    byte 8n, the last stripe of the input at byte 121. The other tiles have their 8 words in stripe
    0. They are copied once, and waited for: every stream reads them.
    """
    tiles = np.zeros((5, 16, 8), np.uint64)
    tiles[0] = tiles[1] = [_secret_at(8 * stripe) for stripe in range(16)]
    tiles[1, 15] = _secret_at(121)
    tiles[2, 0] = _START
    tiles[3, 0] = _secret_at(128)
    tiles[4, 0] = _secret_at(11)
    return torch.from_numpy(tiles.reshape(-1).view(np.int64)).to(device)


def hash_memory(memory: Sequence[tuple[int, int]], device: torch.device) -> list[bytes]:
    """Hash memory of one device and wait for it; see ``cpu.hash_chunks``."""
    found = start_hashing(memory, device).cpu().numpy().tobytes()
    return cpu.split_chunk_digests(found, memory)


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
    here = [(data.data_ptr() + skew, length) for skew, length in spans]
    return hash_memory(memory, device) == cpu.hash_chunks(here)
