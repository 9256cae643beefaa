"""Digests of a training's weights, buffers, optimizer and scheduler state; sketches of weights.

Names are those of the user's model, without the prefix that ``torch.compile`` adds.

Digests tell whether tensors are equal, sketches how large their difference is. A sketch is a linear
map of the elements to ``BUCKETS`` numbers with fixed random signs, so the sketch of a difference is
the difference of the sketches, and the sum of its squares is an unbiased estimate of the squared
Euclidean norm. Each element goes into one bucket: the count sketch (Charikar, Chen, Farach-Colton
2002), whose estimate of the norm has the error of that of Alon, Matias and Szegedy (1996) with one
pass instead of one for each bucket. Projections that keep distances: Johnson and Lindenstrauss
1984; with random signs: Achlioptas 2003. ``comparison.timeline`` has the estimate.

Nothing here draws from a generator of the process: the signs come from SHAKE-256.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from hashlib import shake_256
from inspect import signature
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from xxhash import xxh3_128_hexdigest

from lightning_d9m.engine.hashing.digest import (
    ORDINARY,
    DenseTensor,
    digest_many,
    digest_value,
    flatten_tensor,
)
from lightning_d9m.engine.hashing.nested_values import encode
from lightning_d9m.engine.hashing.shards import (
    FlatLayout,
    Shard,
    find_dtensor_shard,
    is_sharded_dtensor,
)
from lightning_d9m.engine.ledger.format.records import SKETCH_BUCKETS
from lightning_d9m.engine.state.plain_data import view_bytes
from lightning_d9m.errors import DigestError

Groups = dict[str, dict[str, str]]
_GROUPS = ("weights", "buffers", "optimizers", "schedulers")


# What wrappers of modules add: torch.compile, FSDP1, and activation checkpointing.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without what wrappers of modules add.

    >>> plain_name("encoder._orig_mod.layers.0.weight")
    'encoder.layers.0.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class ModelTensors:
    """A model's parameters and buffers as they are now, by name.

    ``takes`` returns whether the parameter or buffer of a name is selected; None selects all.
    """

    def __init__(self, model: nn.Module, takes: Callable[[str], bool] | None = None) -> None:
        self._model = model
        self._takes = takes

    def look(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[int, str]]:
        """Return the selected parameters and buffers, and the name of every parameter by its id."""
        takes = self._takes or bool  # a name is not empty
        found = [[(plain_name(name), own) for name, own in part] for part in self.listed]
        parameters, buffers = ({n: own for n, own in part if takes(n)} for part in found)
        return parameters, buffers, {id(own): name for name, own in found[0]}

    @property
    def listed(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """All parameters and all buffers, with torch's names."""
        return list(self._model.named_parameters()), list(self._model.named_buffers())

    def list_saved(self) -> list[tuple[str, Tensor]]:
        """Return the names and tensors of all parameters, and of the buffers in a state dict."""
        return [
            (f"{path}.{name}" if path else name, own)
            for path, module in self._model.named_modules()
            for name, own in (*module._parameters.items(), *module._buffers.items())  # noqa: SLF001 - in one walk
            if own is not None and name not in module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public list
        ]


