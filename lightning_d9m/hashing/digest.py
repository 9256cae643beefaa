"""Digests: 128 bits for a tensor's bytes, dtype and shape, or for a nested value.

The definition is the same on every device (docs/digest.md): XXH3-128 over a header and the XXH3-64
of each 128 KiB of the elements. It does not depend on thread counts, blocks or the memory layout.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import cast

import torch
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from lightning_d9m.hashing.tensor_bytes import (
    VERSION,
    DenseTensor,
    flatten_tensor,
    locate,
    locate_quickly,
)
from lightning_d9m.hashing.value_bytes import Piece, encode
from lightning_d9m.hashing.xxh3 import cpu as xxh3_cpu

_VALUE = f"{VERSION} value\n".encode()
_SMALL = 16384  # bytes of a tensor
# The parts that are hashed at the end: bytes, and numbers of dense tensors for their digests.
_Recipe = int | list["bytes | _Recipe"]


def digest(value: torch.Tensor) -> str:
    """Return the digest of a tensor: 32 lowercase hexadecimal digits.

    Two tensors have equal digests if dtype, shape and every byte of their elements are equal;
    strides, device, ``requires_grad`` and the class do not matter. -0.0 differs from 0.0, and NaNs
    of different payloads differ. A sparse tensor is digested as it is stored, a DTensor as this
    rank's shard.

    Raises:
        DigestError: The tensor has no bytes (meta, fake, inside a transform, freed), or they have
            no defined order (quantized, MKL-DNN).

    Examples:
        >>> digest(torch.arange(3))
        '7903ab78e12a69f5e899edcad76d85c7'
    """
    return digest_many([value])[0]


def digest_many(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return the digest of each tensor, in order, with one synchronization for each device.

    On CUDA the tensors of a device are hashed in one launch on its current stream, and 8 bytes for
    each 128 KiB are copied back. Without Triton, and on other accelerators, the tensors are copied
    to the host one after the other: the digests are the same, the copies take longer.

    Raises:
        DigestError: As digest(), for the first tensor that has none.
    """
    plain: list[DenseTensor] = []
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - documented in "Extending PyTorch"
        recipes = [_digest_small(tensor) or _plan(tensor, plain) for tensor in tensors]
        digests = _hash_all(plain)
    return [
        recipe if isinstance(recipe, str) else _follow(recipe, digests).hex() for recipe in recipes
    ]


def digest_value(value: object) -> str:
    """Return the digest of a nested value: 32 lowercase hexadecimal digits.

    Types count: 1, 1.0, True and "1" differ, and so do a list and a tuple. The order of a dict's
    keys and of a set's elements does not count. Functions and classes count by their qualified
    names alone. All tensors in the value cost one synchronization for each device.

    Args:
        value: None, numbers, strings, bytes, paths, enumerations, NumPy arrays and scalars,
            tensors, generators and dtypes of torch, functions, classes, and mappings, sets, lists,
            tuples, dataclasses and partial functions of such.

    Raises:
        DigestError: Something in it has no defined bytes; the message says where and what.

    Examples:
        >>> digest_value({"lr": 0.1, "betas": (0.9, 0.999)})
        '6b6610f8b7295d2fa4d80d3ea0427121'
    """
    return digest_pieces(encode(value))


def digest_pieces(pieces: Iterable[Piece]) -> str:
    """Return the digest of a value that ``value_bytes.encode`` has encoded."""
    pieces = [_VALUE, *pieces]
    if {bytes}.issuperset(map(type, pieces)):
        return xxh3_128_hexdigest(b"".join(cast("list[bytes]", pieces)))
    plain: list[DenseTensor] = []
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in digest_many
        recipe = _plan_pieces(pieces, plain)
        digests = _hash_all(plain)
    return _follow(recipe, digests).hex()


