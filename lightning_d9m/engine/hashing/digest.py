"""Digests: 128 bits for a tensor's bytes, dtype and shape, or for a nested value.

The definition is the same on every device (docs/digest.md): XXH3-128 over a header and the XXH3-64
of each 128 KiB of the elements. It does not depend on thread counts, blocks or the memory layout.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import mul
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from xxhash import xxh3_128_digest

from lightning_d9m.engine.hashing import xxh3
from lightning_d9m.engine.hashing.nested_values import Note, Piece, encode
from lightning_d9m.engine.state.parts import SPARSE
from lightning_d9m.errors import DigestError

# The first word of every header; it changes when the definition in docs/digest.md does.
VERSION = "d9m-digest-1"

ORDINARY = {torch.Tensor, torch.nn.Parameter}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DenseTensor(NamedTuple):
    """A strided tensor, whose elements are hashed in row-major order, and its header."""

    header: bytes
    data: torch.Tensor


def flatten_tensor(tensor: torch.Tensor) -> DenseTensor | list[Piece]:
    """Return the header and the data of a tensor, without copying it.

    A tensor that consists of others is a list of its header, these, and what describes it. Call it
    under ``torch._C.DisableTorchFunctionSubclass()``, so that no subclass interferes.

    Raises:
        DigestError: The tensor owns no memory, or its bytes have no defined order.
    """
    # A subclass first: one that wraps tensors has a shape and a layout, and only they have bytes.
    if type(tensor) not in ORDINARY:
        other = _flatten_subclass(tensor)
        if other is not None:
            return other
    if tensor.device.type == "meta":
        raise _refuse(tensor, "a meta tensor has no data", "Pass a materialized one.")
    if tensor.is_nested:
        components = tensor.detach().unbind()
        return [make_header(tensor.dtype, (len(components),), "nested"), *components]
    layout = tensor.layout
    if layout in SPARSE:
        header = make_header(tensor.dtype, tensor.shape, str(layout).removeprefix("torch."))
        return [header, *SPARSE[layout](tensor.detach())]
    if layout is not torch.strided:
        raise _refuse(
            tensor, f"the order of its elements is that of {layout}", "Pass its to_dense()."
        )
    if tensor.is_quantized:
        return _flatten_quantized(tensor.detach())
    return DenseTensor(make_header(tensor.dtype, tensor.shape), tensor)


def _flatten_quantized(tensor: torch.Tensor) -> list[Piece]:
    """Flatten a quantized tensor to its integers and to the numbers that give them values."""
    scheme = tensor.qscheme()
    header = make_header(tensor.dtype, tensor.shape, str(scheme).removeprefix("torch."))
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [header, tensor.int_repr(), *encode((tensor.q_scale(), tensor.q_zero_point()))]
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    axis = encode(tensor.q_per_channel_axis())
    return [header, tensor.int_repr(), scales, zero_points, *axis]


def _can_be_read_in_place(tensor: torch.Tensor) -> bool:
    """Return whether the elements are in row-major order in memory, at an address to read from."""
    # torch.func.jvp makes zeros that have a size and no memory: their address is 0.
    if tensor._is_zerotensor():  # noqa: SLF001 - torch has no public test
        return False
    is_ordered = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    # The kernel of CUDA reads 16 bytes at once, and a device faults at other addresses.
    return is_ordered and (tensor.is_cpu or tensor.data_ptr() % 16 == 0)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in row-major order, as integers: torch cannot copy every dtype (int4)."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    integer = _INTEGERS.get(tensor.itemsize)
    tensor = tensor if integer is None else tensor.view(integer)
    return tensor.clone(memory_format=torch.contiguous_format)


def locate(data: torch.Tensor) -> tuple[int, int]:
    """Return the address and the size in bytes of a dense tensor.

    Raises:
        DigestError: The tensor has no memory (a functorch wrapper), or no longer (a freed storage).
    """
    size = data.nbytes
    try:
        held = data.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError) as error:
        raise _refuse(
            data, "it has no memory of its own", "Call digest() outside transforms."
        ) from error
    # FSDP frees the storage of gathered parameters by resizing it to 0 bytes. The tensor keeps its
    # shape, so that reading it would crash the process.
    reach = data.numel()
    if not data.is_contiguous():
        reach = 1 + sum(map(mul, (side - 1 for side in data.shape), data.stride()))
    if size and held < (data.storage_offset() + reach) * data.itemsize:
        raise _refuse(
            data,
            f"its storage has {held:,} bytes, too few for {reach:,} elements from "
            f"{data.storage_offset():,} on",
            "Its memory was freed, as FSDP does between steps: gather the parameters first.",
        )
    return data.data_ptr(), size


@functools.lru_cache(maxsize=4096)  # a model is digested again and again
def make_header(dtype: torch.dtype, shape: tuple[int, ...], layout: str = "") -> bytes:
    """Return the header of a tensor's digest; that of a dense tensor has no layout."""
    words = (VERSION, layout, str(dtype).removeprefix("torch."), f"[{','.join(map(str, shape))}]")
    return f"{' '.join(filter(None, words))}\n".encode()


