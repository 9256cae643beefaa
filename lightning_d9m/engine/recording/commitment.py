"""SHA-256 of the data, the state and the program of a run, with the option ``provable``.

``d9m prove`` writes one file from them, see ``tools/proof``.
"""

import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.engine.hashing.nested_values import list_pytree_leaves
from lightning_d9m.engine.hashing.sha256 import hash_values
from lightning_d9m.engine.hashing.training_state import list_state
from lightning_d9m.engine.ledger.format.records import DIGEST_DIGITS, Sources
from lightning_d9m.engine.ledger.kinds import DATA, STATE_HASH, WEIGHTS_HASH
from lightning_d9m.engine.probes.training import Training
from lightning_d9m.program import FRAMEWORK

# A command may name its data, which would take minutes at the end of a fit.
_MOST_BYTES = 2**28
# What Python and pip install. A package that is installed from its folder is the program's.
_INSTALLED = {Path(path).resolve() for path in sysconfig.get_paths().values()}
_STANDARD = {*sys.stdlib_module_names, *sys.builtin_module_names}
_LIBRARIES = {"site-packages", "dist-packages"}


def chain_batch(before: str, batch: object) -> str:
    """Return the hash of all batches so far, 64 hex digits, given that of those before."""
    return hash_values((leaf for _, leaf in list_pytree_leaves(batch)), before)


def hash_state(training: Training, data: str) -> dict[str, str]:
    """Return the totals that a record gets: of this rank's data so far, weights and other state.

    They have the first 128 bits of each hash, as all totals do.
    """
    listed = [*list_state(training.model, training.list_optimizers(), training.list_schedulers())]
    rest = (part for entry in listed if entry[0] != "weights" for part in entry)
    return {
        DATA: (data or hash_values(()))[:DIGEST_DIGITS],
        WEIGHTS_HASH: hash_weights(
            {name: own for group, name, own in listed if group == "weights"}
        ),
        STATE_HASH: hash_values(rest)[:DIGEST_DIGITS],
    }


def hash_weights(weights: Mapping[str, object]) -> str:
    """Return the first 128 bits of the hash of weights by name, in the order of the names."""
    return hash_values(part for entry in sorted(weights.items()) for part in entry)[:DIGEST_DIGITS]


def find_sources() -> Sources:
    """Return the files of the program, those that its command names, and the packages.

    A package counts as used if a module of it is loaded.
    """
    loaded = [*sys.modules.values()]  # another thread may import, and an entry may be None
    files = {getattr(module, "__file__", None) for module in loaded if not _is_package(module)}
    own = {Path(file).resolve() for file in files if file and file.endswith(".py")}
    named = {Path(word.rpartition("=")[2]).resolve() for word in sys.argv[1:] if word}
    return Sources(
        program=_hash_files(path for path in own if not is_installed(path)),
        named=_hash_files(
            path for path in named if path.is_file() and path.stat().st_size <= _MOST_BYTES
        ),
        packages=_list_packages(),
        used=tuple(sorted({name.partition(".")[0] for name in sys.modules} - _STANDARD)),
    )


@cache
def _list_packages() -> dict[str, str]:
    return {own.metadata["Name"]: own.version for own in distributions()}


def _is_package(module: object) -> bool:
    return getattr(module, "__name__", "").partition(".")[0] in FRAMEWORK


def is_installed(path: Path) -> bool:
    """Return whether a file is of Python or of an installed package."""
    return not _INSTALLED.isdisjoint(path.parents) or not _LIBRARIES.isdisjoint(path.parts)


def _hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return the hash of each file, by its path from the working folder."""
    return {os.path.relpath(path): hash_file(path) for path in sorted(paths)}
