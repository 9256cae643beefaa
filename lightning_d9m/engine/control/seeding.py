"""Random number generators: seeds derived by hashing, and the state of all generators."""

import random
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from xxhash import xxh3_128_hexdigest

from lightning_d9m.compatibility import find_accelerator
from lightning_d9m.engine.control.seed_calls import seed_calls
from lightning_d9m.engine.state.parts import GENERATOR, check_positions
from lightning_d9m.engine.state.plain_data import (
    decode_plain,
    encode_plain,
    pack_bytes,
    unpack_bytes,
)
from lightning_d9m.engine.state.state import find_generators

# Not the function with which `LIGHTNING_D9M_WATCH` notes seeds.
_manual_seed = torch.manual_seed


def derive_seed(
    base: int,
    purpose: str,
    *,
    fit: int = 0,
    rank: int = 0,
    worker: int = 0,
    epoch: int = 0,
    index: int | str = 0,
) -> int:
    """Return the seed of one random stream, from 0 to 2**64 - 1.

    It is the first 8 bytes, read as a little-endian number, of BLAKE2b (digest size 8) over the
    UTF-8 text ``d9m-seed-1|base|purpose|fit|rank|worker|epoch|index``, numbers in decimal. A
    purpose holds no ``|``, so no two streams share a text.

    >>> derive_seed(42, "train", epoch=1) == derive_seed(42, "train", epoch=1)
    True
    >>> derive_seed(1, "train", epoch=2) == derive_seed(2, "train", epoch=1)
    False
    """
    # Hashed instead of added, because seed 1 in epoch 2 must differ from seed 2 in epoch 1. The
    # text begins with the version of the rule.
    text = f"d9m-seed-1|{base}|{purpose}|{fit}|{rank}|{worker}|{epoch}|{index}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's legacy global and torch's generators, on the CPU and every device.

    Args:
        seed: From 0 to 2**64 - 1.
    """
    seed_host(seed)
    # This only tells which accelerator torch was built for. Listing devices would start the driver,
    # after which a launcher can no longer fork.
    if find_accelerator() is not None:
        # Seeds every device, also those that are initialized later.
        seed_calls.are_own = True
        try:
            _manual_seed(seed)
        finally:
            seed_calls.are_own = False


def seed_host(seed: int) -> None:
    """Seed the generators of this process on the CPU: Python's, NumPy's and torch's.

    NumPy's and torch's CPU generators take the lower 32 bits of the seed.
    """
    # Not `torch.manual_seed`, which touches devices and takes 200 us instead of a few: this is
    # called for single samples, and in workers, which may not use CUDA after a fork.
    random.seed(seed)
    # NumPy's seed has 32 bits; an array of two words would take six times as long.
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - user code draws from it
    torch.default_generator.manual_seed(seed)


def seed_micro_batch(base: int, *, fit: int, epoch: int, logical_rank: int, batch: int) -> None:
    """Seed Python's, NumPy's and torch's generators for one micro-batch of a logical rank.

    Nothing carries over from one micro-batch to the next, so it does not matter which process
    computes them, nor in which order, and a checkpoint needs no state of these generators.

    ``base`` is the seed of the run. The epoch, and the batch within it, count from 0.
    """
    seed_all(derive_seed(base, "micro-batch", fit=fit, rank=logical_rank, epoch=epoch, index=batch))


RngState: TypeAlias = dict[str, Any]
"""The states of the generators that ``seed_all`` seeds: ``"python"``, ``"numpy"``, ``"torch"`` (of
the CPU, uint8), and ``"devices"``: of initialized accelerators, by device type and number."""


def capture_host() -> RngState:
    """Return the state of the generators that ``seed_host`` seeds, without using a device."""
    numpy = dict(np.random.get_state(legacy=False))  # noqa: NPY002 - user code draws from it
    cpu = torch.default_generator.get_state()
    return {"python": random.getstate(), "numpy": numpy, "torch": cpu, "devices": {}}


def capture_rng() -> RngState:
    """Return the state of every generator, without initializing any device.

    The state does not include devices that are initialized later.
    """
    state = capture_host()
    accelerator = find_accelerator()
    for name in sorted({"cuda", "xpu"} | ({accelerator.type} if accelerator else set())):
        module: Any = getattr(torch, name, None)
        # torch.mps has no such function and is always initialized.
        started = getattr(module, "is_initialized", getattr(module, "is_available", bool))
        if started() and (read := getattr(module, "get_rng_state", None)):
            numbers = range(module.device_count())
            state["devices"][name] = {number: read(number) for number in numbers}
    return state


def restore_rng(state: RngState) -> None:
    """Restore every generator to a captured state."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - as above
    torch.default_generator.set_state(state["torch"])
    for name, states in state["devices"].items():
        module = getattr(torch, name)
        for number, words in states.items():
            module.set_rng_state(words, number)