@dataclass
class Snapshot:
    """Digests of one moment on one rank; those of tensors that ranks share out are added last.

    Attributes:
        groups: Digest (32 hex digits) by name, by group: ``"weights"``, ``"buffers"``,
            ``"optimizers"``, ``"schedulers"``.
        shards: The parts of tensors that this rank holds, by group and name.
        owners: By group and name, the shard of the parameter to which a value belongs of which
            only the ranks know that hold a part of the parameter.
        scattered: Tensors whose elements are not in order on any rank, by group and name.
        sketches: Sketch of each weight that this rank holds whole, if they were asked for.
    """

    groups: Groups = field(default_factory=lambda: {group: {} for group in _GROUPS})
    shards: dict[tuple[str, str], Shard] = field(default_factory=dict)
    owners: dict[tuple[str, str], Shard] = field(default_factory=dict)
    scattered: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    sketches: Mapping[str, str] = field(default_factory=dict)

    def total(self) -> dict[str, str]:
        """Return for each group the XXH3-128 of the JSON list of its sorted [name, digest]."""
        texts = {
            group: json.dumps(sorted(entries.items()), separators=(",", ":"))
            for group, entries in self.groups.items()
        }
        return {group: xxh3_128_hexdigest(text.encode()) for group, text in texts.items()}

    def divide(self, place: tuple[str, str], value: object, layout: FlatLayout | None) -> bool:
        """Take a value if ranks hold parts of it; return whether it need not be digested here.

        Args:
            place: Its group and name.
            value: The parameter, the buffer, or the state of an optimizer.
            layout: That of its parameter, if FSDP1 divides it.
        """
        if layout is not None:
            own = layout.data if place[0] == "weights" else value
            shard = layout.find_shard(own) if isinstance(own, Tensor) else None
            if shard is None:
                holder = layout.find_shard(layout.data)
                if holder is not None:
                    self.owners[place] = holder
                return False
        elif isinstance(value, Tensor) and is_sharded_dtensor(value):
            shard = find_dtensor_shard(value)
            if shard is None:
                self.scattered[place] = value
                return True
        else:
            return False
        self.shards[place] = shard
        return True


def take_partial_snapshot(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    schedulers: Sequence[Any] = (),
    layouts: Mapping[int, FlatLayout] | None = None,
    *,
    sketches: bool = False,
    switches: bool = True,
) -> Snapshot:
    """Digest all state that a training carries from step to step, as far as this rank holds it.

    An accelerator is synchronized once for all tensors.

    Args:
        model: Its parameters and buffers are digested; non-persistent buffers too, because they
            take part in the computation.
        optimizers: Their state by parameter, and the settings of their parameter groups.
        schedulers: Objects with ``state_dict()``. Of an object in it without defined bytes, the
            type is digested: its effect shows in the learning rates.
        layouts: What ``find_flat_layouts`` returns; None to digest shards as if they were tensors.
        sketches: Whether to sketch the weights that this rank holds whole. Those of an
            accelerator are copied to the host, in pieces of 16 MiB that each wait for it.
        switches: Whether settings of optimizers and schedulers count that are True, False or None
            by default. Versions of torch have different ones.

    Raises:
        DigestError: When a weight or a buffer has no defined bytes.
    """
    divided = _name_layouts(model, layouts)
    taken = Snapshot()
    whole: dict[tuple[str, str], Tensor] = {}
    for group, name, value in list_state(model, optimizers, schedulers, switches=switches):
        if layouts is not None and group != "schedulers":
            parameter = name.split(".", 2)[2] if group == "optimizers" else name
            layout = None if group == "buffers" else divided.get(parameter)
            if taken.divide((group, name), value, layout):
                continue
        if not isinstance(value, Tensor):
            taken.groups[group][name] = _digest_settings(value)
        elif is_lazy(value):  # it has no shape before its module's first input
            taken.groups[group][name] = digest_value(type(value))
        else:
            whole[group, name] = value
    for (group, name), found in zip(whole, digest_many(whole.values()), strict=True):
        taken.groups[group][name] = found
    if sketches:
        taken.sketches = sketch_tensors(
            {name: own for (g, name), own in whole.items() if g == "weights"}
        )
    return taken


def _name_layouts(
    model: nn.Module, layouts: Mapping[int, FlatLayout] | None
) -> dict[str, FlatLayout]:
    """Return the layouts by the names of the parameters."""
    if not layouts:  # all but those of FSDP1: no other step looks through the model twice
        return {}
    names = ModelTensors(model).look()[2]
    return {names[key]: own for key, own in layouts.items() if key in names}


def list_state(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    *,
    switches: bool = True,
) -> Iterable[tuple[str, str, object]]:
    """Yield (group, name, value) of all state; see ``take_partial_snapshot``."""
    parameters, buffers, names = ModelTensors(model).look()
    for group, named in (("weights", parameters), ("buffers", buffers)):
        yield from ((group, name, tensor) for name, tensor in named.items())
    for number, optimizer in enumerate(optimizers):
        for name, value in optimizer_state(optimizer, names, f"{number}."):
            yield "optimizers", name, _choose_settings(value, optimizer, switches=switches)
    for number, own in enumerate(schedulers):
        settings = _choose_settings(own.state_dict(), own, switches=switches)
        yield "schedulers", str(number), settings


