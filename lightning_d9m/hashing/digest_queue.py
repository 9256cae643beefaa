"""A queue of digests: bytes are read when a tensor is added, digests are fetched later.

The next operation may overwrite a probed value, so its bytes are read at once. On the CPU, large
tensors are hashed at once, because a copy would read the same memory and write it, too. Small ones
are copied: hashing all copies in a row takes less time than starting to hash in the middle of a
training step, whose code and data fill the caches. On CUDA, hashing is enqueued on the current
stream, after the kernel that computed the value and before one that overwrites it. Only fetching
waits for devices, once for each stream.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import add
from typing import Any

import torch
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from lightning_d9m.hashing.address_cache import TensorAddresses
from lightning_d9m.hashing.digest import (
    _VALUE,
    _follow,
    _load_kernel,
    _plan,
    _plan_pieces,
    _Recipe,
)
from lightning_d9m.hashing.stream_digests import StreamDigests
from lightning_d9m.hashing.tensor_bytes import (
    DenseTensor,
    flatten_tensor,
    locate,
    locate_quickly,
)
from lightning_d9m.hashing.value_bytes import encode
from lightning_d9m.hashing.xxh3 import cpu as xxh3_cpu

_Copy = tuple[bytes, bytes]  # the header of a value's digest, and the padded value
_MAX_COPY_BYTES = 16384


class DigestQueue:
    """A sequence of digests whose bytes are read when a tensor is added.

    Attributes:
        pending: Digests that devices compute, by device and stream; fetching waits for them.
    """

    def __init__(self) -> None:
        self._recipes: list[_Recipe | str | _Copy] = []
        self._headers: list[bytes] = []
        self._digests: list[bytes] = []
        self.pending: dict[tuple[torch.device, Any], StreamDigests] = {}
        self._is_collecting = False

    def __len__(self) -> int:
        """The number of digests."""
        return len(self._recipes)

    def add_digest(self, digest: str) -> None:
        """Append a known digest."""
        self._recipes.append(digest)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Read the tensors that are added in the body in one launch for each stream.

        The body must not change them, nor the current stream.
        """
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False
            for pending in self.pending.values():
                pending.launch()

    def add_located(self, located: TensorAddresses) -> None:
        """Append the digests of tensors whose addresses are known.

        Tensors of a CUDA device must live until the digests are fetched.
        """
        start = len(self._recipes)
        self._recipes += [""] * len(located.headers)
        for part in located.parts:
            headers = located.headers
            if len(part.indices) < len(headers):
                headers = [headers[index] for index in part.indices]

            def receive(
                found: list[bytes],
                headers: Sequence[bytes] = headers,
                indices: Sequence[int] = part.indices,
            ) -> None:
                digests = map(xxh3_128_hexdigest, map(add, headers, found))
                for index, digest in zip(indices, digests, strict=True):
                    self._recipes[start + index] = digest

            if isinstance(part.memory, xxh3_cpu.Chunks):
                receive(part.memory.hash())
            else:
                self._find_pending(part.device, part.kernel).add_table(part.memory, receive)

    def add_one(self, tensor: torch.Tensor) -> None:
        """Read one tensor and append its digest.

        Raises:
            DigestError: As ``digest``; then nothing is appended.
        """
        place = locate_quickly(tensor)
        if place is None:
            self._add_other(tensor)
            return
        header, address, size = place
        if size <= _MAX_COPY_BYTES:
            self._recipes.append((header, xxh3_cpu.copy_span(address, size)))
            return
        self._recipes.append(xxh3_128_hexdigest(header + xxh3_cpu.hash_span(address, size)))

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Read tensors and append their digests, in one launch on each CUDA device.

        Raises:
            DigestError: As ``digest``, for the first tensor without one; nothing is appended then.
        """
        self._add(lambda plain: [_plan(tensor, plain) for tensor in tensors])

    def add_value(self, value: object) -> None:
        """Read the tensors of a nested value and append its digest, that of ``digest_value``.

        Raises:
            DigestError: As ``digest_value``; then nothing is appended.
        """
        pieces = [_VALUE, *encode(value)]
        self._add(lambda plain: [_plan_pieces(pieces, plain)])

    def _add(self, plan: Callable[[list[DenseTensor]], Iterable[_Recipe]]) -> None:
        start = len(self._digests)
        plain: list[DenseTensor] = []
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in digest_many
            recipes = plan(plain)
            memory = [locate(part.data) for part in plain]
            self._headers += [part.header for part in plain]
            self._digests += [b""] * len(plain)
            self._begin(plain, memory, start)
        self._recipes += [_shift(recipe, start) for recipe in recipes]

    def start_copies(self) -> None:
        """Copy the results of CUDA devices to the host without waiting."""
        for pending in self.pending.values():
            pending.start_copy()

    def fetch(self) -> list[str]:
        """Wait for the devices and return all digests, in the order they were added."""
        for pending in self.pending.values():
            pending.fetch()
        self.pending = {}
        digests: list[str] = []
        for recipe in self._recipes:
            if isinstance(recipe, str):
                digests.append(recipe)
            elif isinstance(recipe, tuple):
                header, copy = recipe
                digests.append(xxh3_128_hexdigest(header + xxh3_cpu.hash_copy(copy)))
            else:
                digests.append(_follow(recipe, self._digests).hex())
        return digests

    def _add_other(self, tensor: torch.Tensor) -> None:
        """Append the digest of a tensor that is not contiguous, or not on the CPU."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in digest_many
            part = flatten_tensor(tensor)
            if not isinstance(part, DenseTensor):
                self.add([tensor])
                return
            memory = locate(part.data)
            number = len(self._digests)
            self._headers.append(part.header)
            self._digests.append(b"")
            self._begin([part], [memory], number)
        self._recipes.append(number)

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
        found = xxh3_cpu.hash_chunks([memory[index] for index in here])
        for index, own in zip(here, found, strict=True):
            self._digests[start + index] = xxh3_128_digest(plain[index].header + own)
        for device, indices in there.items():
            self._begin_on_device(device, plain, memory, start, indices)

    def _begin_on_device(
        self,
        device: torch.device,
        plain: Sequence[DenseTensor],
        memory: Sequence[tuple[int, int]],
        start: int,
        indices: Sequence[int],
    ) -> None:
        kernel = _load_kernel(device)
        if kernel is None:  # the digests are the same; each waits for a copy
            for index in indices:
                copy = plain[index].data.detach().cpu()
                (own,) = xxh3_cpu.hash_chunks([locate(copy)])
                self._digests[start + index] = xxh3_128_digest(plain[index].header + own)
            return
        pending = self._find_pending(device, kernel)

        def receive(found: list[bytes]) -> None:
            for index, own in zip(indices, found, strict=True):
                self._digests[start + index] = xxh3_128_digest(self._headers[start + index] + own)

        tensors = [plain[index].data for index in indices]
        pending.add(tensors, [memory[index] for index in indices], receive)
        if not self._is_collecting:
            pending.launch()

    def _find_pending(self, device: torch.device, kernel: Any) -> StreamDigests:
        """Return the digests of the current stream of a device."""
        stream = torch.cuda.current_stream(device)
        pending = self.pending.get((device, stream))
        if pending is None:
            pending = self.pending[device, stream] = StreamDigests(kernel, device, stream)
        return pending


def _shift(recipe: _Recipe, start: int) -> _Recipe:
    """Return a recipe with ``start`` added to each number of a dense tensor."""
    if isinstance(recipe, int):
        return recipe + start
    return [part if isinstance(part, bytes) else _shift(part, start) for part in recipe]
