"""States of random generators as plain values for checkpoints.

All values load with ``torch.load(..., weights_only=True)``: tensors, numbers, strings,
lists and dicts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lightning_d9m.control.seeding import RngState
from lightning_d9m.state.parts import GENERATOR
from lightning_d9m.state.plain_data import decode_plain, encode_plain, pack_bytes, unpack_bytes
from lightning_d9m.state.search import find_generators

# The state of a device's generator: the seed, and then the number of values that were drawn.
_SEED_BYTES, _PHILOX_BYTES = 8, 16


def encode_rng(state: RngState) -> dict[str, Any]:
    """Return the state of all generators of a process, which calls this, as plain values."""
    return {
        "host": pack_bytes(encode_plain([state.python, state.numpy])),
        "torch": state.torch_cpu,
        "devices": {name: list(states.values()) for name, states in state.devices.items()},
        "own": {name: _find_own_device(name) for name in state.devices},
    }


def decode_rng(encoded: Mapping[str, Any]) -> RngState:
    """Return the state from the plain values of ``encode_rng``, for the devices of this process.

    The device that was the process's own may have another number now, or be one that the program
    has chosen. Its state is that of the present device of the process; the others keep their
    numbers, and ``find_lost_devices`` names those that have no place.
    """
    devices: dict[str, dict[int, torch.Tensor]] = {name: {} for name in encoded["devices"]}
    for name, _, place, own in _place_devices(encoded):
        if place is not None:
            devices[name][place] = own
    python, numpy = decode_plain(unpack_bytes(encoded["host"]))
    return RngState(python=python, numpy=numpy, torch_cpu=encoded["torch"], devices=devices)


def find_lost_devices(encoded: Mapping[str, Any]) -> list[str]:
    """Return the reasons why states of ``encode_rng`` cannot be restored in this process.

    The state of a device from which nothing was drawn follows from the seed, and is not lost.
    """
    return [
        f"Numbers were drawn on the device {name}:{number}, and its generator cannot be restored: "
        f"this process has {getattr(torch, name).device_count()} devices of this kind, and its "
        "own takes the state of the process's own. Resume with the same number of visible devices."
        for name, number, place, own in _place_devices(encoded)
        if place is None and (len(own) != _PHILOX_BYTES or own[_SEED_BYTES:].any())
    ]


def _place_devices(
    encoded: Mapping[str, Any],
) -> Iterator[tuple[str, int, int | None, torch.Tensor]]:
    """Yield kind, number, present number and state of each device; None if it has no place."""
    for name, states in encoded["devices"].items():
        count, here = getattr(torch, name).device_count(), _find_own_device(name)
        before = encoded["own"][name]
        for number, own in enumerate(states):
            place = here if number == before else number
            is_free = number == before or number != here
            yield name, number, place if is_free and place < count else None, own


def _find_own_device(name: str) -> int:
    """Return the number of the device on which this process computes."""
    module = getattr(torch, name)
    current = getattr(module, "current_device", int)  # torch.mps has a single device
    return int(current()) if module.device_count() else 0


def capture_generators(owners: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the encoded state of every generator that the objects hold.

    Args:
        owners: Objects by name. See ``find_generators`` for the search.

    Returns:
        Bytes by the generator's path, such as ``"model.noise"``.
    """
    found = find_generators(owners).items()
    return {path: pack_bytes(encode_plain(GENERATOR.read(own))) for path, own in found}


def restore_generators(
    owners: Mapping[str, object], encoded: Mapping[str, torch.Tensor]
) -> list[str]:
    """Restore every generator to its captured state.

    Returns:
        The paths of generators that were captured and are missing now, or were not captured.
    """
    found = find_generators(owners)
    for path in encoded.keys() & found.keys():
        GENERATOR.write(found[path], decode_plain(unpack_bytes(encoded[path])))
    return sorted(encoded.keys() ^ found.keys())