def _digest_small(tensor: torch.Tensor) -> str | None:
    """Return the digest of a small contiguous CPU tensor, three times as fast as by a plan.

    Returns:
        None for any other tensor. Many large ones are hashed on several threads.
    """
    place = locate_quickly(tensor)
    if place is None or place[2] > _SMALL:
        return None
    header, address, size = place
    copy = xxh3_cpu.copy_span(address, size)
    return xxh3_128_hexdigest(header + xxh3_cpu.hash_copy(copy))


def _plan(tensor: torch.Tensor, plain: list[DenseTensor]) -> _Recipe:
    """Append a tensor's dense tensors to ``plain``; return the parts of its digest."""
    parts = flatten_tensor(tensor)
    if isinstance(parts, DenseTensor):
        plain.append(parts)
        return len(plain) - 1
    context = [] if parts.context is None else encode(parts.context)
    return _plan_pieces([parts.header, *parts.components, *context], plain)


def _plan_pieces(pieces: Sequence[Piece], plain: list[DenseTensor]) -> _Recipe:
    return [piece if isinstance(piece, bytes) else _plan(piece, plain) for piece in pieces]


def _follow(recipe: _Recipe, digests: Sequence[bytes]) -> bytes:
    if isinstance(recipe, int):
        return digests[recipe]
    parts = [part if isinstance(part, bytes) else _follow(part, digests) for part in recipe]
    return xxh3_128_digest(b"".join(parts))


def hash_chunks_of(data: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the digests of each tensor's chunks, 8 bytes each, wherever the tensors are.

    Args:
        data: Dense tensors, in row-major order in memory.
    """
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(data):
        by_device.setdefault(tensor.device, []).append(index)
    started = [
        (device, indices, _start_hashing([data[index] for index in indices], device))
        for device, indices in by_device.items()
    ]
    found = [b""] * len(data)
    # The CPU first: the other devices work meanwhile.
    for _, indices, finish in sorted(started, key=lambda start: start[0].type != "cpu"):
        for index, chunk_digests in zip(indices, finish(), strict=True):
            found[index] = chunk_digests
    return found


def _hash_all(plain: Sequence[DenseTensor]) -> list[bytes]:
    found = hash_chunks_of([part.data for part in plain])
    return [
        xxh3_128_digest(part.header + chunk_digests)
        for part, chunk_digests in zip(plain, found, strict=True)
    ]


def _start_hashing(data: Sequence[torch.Tensor], device: torch.device) -> Callable[[], list[bytes]]:
    """Start hashing on a device; return the function that finishes and returns chunk digests."""
    if device.type == "cpu":
        return lambda: xxh3_cpu.hash_chunks([locate(tensor) for tensor in data])
    kernel = _load_kernel(device)
    if kernel is None:
        return lambda: [_hash_copy(tensor) for tensor in data]
    memory = [locate(tensor) for tensor in data]
    started = kernel.start_hashing(memory, device)
    return lambda: cast(list[bytes], kernel.fetch_chunk_digests(started, memory))


def _hash_copy(tensor: torch.Tensor) -> bytes:
    copy = tensor.detach().cpu()
    return xxh3_cpu.hash_chunks([locate(copy)])[0]


@functools.cache
def _load_kernel(device: torch.device) -> ModuleType | None:
    """Return the module of the CUDA kernel if it agrees with the CPU on this device."""
    if device.type != "cuda":
        return None
    try:
        from lightning_d9m.hashing.xxh3 import cuda as xxh3_cuda

        if xxh3_cuda.check_kernel(device):
            return xxh3_cuda
        reason = "its digests differ from the CPU's"
    except Exception as error:  # noqa: BLE001 - TritonError is a plain Exception; any failure falls back
        # Without Triton, a compiler or Python's headers, or on a device that Triton does not know.
        from lightning_d9m.patches.triton.launch import explain_failure

        reason = explain_failure(error, device)
    warnings.warn(
        f"The digest kernel cannot be used on {device} ({reason}). Digests are the same without "
        "it, but every tensor is copied to the host.",
        stacklevel=2,
    )
    return None
