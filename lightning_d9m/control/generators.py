"""States of random generators as plain values for checkpoints.

All values load with ``torch.load(..., weights_only=True)``: tensors, numbers, strings,
lists and dicts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lightning_d9m.control.seeding import RngState
from lightning_d9m.state.search import find_generators

# The state of a device's generator: the seed, and then the number of values that were drawn.
_SEED_BYTES, _PHILOX_BYTES = 8, 16


def encode_rng(state: RngState) -> dict[str, Any]:
    """Return the state of all generators of a process, which calls this, as plain values."""
    return {
        "python": _encode_python(state.python),
        "numpy": _encode_plain(state.numpy),
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
    return RngState(
        python=_decode_python(encoded["python"]),
        numpy=_decode_plain(encoded["numpy"]),
        torch_cpu=encoded["torch"],
        devices=devices,
    )


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
        before = encoded.get("own", {}).get(name, here)  # earlier versions saved no number
        for number, own in enumerate(states):
            place = here if number == before else number
            is_free = number == before or number != here
            yield name, number, place if is_free and place < count else None, own


def _find_own_device(name: str) -> int:
    """Return the number of the device on which this process computes."""
    module = getattr(torch, name)
    current = getattr(module, "current_device", int)  # torch.mps has a single device
    return int(current()) if module.device_count() else 0


def capture_generators(owners: Mapping[str, object]) -> dict[str, Any]:
    """Return the state of every generator that the objects hold.

    Args:
        owners: Objects by name. See ``find_generators`` for the search.

    Returns:
        Plain values by the generator's path, such as ``"model.noise"``.
    """
    return {path: _encode(generator) for path, generator in find_generators(owners).items()}


def restore_generators(owners: Mapping[str, object], encoded: Mapping[str, Any]) -> list[str]:
    """Restore every generator to its captured state.

    Returns:
        The paths of generators that were captured and are missing now, or were not captured.
    """
    found = find_generators(owners)
    for path in encoded.keys() & found.keys():
        _restore(found[path], encoded[path])
    return sorted(encoded.keys() ^ found.keys())


def _encode(generator: Any) -> dict[str, Any]:
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state()}
    if isinstance(generator, np.random.Generator):
        return {"kind": "numpy", "state": _encode_plain(generator.bit_generator.state)}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "legacy", "state": _encode_plain(generator.get_state(legacy=False))}
    try:
        return {"kind": "python", "state": _encode_python(generator.getstate())}
    except NotImplementedError:  # SystemRandom does not have a state
        return {"kind": "none", "state": None}


def _restore(generator: Any, encoded: Mapping[str, Any]) -> None:
    state = encoded["state"]
    if encoded["kind"] == "torch":
        generator.set_state(state)
    elif encoded["kind"] == "numpy":
        generator.bit_generator.state = _decode_plain(state)
    elif encoded["kind"] == "legacy":
        generator.set_state(_decode_plain(state))
    elif encoded["kind"] == "python":
        generator.setstate(_decode_python(state))


def _encode_python(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    # torch.tensor would read every word in Python; NumPy is faster.
    words = torch.from_numpy(np.array(words, dtype=np.int64))
    return {"version": version, "words": words, "gauss": gauss}


def _decode_python(encoded: Mapping[str, Any]) -> tuple[Any, ...]:
    return (encoded["version"], tuple(encoded["words"].tolist()), encoded["gauss"])


def _encode_plain(value: Any) -> Any:
    """Return NumPy's nested state with arrays as tensors, and long integers as strings."""
    if isinstance(value, Mapping):
        return {str(key): _encode_plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        data = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        return {"dtype": str(value.dtype), "bytes": data}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int) and value.bit_length() > 63:  # noqa: PLR2004 - PCG64's have 128 bits
        return {"number": str(value)}
    return value


def _decode_plain(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"number"}:
        return int(value["number"])
    if value.keys() == {"dtype", "bytes"}:
        return np.frombuffer(value["bytes"].numpy().tobytes(), dtype=value["dtype"]).copy()
    return {key: _decode_plain(part) for key, part in value.items()}
