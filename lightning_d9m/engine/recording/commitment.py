"""SHA-256 of the data, the state and the program of a run, with the option ``provable``.

``d9m prove`` writes one file from them, see ``tools/proof``.
"""

import os
import re
import site
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from sysconfig import get_path
from typing import Any

import torch

from lightning_d9m.engine.hashing.digest import DenseTensor, flatten_tensor, locate
from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.engine.hashing.nested_values import Note, Piece, encode, list_pytree_leaves
from lightning_d9m.engine.hashing.threads import map_on_threads
from lightning_d9m.engine.hashing.training_state import ModelTensors, list_state, plain_name
from lightning_d9m.engine.ledger.format.records import DIGEST_DIGITS, Sources
from lightning_d9m.engine.ledger.kinds import COMMITTED
from lightning_d9m.engine.probes.training import Training
from lightning_d9m.errors import DigestError

# A command may name its data, which would take minutes.
_MOST_BYTES = 2**28


def chain_batch(before: str, batch: object, unhashed: set[str]) -> str:
    """Return the hash of all batches so far, 64 hex digits, given that of those before.

    ``unhashed`` gets the names of types of which a value cannot be read.
    """
    # With paths, as an image and a mask that are swapped are other data.
    return hash_values(chain([before], *list_pytree_leaves(batch)), unhashed)


def hash_state(training: Training, data: str, unhashed: set[str]) -> dict[str, str]:
    """Return the totals that a record gets: of this rank's data so far, weights and other state.

    ``unhashed`` is as of ``chain_batch``.
    """
    # All that a state dict has, so that nothing in a file of weights is left to chance.
    saved = ModelTensors(training.model).list_saved()
    weights = {plain_name(name): tensor for name, tensor in saved}
    listed = list_state(training.model, training.list_optimizers(), training.list_schedulers())
    state = {(group, name): value for group, name, value in listed if group != "weights"}
    found = (data or hash_values(()), hash_named(weights, unhashed), hash_named(state, unhashed))
    return {name: text[:DIGEST_DIGITS] for name, text in zip(COMMITTED, found, strict=True)}


def find_sources(before: Sources | None = None, unhashed: Collection[str] = ()) -> Sources:
    """Return the files of the program, those that its command names, and what else is loaded.

    Files that were edited since the run began count as they were ``before``, and those that the
    command names if they are the same. ``unhashed`` is what ``hash_values`` has noted.
    """
    start, script = _find_start()
    # All is below the root, in which containers begin, and packages may be anywhere.
    inside = tuple({start, script} - {os.sep})
    roots = {_name_folder(str(Path(entry).absolute())) for entry in sys.path}
    find_root = cache(lambda own: max(filter(own.startswith, roots), key=len, default=""))
    program, used, gaps = dict[str, str](), set[str](), dict[str, str]()
    # By their places and not by their names, which the program may share with another package.
    for name, file in _list_files():
        folder, base = os.path.split(file)
        inner = _name_folder(folder)
        # Of a file that is a link the own name counts, by which the program opens it.
        path, root = inner + base, find_root(inner)
        # The folder of packages may be in that of Python's own modules.
        is_installed = root in _INSTALLED
        if not is_installed and inner.startswith(_STANDARD):
            continue
        if base and not is_installed and inner.startswith(inside):
            own = os.path.relpath(path, start)
            # Not of what Python has compiled of it: a segment does not run that.
            program[own] = hash_file(Path(path))
        elif base and root:
            used.add(_find_package(root, inner) or path.removeprefix(root))
        else:
            gaps[f"module {name}"] = "its code is in no file of a folder of sys.path"
    gaps |= dict.fromkeys((f"value of type {own}" for own in unhashed), "not all of it can be read")
    named = _hash_named_files(start)
    if before is not None:
        # One that is loaded, too, was in the program.
        loaded = {own: text for own, text in before.program.items() if own in named}
        known = {**before.named, **loaded}
        changed = {own for own, _ in named.items() ^ known.items()}
        gaps |= dict.fromkeys((f"file {own}" for own in changed), "the run has changed it")
        program = {**program, **before.program}
        named = dict(named.items() & known.items())
    return Sources(
        program=program,
        named={own: text for own, text in named.items() if own not in program},
        packages=list_packages(tuple(sys.path)),
        used=tuple(sorted(used)),
        gaps=gaps,
    )


def _list_files() -> Iterator[tuple[str, str]]:
    """Yield name and file of each module; of one whose code is in no file, an empty text.

    What loaded code makes, such as a part of an extension, is left out.
    """
    for name, module in [*sys.modules.items()]:  # a copy, as another thread may import meanwhile
        with suppress(AttributeError):  # anything may stand for a module
            # Not its attribute, which would load a module that waits for its first use.
            file = str(object.__getattribute__(module, "__dict__").get("__file__") or "")
            if Path(file).is_file():
                yield name, file if file.startswith(os.sep) else str(Path(file).absolute())
            elif name == "__main__" or (file and "." not in name):
                yield name, ""


