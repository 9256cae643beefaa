"""SHA-256 of the data, the state and the program of a run, with the option ``provable``.

``d9m prove`` writes one file from them, see ``tools/proof``.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import torch

from lightning_d9m.engine.hashing.digest import DenseTensor, flatten_tensor
from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.engine.hashing.nested_values import Piece, encode, list_pytree_leaves
from lightning_d9m.engine.hashing.threads import map_on_threads
from lightning_d9m.engine.hashing.training_state import list_state
from lightning_d9m.engine.ledger.format.records import DIGEST_DIGITS, Sources
from lightning_d9m.engine.ledger.kinds import COMMITTED
from lightning_d9m.engine.probes.training import Training
from lightning_d9m.errors import DigestError
from lightning_d9m.program import PACKAGE_FOLDERS, is_of_framework

# A command may name its data, which would take minutes.
_MOST_BYTES = 2**28
_STANDARD = Path(os.__file__).resolve().parent


def chain_batch(before: str, batch: object) -> str:
    """Return the hash of all batches so far, 64 hex digits, given that of those before."""
    return hash_values([before, *(leaf for _, leaf in list_pytree_leaves(batch))])


def hash_state(training: Training, data: str) -> dict[str, str]:
    """Return the totals that a record gets: of this rank's data so far, weights and other state."""
    listed = list_state(training.model, training.list_optimizers(), training.list_schedulers())
    state = {(group, name): value for group, name, value in listed}
    weights = {name: state.pop((group, name)) for group, name in [*state] if group == "weights"}
    found = (data or hash_values(()), hash_named(weights), hash_named(state))
    return {name: text[:DIGEST_DIGITS] for name, text in zip(COMMITTED, found, strict=True)}


def find_sources(before: Sources | None = None) -> Sources:
    """Return the files of the program, those that its command names, and the packages.

    Files that were edited since the run began count as they were ``before``, and those that the
    command names if they are the same.
    """
    loaded = dict(sys.modules)  # a copy, as another thread may import meanwhile
    # Several modules may have one file, and hashing a file takes the most time.
    own = (module for name, module in loaded.items() if not is_of_framework(name))
    files = {getattr(module, "__file__", None) or "" for module in own}
    program = _hash_files(file for file in files if file.endswith((".py", ".so", ".pyd")))
    named = _hash_files(word.rpartition("=")[2] for word in sys.argv[1:])
    if before is not None:
        program |= before.program
        named = dict(named.items() & before.named.items())
    packages = list_packages(tuple(sys.path))
    return Sources(
        program=program,
        named={path: digest for path, digest in named.items() if path not in program},
        packages={name: version for name, (version, _) in packages.items()},
        used=tuple(sorted({name.partition(".")[0] for name in loaded} - sys.stdlib_module_names)),
    )


@cache
def list_packages(_path: tuple[str, ...]) -> dict[str, tuple[str, Distribution]]:
    """Return version and package, by its name, of those that Python imports from ``sys.path``."""
    found: dict[str, tuple[str, Distribution]] = {}
    # In the order of sys.path, so that of two versions of a package the first is the one that is
    # imported. A broken installation has no metadata, which each reader of metadata reports by
    # another exception.
    for package in distributions():
        with suppress(Exception):
            metadata = package.metadata  # which is read each time
            if metadata["Name"] and metadata["Version"]:
                found.setdefault(metadata["Name"], (metadata["Version"], package))
    return found


def _hash_files(names: Iterable[str]) -> dict[str, str]:
    """Return the hash of each name that is a file of the program, by its path from here."""
    found = dict[str, str]()
    # Resolved, as a link may lead into or out of a folder of packages, and once each, as thousands
    # of modules are in a few hundred folders.
    resolve = cache(lambda folder: Path(folder).resolve())
    # Names are texts here: a Path for each of thousands of modules takes most of the time, and
    # raises an error for a word that is too long for a name.
    for name in filter(os.path.isfile, names):
        folder, base = os.path.split(name)
        inner = resolve(folder)
        # A package that is installed from its folder (pip install -e) is the program's.
        is_installed = _STANDARD in (inner, *inner.parents) or PACKAGE_FOLDERS & {*inner.parts}
        if not is_installed and os.path.getsize(name) <= _MOST_BYTES:  # noqa: PTH202 - as above
            # Of a file that is a link the own name counts, by which the program opens it.
            found[os.path.relpath(inner / base)] = hash_file(inner / base)
    return found


# XXH3 finds accidents at the speed of memory, and an attacker can make two tensors with one XXH3.
# SHA-256 takes about twenty times as long, so it is for runs that are recorded for a proof.
def hash_values(values: Iterable[object]) -> str:
    """Return the SHA-256, as 64 hex digits, of what ``digest_value`` takes, in order.

    Types, shapes, dtypes and all bytes count. Tensors are copied to the host one after the other;
    of a sharded one the part of this rank counts, and of an object without defined bytes its type.
    """
    hasher = sha256()
    # As in digest.py: no subclass of a tensor interferes.
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001
        for value in values:
            try:
                _update(hasher, encode(value))
            except DigestError:
                _update(hasher, encode(type(value)))
    return hasher.hexdigest()


def hash_named(values: Mapping[Any, object]) -> str:
    """Return the SHA-256 of values by name, in any order, on as many threads as torch uses."""
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