def _choose_settings(value: object, owner: object, *, switches: bool) -> object:
    """Leave out the entries of a mapping that are True, False or None, unless these count.

    Those always count that the owner's constructor takes and that differ from its defaults.
    """
    if switches or not isinstance(value, Mapping):
        return value
    options = signature(type(owner)).parameters
    return {
        key: own
        for key, own in value.items()
        if not isinstance(own, bool | None) or own is not getattr(options.get(key), "default", own)
    }


def _digest_settings(value: object) -> str:
    """Return the digest of a value, in which types replace objects without defined bytes."""
    try:
        return digest_value(value)
    except DigestError:
        return digest_value(_digestible(value))


def _digestible(value: object) -> object:
    """Return a value, in which types replace objects without defined bytes."""
    try:
        encode(value)
    except DigestError:
        if isinstance(value, Mapping):
            return {key: _digestible(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [_digestible(entry) for entry in value]
        return type(value)
    return value


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], prefix: str = ""
) -> Iterable[tuple[str, Any]]:
    """Yield (name, value) for each group's settings and each parameter's state."""
    position = 0
    for number, group in enumerate(optimizer.param_groups):
        # Loading a full checkpoint into sharded optimizers turns tuples (betas) into lists.
        yield (
            f"{prefix}group.{number}",
            {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in group.items()
                if key != "params"
            },
        )
        for parameter in group["params"]:
            name = names.get(id(parameter), f"parameter {position}")
            position += 1
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{prefix}{key}.{name}", value


def describe_model(
    model: nn.Module, layouts: Mapping[int, FlatLayout] | None = None
) -> tuple[str, int]:
    """Return a digest of the model's names, shapes and dtypes, and its number of parameters.

    Two models with equal descriptions can be compared, whatever their weights.
    """
    description: dict[str, list[object]] = {}
    count = 0
    for kind, entries in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in entries:
            divided: Any = (layouts or {}).get(id(tensor), tensor)
            sizes = None if is_lazy(tensor) else list(divided.shape)
            description[plain_name(name)] = [sizes, str(tensor.dtype), kind]
            count += prod(sizes) if kind == "parameter" and sizes is not None else 0
    return digest_value(description), count


def replicated_names(
    model: nn.Module, layouts: Mapping[int, FlatLayout] | None = None
) -> list[str]:
    """Return the names of the parameters that must have equal digests on all ranks.

    A sharded parameter counts if its digest is that of the whole parameter: DTensors and those with
    a layout. A flat parameter of FSDP1 differs from rank to rank by design.
    """
    return sorted(
        plain_name(name)
        for name, parameter in model.named_parameters()
        if id(parameter) in (layouts or {}) or not hasattr(parameter, "_is_flat_param")
    )


def count_sharded(model: nn.Module, layouts: Mapping[int, FlatLayout]) -> int:
    """Return the number of parameters of which ranks hold different parts."""
    return sum(
        id(own) in layouts or is_sharded_dtensor(own) or hasattr(own, "_is_flat_param")
        for own in model.parameters()
    )


# Places of a row; a prime, so that the elements of a matrix's column lie in different ones.
_WIDTH = 1021
_ROWS = 16
# Elements with signs of their own. Further blocks have the signs of the first, times one for each
# place of a row.
_BLOCK = _WIDTH * _ROWS
# Bytes of a tensor that are copied to the host at once.
_PIECE_BYTES = 2**24
# Most weights of a model that is sketched: 10 million take about 10 ms on one core.
MOST_ELEMENTS = 2**28


