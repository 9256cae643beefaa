"""Tensors that are digested in every batch and mostly stay where they are: weights and buffers.

To walk a model, and to find out where its tensors lie, takes longer than to hash small ones. Both
are remembered here, and done again when anything that they depend on has changed.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_d9m.evidence.snapshot import plain_name
from lightning_d9m.evidence.tensors import Plain, locate, take_apart

_TABLES = tuple(map(attrgetter, ("_parameters", "_buffers", "_modules")))


class Located(NamedTuple):
    """Where tensors lie: what precedes each in its digest, and the addresses and sizes in bytes."""

    headers: list[bytes]
    memory: list[tuple[int, int]]


class Standing(dict[str, Tensor]):
    """Tensors by name that are digested together again and again."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(tensors)
        self._located: Located | None = None
        self._form: tuple[list[Any], ...] | None = None

    def locate(self) -> Located | None:
        """Return where the tensors lie; None unless all lie on the CPU, real and in order.

        What was found before counts as long as each has the address, shape, strides and dtype that
        it had: a storage that is freed or resized, a cast and ``tensor.data = other`` change these.
        Complex ones are not remembered, because they can be conjugated where they are.

        Raises:
            DigestError: As ``digest``, for the first tensor that has none.
        """
        if not self or next(iter(self.values())).device.type != "cpu":
            return None
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in digest_many
            form = _form_of(self.values())
            if form is None or form != self._form:
                self._form = form
                self._located = None if form is None else _locate(self.values())
            return self._located


def _form_of(tensors: Iterable[Tensor]) -> tuple[list[Any], ...] | None:
    """Return what changes when a tensor moves; None if one has no memory to ask for."""
    try:
        return (
            [tensor.data_ptr() for tensor in tensors],
            [tensor.shape for tensor in tensors],
            [tensor.stride() for tensor in tensors],
            [tensor.dtype for tensor in tensors],
        )
    except RuntimeError:  # sparse, fake, not initialized yet
        return None


def _locate(tensors: Iterable[Tensor]) -> Located | None:
    found = Located([], [])
    for tensor in tensors:
        part = take_apart(tensor)
        # A copy in order would be of this moment only.
        there = isinstance(part, Plain) and part.data is tensor
        if not there or tensor.device.type != "cpu" or tensor.is_complex():
            return None
        found.headers.append(part.header)
        found.memory.append(locate(tensor))
    return found


class Roster:
    """A model's parameters and buffers, walked again only when it has others.

    Args:
        model: The model.
        takes: Says of a parameter's or buffer's name whether it is selected.
    """

    def __init__(self, model: nn.Module, takes: Callable[[str], bool]) -> None:
        self._model = model
        self._takes = takes
        self._tables: list[dict[str, Any]] = []
        self._structure: tuple[list[Any], ...] = ()
        self._kept: list[object] = []
        self._parameters = self._buffers = Standing(())
        self._names: dict[int, str] = {}

    @property
    def parameters(self) -> Standing:
        """The selected parameters by name."""
        self._walk()
        return self._parameters

    @property
    def buffers(self) -> Standing:
        """The selected buffers by name."""
        self._walk()
        return self._buffers

    @property
    def names(self) -> dict[int, str]:
        """The name of every parameter by its id."""
        self._walk()
        return self._names

    def _walk(self) -> None:
        if self._structure and _structure_of(self._tables) == self._structure:
            return
        modules = list(self._model.modules())
        self._tables = [table for own in _TABLES for table in map(own, modules)]
        self._structure = _structure_of(self._tables)
        # As long as they are kept, nothing else can have the id of one of them.
        self._kept = [held for table in self._tables for held in table.values()]
        parameters = [(plain_name(name), own) for name, own in self._model.named_parameters()]
        buffers = [(plain_name(name), own) for name, own in self._model.named_buffers()]
        self._names = {id(own): name for name, own in parameters}
        self._parameters = Standing(entry for entry in parameters if self._takes(entry[0]))
        self._buffers = Standing(entry for entry in buffers if self._takes(entry[0]))


def _structure_of(tables: list[dict[str, Any]]) -> tuple[list[Any], ...]:
    """Return the names and identities of what modules hold, without a line of Python for each."""
    held = chain.from_iterable(map(dict.values, tables))
    return list(map(len, tables)), list(chain.from_iterable(tables)), list(map(id, held))