def _find_start() -> tuple[str, str]:
    """Return the folder in which the program began, and that of its script.

    The program may be in another one now.
    """
    main = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    # Python puts that folder before the name that the command has.
    start = str(main).removesuffix(os.path.normpath("".join(sys.argv[:1])))
    is_known = main.is_absolute() and start and Path(start).is_dir()
    here = _name_folder(start if is_known else str(Path.cwd()))
    return here, _name_folder(str(main.absolute().parent)) if main.is_file() else here


@cache  # thousands of modules are in a few hundred folders
def _name_folder(path: str) -> str:
    """Return the path of a folder without links, with the separator that ends it."""
    return os.path.realpath(path).rstrip(os.sep) + os.sep


# Where this Python installs packages, and what belongs to Python.
_INSTALLED = {_name_folder(own) for own in (*site.getsitepackages(), site.getusersitepackages())}
_STANDARD = tuple(_name_folder(get_path(own)) for own in ("stdlib", "platstdlib", "scripts"))


@cache
def _find_package(root: str, folder: str) -> str:
    """Return the outermost package with a folder, from that of ``sys.path``; empty if none has."""
    inner = Path(folder).relative_to(root)
    # A folder without this file is a namespace, in which several packages are.
    above = (
        own for own in [*inner.parents[-2::-1], inner] if Path(root, own, "__init__.py").is_file()
    )
    return next(map(Path.as_posix, above), "")


def _hash_named_files(start: str) -> dict[str, str]:
    """Return the hash of each file that the command names, by its path from a folder."""
    # Texts, as a Path raises an error for a word that is too long for a name.
    words = (str(Path(start, word.rpartition("=")[2])) for word in sys.argv[1:])
    paths = {os.path.relpath(file, start): Path(file) for file in filter(os.path.isfile, words)}
    small = {name: file for name, file in paths.items() if file.stat().st_size <= _MOST_BYTES}
    return {name: hash_file(file) for name, file in small.items()}


@cache
def list_packages(_path: tuple[str, ...]) -> dict[str, str]:
    """Return what names the content of each package that Python imports from ``sys.path``.

    It is the version, with the tags of its wheel: that of another platform has other files.
    """
    found: dict[str, str] = {}
    # In the order of sys.path, so that of two versions of a package the first is the one that is
    # imported. A broken installation has no metadata, which each reader of metadata reports by
    # another exception.
    for package in distributions():
        with suppress(Exception):
            metadata = package.metadata  # which is read each time
            if metadata["Name"] and metadata["Version"]:
                tags = re.findall(r"(?m)^Tag: (\S+)", package.read_text("WHEEL") or "")
                found.setdefault(metadata["Name"], " ".join([metadata["Version"], *sorted(tags)]))
    return found


# XXH3 finds accidents at the speed of memory, and an attacker can make two tensors with one XXH3.
# SHA-256 takes about twenty times as long, so it is for runs that are recorded for a proof.
def hash_values(values: Iterable[object], unhashed: set[str] | None = None) -> str:
    """Return the SHA-256, as 64 hex digits, of what ``encode`` reads of values, in order.

    Types, shapes, dtypes and all bytes count. Tensors are copied to the host one after the other;
    of a sharded one the part of this rank counts. ``unhashed`` gets the name of the type of a value
    that cannot be read as a whole.
    """
    hasher = sha256()
    # As in digest.py: no subclass of a tensor interferes.
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001
        for value in values:
            reasons: list[str] = []
            _update(hasher, encode(value, reasons.append), reasons.append)
            if reasons and unhashed is not None:
                unhashed.add(f"{type(value).__module__}.{type(value).__qualname__}")
    return hasher.hexdigest()


def hash_named(values: Mapping[Any, object], unhashed: set[str] | None = None) -> str:
    """Return the SHA-256 of values by name, in any order, on as many threads as torch uses."""
    found = map_on_threads(
        lambda own: hash_values([own], unhashed), values.values(), torch.get_num_threads()
    )
    return hash_values([dict(zip(values, found, strict=True))])


def _update(hasher: Any, pieces: Iterable[Piece], note: Note) -> None:
    for piece in pieces:
        if isinstance(piece, bytes):
            hasher.update(piece)
            continue
        try:
            flat = flatten_tensor(piece)
            if isinstance(flat, DenseTensor):
                locate(flat.data)  # raises for one without memory
        except DigestError as error:
            note(str(error))
            flat = encode(type(piece))
        if isinstance(flat, DenseTensor):
            hasher.update(flat.header)  # with the shape, so that the size of what follows is known
            data = flat.data.detach().resolve_conj().resolve_neg().cpu().contiguous()
            hasher.update(data.reshape(-1).view(torch.uint8).numpy().data)
        else:
            _update(hasher, flat, note)
