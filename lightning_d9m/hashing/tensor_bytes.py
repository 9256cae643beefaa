"""The header and bytes of any torch tensor, from which its digest is computed."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from lightning_d9m.errors import DigestError
from lightning_d9m.state.parts import SPARSE

# The first word of every header; it changes when the definition in docs/digest.md does.
VERSION = "d9m-digest-1"

_ORDINARY = {torch.Tensor, torch.nn.Parameter}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}


class DenseTensor(NamedTuple):
    """A tensor whose elements are in row-major order in memory."""

    header: bytes
    data: torch.Tensor


class NestedTensor(NamedTuple):
    """A tensor that consists of other tensors and of values that describe it."""

    header: bytes
    components: Sequence[torch.Tensor]
    context: object = None


def flatten_tensor(tensor: torch.Tensor) -> DenseTensor | NestedTensor:
    """Return the header and the data of a tensor; copy it only if it is not in row-major order.

    Call it under ``torch._C.DisableTorchFunctionSubclass()``, so that no subclass interferes.

    Raises:
        DigestError: The tensor has no bytes of its own, or they have no defined order.
    """
    if type(tensor) not in _ORDINARY:
        other = _flatten_subclass(tensor)
        if other is not None:
            return other
    if tensor.is_nested:
        components = tensor.detach().unbind()
        return NestedTensor(_header(tensor.dtype, (len(components),), "nested"), components)
    layout = tensor.layout
    if layout in SPARSE:
        header = _header(tensor.dtype, tensor.shape, str(layout).removeprefix("torch."))
        return NestedTensor(header, SPARSE[layout](tensor.detach()))
    if layout is not torch.strided:
        raise _refuse(
            tensor, f"the order of its elements is that of {layout}", "Pass its to_dense()."
        )
    if tensor.is_quantized:
        raise _refuse(
            tensor,
            f"{tensor.dtype} has a quantizer beside its bytes",
            "Pass its int_repr() and q_scale().",
        )
    if tensor.device.type == "meta":
        raise _refuse(tensor, "a meta tensor has no data", "Pass a materialized one.")
    header = _header(tensor.dtype, tensor.shape)
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = _lay_out(tensor)
    return DenseTensor(header, tensor)


def describe_dense(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes | None:
    """Return the header of a dense tensor; None for a dtype that has more than its bytes."""
    return None if dtype in _QUANTIZED else _header(dtype, shape)


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
    if size and held < data.storage_offset() * data.itemsize + size:
        raise _refuse(
            data,
            f"its storage has {held:,} bytes, too few for {size:,} at {data.storage_offset():,}",
            "Its memory was freed, as FSDP does between steps: gather the parameters first.",
        )
    return data.data_ptr(), size


@functools.lru_cache(maxsize=4096)  # a model is digested again and again
def _header(dtype: torch.dtype, shape: tuple[int, ...], layout: str = "") -> bytes:
    words = (VERSION, layout, str(dtype).removeprefix("torch."), f"[{','.join(map(str, shape))}]")
    return f"{' '.join(filter(None, words))}\n".encode()


def _lay_out(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the elements into row-major order, with conjugation and negation applied."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    # As integers, because torch cannot copy every dtype (int4) and must not interpret any.
    integer = _INTEGERS.get(tensor.itemsize)
    return (tensor if integer is None else tensor.view(integer)).contiguous()


def _flatten_subclass(tensor: torch.Tensor) -> DenseTensor | NestedTensor | None:
    """Flatten a subclass that wraps other tensors; return None for one with its own elements."""
    kind = type(tensor)
    if not isinstance(tensor, torch.Tensor):
        raise DigestError(
            f"A digest is taken of a tensor; {kind.__qualname__} was given. "
            "digest_value() takes numbers, strings and containers."
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise _refuse(tensor, "it is not initialized yet", "Run the module once before.")
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or tensor.is_nested:
        return None
    wrapper = cast(Any, tensor)
    if hasattr(kind, "to_local"):  # DTensor: this rank's shard, as if it were a tensor of its own
        with torch.no_grad():
            return flatten_tensor(wrapper.to_local())
    if hasattr(kind, "trigger_wait"):  # AsyncCollectiveTensor: the result of a collective under way
        return flatten_tensor(wrapper.wait())
    if not hasattr(kind, "__tensor_flatten__"):
        reason = f"{kind.__qualname__} does not say where its elements are"
        raise _refuse(tensor, reason, "Pass a materialized tensor, or the tensors that it wraps.")
    names, context = wrapper.__tensor_flatten__()
    header = _header(tensor.dtype, tensor.shape, f"{kind.__module__}.{kind.__qualname__}")
    return NestedTensor(header, [getattr(tensor, name) for name in names], (list(names), context))


def _refuse(tensor: torch.Tensor, reason: str, remedy: str) -> DigestError:
    return DigestError(
        f"A tensor of {tensor.dtype} on {tensor.device} has no digest: {reason}. {remedy}"
    )