# NumPy's global functions, such as ``np.random.rand``, are methods of this object.
_numpy: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
_set_bits: Any = vars(np.random)["set_bit_generator"]  # which its stubs do not have
_WITHOUT_WORDS = SimpleNamespace(state={"bit_generator": "MT19937"})
_spare: list[Any] = []  # bit generators for `SeededHost`, as many as are nested


class SeededHost:
    """Seeds the generators of this process on the CPU, and restores them after the body.

    It is entered for each batch. To read and to set the 624 words of NumPy's generator takes 65 µs,
    four times as long as all else, so that the body has another bit generator instead. NumPy keeps
    the second of two normal numbers outside of it, and forgets that when the generator changes.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._states = random.getstate(), torch.default_generator.get_state()
        self._own = _numpy._bit_generator  # noqa: SLF001 - as `get_bit_generator`, in half the time
        # NumPy reads its state in place of the generator's words; numbers are drawn elsewhere.
        _numpy._bit_generator = _WITHOUT_WORDS  # noqa: SLF001 - no call reads it alone
        normal = _numpy.get_state(legacy=False)
        self._normal = {**normal, "state": None} if normal["has_gauss"] else None
        self._other = _spare.pop() if _spare else np.random.MT19937(0)
        _set_bits(self._other)
        random.seed(self._seed)
        # As `np.random.seed` in half the time; a new bit generator has no second normal number.
        self._other._legacy_seeding(self._seed & 0xFFFFFFFF)  # noqa: SLF001 - which that calls
        torch.default_generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        python, cpu = self._states
        random.setstate(python)
        torch.default_generator.set_state(cpu)
        _set_bits(self._own)
        if self._normal is not None:
            _numpy._bit_generator = SimpleNamespace()  # noqa: SLF001 - as above
            _numpy.set_state(self._normal)
            _numpy._bit_generator = self._own  # noqa: SLF001 - as above
        _spare.append(self._other)


def read_generators() -> dict[str, bytes]:
    """Return the state of each generator that ``seed_all`` seeds, by name."""
    state = capture_rng()
    version, words, normal = state["python"]
    numpy = state["numpy"]
    inner = {**numpy["state"]}
    # Bytes, and not the text of an array, which NumPy shortens. The program may have given NumPy
    # another bit generator, whose state has other names.
    key = inner.pop("key", np.empty(0)).tobytes()
    rest = [*inner.values(), numpy["has_gauss"], numpy["gauss"]]
    parts = {
        "python": array("Q", words).tobytes() + repr([version, normal]).encode(),
        "numpy": key + repr(rest).encode(),
        "torch": state["torch"].numpy().tobytes(),
    }
    for name, states in state["devices"].items():
        parts |= {f"{name}:{number}": words.numpy().tobytes() for number, words in states.items()}
    return parts


def digest_generators() -> dict[str, str]:
    """Return the digest of the state of each generator that ``seed_all`` seeds, by name."""
    return {name: xxh3_128_hexdigest(data) for name, data in read_generators().items()}


@contextmanager
def rng_restored() -> Iterator[None]:
    """Restore every generator after the body."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