def sketch_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the sketch of each dense tensor of floating-point numbers, by name.

    A tensor of at most ``SKETCH_BUCKETS`` elements is in its sketch without loss.

    Args:
        tensors: Tensors by name. Complex, integer, sparse, quantized, empty and sharded ones have
            no sketch.
            None has one if they have more than ``MOST_ELEMENTS`` elements together.

    Returns:
        ``SKETCH_BUCKETS`` float64 numbers, little-endian, as hexadecimal digits.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001 - as in digest.py
        found = {name: _find_dense(tensor) for name, tensor in tensors.items()}
        dense = {name: own for name, own in found.items() if own is not None}
        if sum(map(Tensor.numel, dense.values())) > MOST_ELEMENTS:
            return {}
        with np.errstate(all="ignore"):  # weights may be NaN, or overflow
            return {name: _sketch(tensor) for name, tensor in dense.items()}


def _find_dense(tensor: Tensor) -> Tensor | None:
    """Return the tensor, or the whole one that this rank has of a DTensor, if it has a sketch."""
    ordinary = type(tensor) in ORDINARY
    if not ordinary:
        if is_sharded_dtensor(tensor):
            return None
        wrapper: Any = tensor
        tensor = wrapper.to_local() if hasattr(tensor, "to_local") else tensor
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor if ordinary or isinstance(flatten_tensor(tensor), DenseTensor) else None


def _sketch(tensor: Tensor) -> str:
    """Return the sketch of a tensor, which is copied to the host in pieces."""
    flat, size = tensor.reshape(-1), tensor.numel()
    signs = _draw_signs("signs", _BLOCK).reshape(_ROWS, _WIDTH)
    if size <= _WIDTH:  # a single row, as most tensors of a model have
        signed = flat.cpu().to(torch.float64, copy=True).numpy() * signs[0, :size]
        return _hex(np.bincount(_draw_buckets()[:size], signed, SKETCH_BUCKETS))
    sums = np.zeros(_WIDTH)  # of each place of a row, over all rows
    step = max(1, _PIECE_BYTES // (flat.itemsize * _BLOCK)) * _BLOCK
    for start in range(0, size, step):
        piece = _read_values(flat[start : start + step])
        for begin in range(0, len(piece), _BLOCK):
            block = piece[begin : begin + _BLOCK]
            if rest := -len(block) % _WIDTH:
                block = np.append(block, np.zeros(rest, block.dtype))
            rows = block.reshape(-1, _WIDTH)
            # It converts to float64 as it reads: a copy of each block costs as much again.
            signed = np.einsum("ij,ij->j", rows, signs[: len(rows)])
            number = (start + begin) // _BLOCK
            sums += signed * _draw_signs(f"block {number}", _WIDTH) if number else signed
    return _hex(np.bincount(_draw_buckets(), sums, SKETCH_BUCKETS))


def _read_values(flat: Tensor) -> NDArray[Any]:
    """Return elements as NumPy's; float32 holds those of all smaller types."""
    here = flat.cpu().resolve_neg()  # a cast in the same call would be done on the device
    if here.dtype is torch.float64:
        return view_bytes(here).view(np.float64)
    return view_bytes(here.float()).view(np.float32)


def _hex(sketch: NDArray[Any]) -> str:
    return sketch.astype("<f8", copy=False).tobytes().hex()


@cache
def _draw_buckets() -> NDArray[np.intp]:
    """Return the bucket of each place of a row.

    Any ``SKETCH_BUCKETS`` places from a multiple of that on are in different buckets.
    """
    groups = -(-_WIDTH // SKETCH_BUCKETS)
    turns = np.frombuffer(_draw_bytes("buckets", groups), np.uint8)
    places = (np.arange(SKETCH_BUCKETS) + turns[:, None]) % SKETCH_BUCKETS
    return places.reshape(-1)[:_WIDTH].astype(np.intp)


@lru_cache(maxsize=128)
def _draw_signs(name: str, count: int) -> NDArray[np.float64]:
    """Return random signs, 1.0 and -1.0, that follow from a name."""
    data = np.frombuffer(_draw_bytes(name, -(-count // 8)), np.uint8)
    return 1.0 - 2.0 * np.unpackbits(data, count=count).astype(np.float64)


def _draw_bytes(name: str, count: int) -> bytes:
    return shake_256(f"lightning_d9m sketch: {name}".encode()).digest(count)
