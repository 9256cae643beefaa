"""SHA-256 of values: what a proof commits to."""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import torch

from lightning_d9m.engine.hashing.digest import DenseTensor, flatten_tensor
from lightning_d9m.engine.hashing.nested_values import Piece, encode
from lightning_d9m.engine.hashing.threads import map_on_threads
from lightning_d9m.errors import DigestError


# XXH3 finds accidents at the speed of memory, and an attacker can make two tensors with one XXH3.
# SHA-256 takes about twenty times as long, so it is for runs that are recorded for a proof.
def hash_values(values: Iterable[object], start: str = "") -> str:
    """Return the SHA-256, as 64 hex digits, of a text and of values in order.

    Two sequences have one hash only if types, shapes, dtypes and all bytes are equal, as for
    ``digest_value``. Of a sharded tensor the part of this rank counts, and of an object without
    defined bytes its type.

    Args:
        values: Tensors of any device, which are copied to the host one after the other, and what
            ``digest_value`` takes.
        start: The text, such as the hash of what came before.
    """
    hasher = sha256(start.encode())
    # As in digest.py: no subclass of a tensor interferes.
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001
        for value in values:
            try:
                _update(hasher, [value] if isinstance(value, torch.Tensor) else encode(value))
            except DigestError:
                _update(hasher, encode(type(value)))
    return hasher.hexdigest()


def hash_named(values: Mapping[Any, object]) -> str:
    """Return the SHA-256 of values by name, on as many threads as torch uses in an operation.

    Their order does not count.
    """
    found = map_on_threads(lambda own: hash_values([own]), values.values(), torch.get_num_threads())
    return hash_values([dict(zip(values, found, strict=True))])


def _update(hasher: Any, pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        if isinstance(piece, bytes):
            hasher.update(piece)
            continue
        flat = flatten_tensor(piece)
        if isinstance(flat, DenseTensor):
            hasher.update(flat.header)  # with the shape, so that the size of what follows is known
            data = flat.data.detach().resolve_conj().resolve_neg().cpu().contiguous()
            hasher.update(data.reshape(-1).view(torch.uint8).numpy().data)
        else:
            _update(hasher, flat)
