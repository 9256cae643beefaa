"""SHA-256 of the data, the state and the program of a run, with the option ``provable``.

``d9m prove`` writes one file from them, see ``tools/proof``.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.engine.hashing.nested_values import list_pytree_leaves
from lightning_d9m.engine.hashing.sha256 import hash_named, hash_values
from lightning_d9m.engine.hashing.training_state import list_state
from lightning_d9m.engine.ledger.format.records import DIGEST_DIGITS, Sources
from lightning_d9m.engine.ledger.kinds import COMMITTED
from lightning_d9m.engine.probes.training import Training
from lightning_d9m.program import PACKAGE_FOLDERS, is_of_framework

# A command may name its data, which would take minutes.
_MOST_BYTES = 2**28
_STANDARD = Path(os.__file__).resolve().parent


def chain_batch(before: str, batch: object) -> str:
    """Return the hash of all batches so far, 64 hex digits, given that of those before."""
    return hash_values((leaf for _, leaf in list_pytree_leaves(batch)), before)


def hash_state(training: Training, data: str) -> dict[str, str]:
    """Return the totals that a record gets: of this rank's data so far, weights and other state.

    They have the first 128 bits of each hash, as all totals do.
    """
    listed = list_state(training.model, training.list_optimizers(), training.list_schedulers())
    state = {(group, name): value for group, name, value in listed}
    weights = {name: state.pop((group, name)) for group, name in [*state] if group == "weights"}
    found = (data or hash_values(()), hash_named(weights), hash_named(state))
    return {name: text[:DIGEST_DIGITS] for name, text in zip(COMMITTED, found, strict=True)}


def find_sources(before: Sources | None = None) -> Sources:
    """Return the files of the program, those that its command names, and the packages.

    A package counts as used if a module of it is loaded.

    Args:
        before: What was found when the run began, since when files may have been edited: these
            count as they were then. A file that the command names counts if it is the same.
    """
    loaded = dict(sys.modules)  # a copy, as another thread may import meanwhile
    # Several modules may have one file, and hashing a file takes the most time.
    files = {
        getattr(module, "__file__", None) or ""
        for module in loaded.values()
        if not is_of_framework(getattr(module, "__name__", ""))
    }
    program = _hash_files(file for file in files if file.endswith((".py", ".so", ".pyd")))
    named = _hash_files(word.rpartition("=")[2] for word in sys.argv[1:])
    if before is not None:
        program |= before.program
        named = dict(named.items() & before.named.items())
    return Sources(
        program=program,
        named={path: digest for path, digest in named.items() if path not in program},
        packages=_list_packages(),
        used=tuple(sorted({name.partition(".")[0] for name in loaded} - sys.stdlib_module_names)),
    )


@cache
def _list_packages() -> dict[str, str]:
    """Return the version of each package, of those with one name that Python imports."""
    found: dict[str, str] = {}
    # In the order of sys.path, so that of two versions of a package the first is the one that is
    # imported. A broken installation has no metadata, which each reader of metadata reports by
    # another exception.
    for distribution in distributions():
        with suppress(Exception):
            metadata = distribution.metadata  # which is read each time
            if metadata["Name"] and metadata["Version"]:
                found.setdefault(metadata["Name"], metadata["Version"])
    return found


def _hash_files(names: Iterable[str]) -> dict[str, str]:
    """Return the hash of each file of the program, by its path from the working folder.

    A name may be that of no file, such as a word of a command.
    """
    found, resolved = {}, dict[str, Path]()
    # Names are texts here: a Path for each of thousands of modules takes most of the time, and
    # raises an error for a word that is too long for a name.
    for name in filter(os.path.isfile, names):
        folder, base = os.path.split(name)
        # Resolved, as a link may lead into or out of a folder of packages, and once each, as
        # thousands of modules are in a few hundred folders.
        if folder not in resolved:
            resolved[folder] = Path(folder).resolve()
        inner = resolved[folder]
        # A package that is installed from its folder (pip install -e) is the program's.
        is_installed = _STANDARD in (inner, *inner.parents) or PACKAGE_FOLDERS & {*inner.parts}
        if not is_installed and os.path.getsize(name) <= _MOST_BYTES:  # noqa: PTH202 - as above
            # Of a file that is a link the own name counts, by which the program opens it.
            found[os.path.relpath(inner / base)] = hash_file(inner / base)
    return found
