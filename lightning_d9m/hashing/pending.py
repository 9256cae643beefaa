"""Digests that are begun now and fetched later, all together.

A value that is probed may be overwritten by the next operation, so its bytes are read at once. On
the CPU much is hashed there and then (a copy for later would read the memory as well, and write it
too); little is copied, because to hash all of it one after the other takes less time than to begin
hashing in the middle of a training step, whose code and data fill the caches. On CUDA the hashing
is put on the current stream, behind what made the value and before what overwrites it. Nothing
waits for a device until the digests are fetched, and then once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from lightning_d9m.hashing import xxh3_cpu
from lightning_d9m.hashing.address_cache import TensorAddresses, digest_located
from lightning_d9m.hashing.digest import _follow, _load_kernel, _plan, _Recipe
from lightning_d9m.hashing.tensor_bytes import (
    DenseTensor,
    flatten_tensor,
    locate,
    locate_quickly,
    remember_form,
)

_Copy = tuple[bytes, bytes]  # what precedes a value in its digest, and the value, padded
_LITTLE = 16384  # bytes


@dataclass
class _PendingDigest:
    """What is under way on one device."""

    leaves: list[torch.Tensor] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    landed: torch.Tensor | None = None
    arrival: torch.Event | None = None


class DigestQueue:
    """A sequence of digests whose bytes are read when a tensor is added.

    Attributes:
        flights: What is under way, by device; fetching waits for it.
    """

    def __init__(self) -> None:
        self._recipes: list[_Recipe | str | _Copy] = []
        self._headers: list[bytes] = []
        self._digests: list[bytes] = []
        self.flights: dict[torch.device, _PendingDigest] = {}

    def __len__(self) -> int:
        """The number of digests."""
        return len(self._recipes)

    def add_digest(self, digest: str) -> None:
        """Put a digest that is known already in its place."""
        self._recipes.append(digest)

    def add_located(self, located: TensorAddresses) -> None:
        """Put the digests of memory of this process in their places."""
        self._recipes += digest_located(located)

    def add_one(self, tensor: torch.Tensor) -> None:
        """Begin the digest of one tensor.

        Raises:
            DigestError: As ``digest``; then none is added.
        """
        place = locate_quickly(tensor)
        if place is None:
            self._add_other(tensor)
            return
        header, address, size = place
        if size <= _LITTLE:
            self._recipes.append((header, xxh3_cpu.copy_span(address, size)))
            return
        self._recipes.append(xxh3_128_hexdigest(header + xxh3_cpu.hash_span(address, size)))

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin the digests of tensors; on each CUDA device they are one launch.

        Raises:
            DigestError: As ``digest``, for the first tensor that has none; then none is added.
        """
        start = len(self._digests)
        plain: list[DenseTensor] = []
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in digest_many
            recipes = [_plan(tensor, plain) for tensor in tensors]
            memory = [locate(part.data) for part in plain]
            self._headers += [part.header for part in plain]
            self._digests += [b""] * len(plain)
            self._begin(plain, memory, start)
        self._recipes += [_shift(recipe, start) for recipe in recipes]

    def depart(self) -> None:
        """Let what CUDA devices have found travel to the host while other work goes on."""
        for device, flight in self.flights.items():
            with torch.cuda.device(device):
                leaves = torch.cat(flight.leaves)
                flight.landed = torch.empty(leaves.shape, dtype=leaves.dtype, pin_memory=True)
                flight.landed.copy_(leaves, non_blocking=True)
                flight.arrival = torch.cuda.current_stream().record_event()
                flight.leaves = [leaves]

    def fetch(self) -> list[str]:
        """Wait for what is under way and return all digests, in the order they were added."""
        for flight in self.flights.values():
            if flight.landed is None or flight.arrival is None:
                landed = torch.cat(flight.leaves).cpu()
            else:
                flight.arrival.synchronize()
                landed = flight.landed
            parts = xxh3_cpu.split_leaves(landed.numpy().tobytes(), flight.memory)
            for index, leaves in zip(flight.indices, parts, strict=True):
                self._digests[index] = xxh3_128_digest(self._headers[index] + leaves)
        self.flights = {}
        found: list[str] = []
        for recipe in self._recipes:
            if isinstance(recipe, str):
                found.append(recipe)
            elif isinstance(recipe, tuple):
                header, copy = recipe
                found.append(xxh3_128_hexdigest(header + xxh3_cpu.hash_copy(copy)))
            else:
                found.append(_follow(recipe, self._digests).hex())
        return found

    def _add_other(self, tensor: torch.Tensor) -> None:
        """Begin the digest of a tensor of a form that is new, or not in order, or elsewhere."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in digest_many
            parts = flatten_tensor(tensor)
        if isinstance(parts, DenseTensor) and parts.data is tensor:
            remember_form(parts)
        self.add([tensor])

    def _begin(
        self, plain: Sequence[DenseTensor], memory: Sequence[tuple[int, int]], start: int
    ) -> None:
        here: list[int] = []
        there: dict[torch.device, list[int]] = {}
        for index, part in enumerate(plain):
            device = part.data.device
            if device.type == "cpu":
                here.append(index)
            else:
                there.setdefault(device, []).append(index)
        leaves = xxh3_cpu.hash_chunks([memory[index] for index in here])
        for index, own in zip(here, leaves, strict=True):
            self._digests[start + index] = xxh3_128_digest(plain[index].header + own)
        for device, indices in there.items():
            self._begin_there(device, plain, memory, start, indices)

    def _begin_there(
        self,
        device: torch.device,
        plain: Sequence[DenseTensor],
        memory: Sequence[tuple[int, int]],
        start: int,
        indices: Sequence[int],
    ) -> None:
        kernel = _load_kernel(device)
        if kernel is None:  # the digests are the same, each costs a copy that is waited for
            for index in indices:
                copy = plain[index].data.detach().cpu()
                (own,) = xxh3_cpu.hash_chunks([locate(copy)])
                self._digests[start + index] = xxh3_128_digest(plain[index].header + own)
            return
        flight = self.flights.setdefault(device, _PendingDigest())
        places = [memory[index] for index in indices]
        flight.leaves.append(kernel.start_hashing(places, device))
        flight.memory += places
        flight.indices += [start + index for index in indices]
        stream = torch.cuda.current_stream(device)
        for index in indices:
            # Its memory may come from another stream's pool, and be given away before it is read.
            plain[index].data.record_stream(stream)


def _shift(recipe: _Recipe, start: int) -> _Recipe:
    """Let a recipe count from the front of the whole sequence."""
    if isinstance(recipe, int):
        return recipe + start
    return [part if isinstance(part, bytes) else _shift(part, start) for part in recipe]