def _flatten_subclass(tensor: torch.Tensor) -> DenseTensor | list[Piece] | None:
    """Flatten a subclass that wraps other tensors; return None for one with its own elements."""
    kind = type(tensor)
    if not isinstance(tensor, torch.Tensor):
        raise DigestError(
            f"A digest is taken of a tensor; {kind.__qualname__} was given. "
            "digest_value() takes numbers, strings and containers."
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise _refuse(tensor, "it is not initialized yet", "Run the module once before.")
    # A subclass that leaves `__torch_dispatch__` alone, such as a plain Python one, has its own
    # elements; one that overrides it mostly wraps others, and its own memory means nothing.
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or tensor.is_nested:
        return None
    wrapper = cast(Any, tensor)
    if hasattr(kind, "to_local"):  # DTensor: this rank's shard, read as an ordinary tensor
        with torch.no_grad():
            return flatten_tensor(wrapper.to_local())
    if hasattr(kind, "trigger_wait"):  # AsyncCollectiveTensor: the result of a collective under way
        return flatten_tensor(wrapper.wait())
    if not hasattr(kind, "__tensor_flatten__"):
        reason = f"{kind.__qualname__} does not say where its elements are"
        raise _refuse(tensor, reason, "Pass a materialized tensor, or the tensors that it wraps.")
    names, context = wrapper.__tensor_flatten__()
    header = make_header(tensor.dtype, tensor.shape, f"{kind.__module__}.{kind.__qualname__}")
    parts = [getattr(tensor, name) for name in names]
    return [header, *parts, *encode((list(names), context))]


def _refuse(tensor: torch.Tensor, reason: str, remedy: str) -> DigestError:
    return DigestError(
        f"A tensor of {tensor.dtype} on {tensor.device} has no digest: {reason}. {remedy}"
    )


# Before the encoding, so that no value has the digest of a tensor whose header it spells.
_VALUE = f"{VERSION} value\n".encode()
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
            no defined order (MKL-DNN).

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
    queue = DigestQueue()
    queue.add(tensors)
    return queue.fetch()


def digest_value(value: object) -> str:
    """Return the digest of a nested value: 32 lowercase hexadecimal digits.

    Types count: 1, 1.0, True and "1" differ, and so do a list and a tuple. The order of a dict's
    keys and of a set's elements does not count. Functions and classes count by their qualified
    names alone. All tensors in the value cost one synchronization for each device.

    Args:
        value: None, numbers, strings, bytes, paths, enumerations, NumPy arrays and scalars,
            tensors, generators and dtypes of torch, functions, classes, and mappings, sets, lists,
            tuples, deques, dataclasses and partial functions of such.

    Raises:
        DigestError: Something in it has no defined bytes; the message says where and what.

    Examples:
        >>> digest_value({"lr": 0.1, "betas": (0.9, 0.999)})
        '6b6610f8b7295d2fa4d80d3ea0427121'
    """
    queue = DigestQueue()
    queue.add_value(value)
    return queue.fetch()[0]


@dataclass
class _StreamDigests:
    """Digests of tensors that a stream of a CUDA device reads in order.

    Attributes:
        kernel: The module ``xxh3_cuda``.
        numbers: The numbers of the tensors in the queue.
        spans: Their addresses and sizes.
        launched: The chunk digests of each launch, on the device.
        copied: Those on the host, when the event is done.
    """

    kernel: Any
    numbers: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    launched: list[torch.Tensor] = field(default_factory=list)
    copied: tuple[torch.Tensor, Any] | None = None


class DigestQueue:
    """A sequence of digests whose bytes are read when a tensor is added.

    Only fetching waits for devices, once for each stream.
    """

    # The next operation may overwrite a tensor, so its bytes are read at once. On CUDA, hashing is
    # enqueued on the current stream, after the kernel that computed the value and before one that
    # overwrites it.
    def __init__(self) -> None:
        self._recipes: list[_Recipe] = []
        self._headers: list[bytes] = []
        self._chunks: list[bytes] = []  # the digests of the chunks of each dense tensor
        self._streams: dict[Any, _StreamDigests] = {}

    @property
    def pending(self) -> bool:
        """True while devices compute digests; fetching waits for them."""
        return bool(self._streams)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Read tensors and append their digests, in one launch on each CUDA device.

        Raises:
            DigestError: As ``digest``, for the first tensor without one; nothing is appended then.
        """
        self._append(self._plan, tensors)

    def add_value(self, value: object, note: Note | None = None) -> None:
        """Read the tensors of a nested value and append its digest, that of ``digest_value``.

        ``note`` is as of ``encode``.

        Raises:
            DigestError: As ``digest_value``; then nothing is appended.
        """
        self._append(partial(self._plan_value, note=note), [value])

    def add_leaves(
        self, leaves: Iterable[object], note: Callable[[int, str], object] | None = None
    ) -> None:
        """Read tensors and other values, in one launch on each CUDA device.

        ``note`` is called with the number of each leaf that cannot be read as a whole, and why; see
        ``encode``. Without it, the type of each part without defined bytes is digested.
        """

        def plan(numbered: tuple[int, object], dense: list[DenseTensor]) -> _Recipe:
            return self._plan_leaf(numbered[1], dense, note and partial(note, numbered[0]))

        self._append(plan, enumerate(leaves))

    def _append(
        self, plan: Callable[[Any, list[DenseTensor]], _Recipe], values: Iterable[object]
    ) -> None:
        dense: list[DenseTensor] = []
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - documented in "Extending PyTorch"
            recipes = [plan(value, dense) for value in values]
            self.read_chunks([part.data for part in dense])
        self._headers += [part.header for part in dense]
        self._recipes += recipes

    def _plan(self, tensor: torch.Tensor, dense: list[DenseTensor]) -> _Recipe:
        """Append a tensor's dense tensors to ``dense``; return the parts of its digest."""
        parts = flatten_tensor(tensor)
        if isinstance(parts, DenseTensor):
            locate(parts.data)  # raises for one without memory, before anything is appended
            dense.append(parts)
            return len(self._headers) + len(dense) - 1
        return self._plan_pieces(parts, dense)

    def _plan_value(
        self, value: object, dense: list[DenseTensor], note: Note | None = None
    ) -> _Recipe:
        return self._plan_pieces([_VALUE, *encode(value, note)], dense, note)

    def _plan_leaf(self, leaf: object, dense: list[DenseTensor], note: Note | None) -> _Recipe:
        if isinstance(leaf, torch.Tensor):
            return cast(_Recipe, self._plan_pieces([leaf], dense, note or str)[0])
        encoded = encode(leaf, note or str, enters=note is not None)
        return self._plan_pieces([_VALUE, *encoded], dense, note or str)

    def _plan_pieces(
        self, pieces: Iterable[Piece], dense: list[DenseTensor], note: Note | None = None
    ) -> list[bytes | _Recipe]:
        recipe: list[bytes | _Recipe] = []
        for piece in pieces:
            planned = len(dense)
            try:
                recipe.append(piece if isinstance(piece, bytes) else self._plan(piece, dense))
            except DigestError as error:
                if note is None:
                    raise
                note(str(error))
                del dense[planned:]
                recipe.append(self._plan_value(type(piece), dense))
        return recipe

    def read_chunks(self, data: Sequence[torch.Tensor]) -> None:
        """Read tensors that have memory (see ``locate``), in one launch on each CUDA device.

        Those that cannot be read in place are copied and read one after the other.
        """
        start = len(self._chunks)
        self._chunks += [b""] * len(data)
        numbered = dict(enumerate(data, start))
        in_place = {n: one for n, one in numbered.items() if _can_be_read_in_place(one)}
        self._read_group(in_place)
        for number, one in numbered.items():
            if number not in in_place:
                # Copies of all of them would take as much memory as the model.
                self._read_group({number: _copy(one)})

    def _read_group(self, group: Mapping[int, torch.Tensor]) -> None:
        """Read tensors that can be read in place."""
        here: dict[int, tuple[int, int]] = {}
        there: dict[torch.device, dict[int, torch.Tensor]] = {}
        for number, tensor in group.items():
            if tensor.is_cpu:
                here[number] = tensor.data_ptr(), tensor.nbytes
            else:
                there.setdefault(tensor.device, {})[number] = tensor
        for device, tensors in there.items():
            self._read_on_device(device, tensors)
        # The host's tensors come last: the devices work meanwhile.
        if here:
            found = xxh3.hash_chunks(list(here.values()))
            for number, digests in zip(here, found, strict=True):
                self._chunks[number] = digests

    def _read_on_device(self, device: torch.device, tensors: dict[int, torch.Tensor]) -> None:
        kernel = load_kernel(device)
        if kernel is None:  # the digests are the same; each waits for a copy
            for number, tensor in tensors.items():
                copy = tensor.detach().cpu()
                (self._chunks[number],) = xxh3.hash_chunks([locate(copy)])
            return
        stream = torch.cuda.current_stream(device)
        reading = self._streams.setdefault(stream, _StreamDigests(kernel))
        spans = [locate(tensor) for tensor in tensors.values()]
        reading.numbers += tensors
        reading.spans += spans
        reading.launched.append(kernel.start_hashing(spans, device))
        for tensor in tensors.values():
            # The memory may belong to another stream's pool and be reused before it is read.
            tensor.record_stream(stream)

    def start_copies(self) -> None:
        """Copy the results of CUDA devices to the host without waiting."""
        # Probes call this at the end of a batch and fetch at the end of a later one, when the
        # copies have arrived, so that the host does not wait for the device in any batch.
        for stream, reading in self._streams.items():
            with torch.cuda.stream(stream):
                reading.copied = reading.kernel.start_copy(reading.launched), stream.record_event()

    def fetch_chunks(self) -> list[bytes]:
        """Wait for the devices; return for each dense tensor 8 bytes for each 128 KiB."""
        if any(reading.copied is None for reading in self._streams.values()):
            self.start_copies()
        for reading in self._streams.values():
            copy, done = cast(Any, reading.copied)
            done.synchronize()
            found = xxh3.split_chunk_digests(copy.numpy().tobytes(), reading.spans)
            for number, chunks in zip(reading.numbers, found, strict=True):
                self._chunks[number] = chunks
        self._streams = {}
        return self._chunks

    def fetch(self) -> list[str]:
        """Wait for the devices and return all digests, in the order they were added."""
        chunks = zip(self._headers, self.fetch_chunks(), strict=True)
        dense = [xxh3_128_digest(header + found) for header, found in chunks]
        return [_follow(recipe, dense).hex() for recipe in self._recipes]


def _follow(recipe: _Recipe, dense: Sequence[bytes]) -> bytes:
    if isinstance(recipe, int):
        return dense[recipe]
    parts = [part if isinstance(part, bytes) else _follow(part, dense) for part in recipe]
    return xxh3_128_digest(b"".join(parts))


# Once for each device, because compilers and drivers are trusted only as far as they agree with the
# CPU: a digest that differed between devices would look like a divergence of the training.
@functools.cache
def load_kernel(device: torch.device) -> ModuleType | None:
    """Return the module of the CUDA kernel if it agrees with the CPU on this device."""
    if device.type != "cuda":
        return None
    try:
        from lightning_d9m.engine.hashing import xxh3_cuda

        if xxh3_cuda.check_kernel(device):
            return xxh3_cuda
        reason = "its digests differ from the CPU's"
    except Exception as error:  # noqa: BLE001 - TritonError is a plain Exception; any failure falls back
        # Without Triton, a compiler or Python's headers, or on a device that Triton does not know.
        from lightning_d9m.ops.patches.triton.launch import explain_failure

        reason = explain_failure(error, device)
    warnings.warn(
        f"The digest kernel cannot be used on {device} ({reason}). Digests are the same without "
        "it, but every tensor is copied to the host.",
        stacklevel=2,
    )
    return None