# Of the path of a change in a worker.
_PATH_BYTES = 200


@dataclass
class RandomStreams:
    """The seeds of a loader's random streams. Each worker gets a copy when it starts.

    Attributes:
        seed: The base seed.
        fit: Ordinal of the fit in its process.
        rank: The data-parallel rank.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        number: Ordinal of the loader in its stage.
        epoch: The current epoch of this process.
        starts: How often an epoch was started, or started again.
        shared: In shared memory for persistent workers, int64 of shape (2,): the current epoch of
            the main process, and ``starts``. None without such workers.
        report: In shared memory for workers, uint8: the path of what reading samples changes in a
            worker's dataset. None without workers, and if the loader saves what the dataset says.
    """

    seed: int
    fit: int
    rank: int
    stage: str
    number: int = 0
    epoch: int = 0
    starts: int = 0
    shared: torch.Tensor | None = None
    report: torch.Tensor | None = None

    def share(self, *, persistent: bool, reports: bool = True) -> None:
        """Allocate what workers and the main process tell each other."""
        if reports:
            self.report = torch.zeros(_PATH_BYTES, dtype=torch.uint8, device="cpu").share_memory_()
        if persistent:
            self.shared = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()

    def start_epoch(self, epoch: int) -> None:
        """Enter an epoch in the main process."""
        self.epoch = epoch
        self.starts += 1
        if self.shared is not None:
            self.shared[0], self.shared[1] = epoch, self.starts

    def follow(self) -> bool:
        """Enter the main process's epoch; return whether it was started since the last call."""
        before = self.starts
        if self.shared is not None:
            self.epoch, self.starts = map(int, self.shared.tolist())
        return self.starts != before

    def report_change(self, path: str) -> None:
        """Tell the main process that reading samples changes this in a worker."""
        if self.report is not None:
            # The whole of it: another worker may have reported a longer path.
            data = path.encode()[:_PATH_BYTES].ljust(_PATH_BYTES, b"\0")
            self.report[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @property
    def changed_in_workers(self) -> str:
        """The path of what reading samples changes in a worker; empty if nothing."""
        data = b"" if self.report is None else bytes(self.report.tolist())
        return data.rstrip(b"\0").decode(errors="ignore")

    def derive(
        self, purpose: str, *, worker: int = 0, index: int | str = 0, shared: bool = False
    ) -> int:
        """Return a seed for the current epoch; with ``shared``, the same on all ranks."""
        return derive_seed(
            self.seed,
            f"{self.stage} {self.number} {purpose}",
            fit=self.fit,
            rank=0 if shared else self.rank,
            worker=worker,
            epoch=self.epoch,
            index=index,
        )


# The state of a device's generator: the seed, and then the number of values that were drawn.
_SEED_BYTES, _PHILOX_BYTES = 8, 16


def encode_rng(state: RngState) -> dict[str, Any]:
    """Return the state of all generators of a process, which calls this, as plain values."""
    return {
        "host": pack_bytes(encode_plain([state["python"], state["numpy"]])),
        "torch": state["torch"],
        "devices": {name: list(states.values()) for name, states in state["devices"].items()},
        "own": {name: _find_own_device(name) for name in state["devices"]},
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
    check_positions(numpy)
    return {"python": python, "numpy": numpy, "torch": encoded["torch"], "devices": devices}


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
        kind = torch.device(name).type  # no other name is looked up
        count, here = getattr(torch, kind).device_count(), _find_own_device(kind)
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
    return {path: pack_bytes(GENERATOR.read(own)) for path, own in found}


def restore_generators(owners: Mapping[str, object], encoded: Mapping[str, torch.Tensor]) -> None:
    """Restore the generators that were captured and are here."""
    found = find_generators(owners)
    for path in encoded.keys() & found.keys():
        GENERATOR.write(found[path], unpack_bytes(encoded[path]))
