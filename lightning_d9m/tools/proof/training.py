"""A proof: one file that commits to everything that decides the result of a training.

It is a statement about files: the ledger, the checkpoints, and models with the final weights.
docs/proof.md describes what it says. All of it follows from these files and from the packages that
are installed, so a check makes it again, and compares.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import Distribution, packages_distributions
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.engine.ledger.format.reader import RankReader, list_continued
from lightning_d9m.engine.ledger.format.records import (
    DIGEST_DIGITS,
    Checkpoint,
    Digests,
    Sources,
    StepDigests,
)
from lightning_d9m.engine.ledger.kinds import COMMITTED, DATA, FINAL, WEIGHTS_HASH
from lightning_d9m.errors import D9mError, SettingError
from lightning_d9m.text import describe_names, escape, pluralize
from lightning_d9m.tools.proof.statement import Method, read_statement
from lightning_d9m.tools.segments.segment import RecordedRun

TRAINING = "urn:lightning-d9m:training:1"
UNSIGNED = "Nobody's signature was verified: give --signer."
# What pip writes beside the files of a package: it names the installer and where it came from, so
# two machines with the same package differ in it.
_NOT_CONTENT = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
_NO_DATA = sha256().hexdigest()[:DIGEST_DIGITS]
_NEVER = {
    "validation data": "only the batches of training are hashed",
    "other files": "of the files that the program reads, those of at most 256 MiB are hashed that "
    "its command names",
    "other packages": "of those that were not loaded, the ledger has the versions alone",
}
# A session sets them, and a process without one has others.
_OF_SESSION = ("flag.", "variable.", "world.", "python.hash", "compiler.", "horovod.", "package.")


# What a reader would take for proven although nothing checks it is refused.
class Training(Struct, forbid_unknown_fields=True):
    """The content of a proof: facts on its files.

    Attributes:
        ledger: The folder of the ledger.
        run: What follows from it: its header, the ``sources``, and the ``final`` digests.
        models: The files with the final weights.
        packages: SHA-256 of the content of each package that the training has loaded.
        uncommitted: What the proof does not commit to, and why.
    """

    ledger: str
    run: dict[str, Any]
    models: list[str]
    packages: dict[str, str]
    uncommitted: dict[str, str]


def make_proof(
    recorded: RecordedRun, models: Sequence[Path], folder: Path
) -> tuple[dict[str, str], Training]:
    """Return the SHA-256 of a run's files by their paths from a folder, and what is said of them.

    Args:
        recorded: The run, which has finished.
        models: Files that hold its final weights.
        folder: The folder that has the proof.

    Raises:
        SettingError: If the run has not finished, or was not recorded for a proof, a model has
            other weights, or the program in the working folder is not that of the run.
    """
    ledger, points, uncommitted = recorded.ledger, recorded.points, dict(_NEVER)
    if not recorded.is_finished:
        raise SettingError(
            f"The fit of {ledger.path} has not finished, so it has no result to prove. Prove a "
            "training that ended."
        )
    sources, finals = _read_ledger(recorded)
    for name, known in {**sources.program, **sources.named}.items():
        if not Path(name).is_file() or hash_file(Path(name)) != known:
            raise SettingError(
                f"The program's file {escape(name, 200)} is not here as it was when the training "
                "ran. Use the working folder and the code of the run."
            )
    for model in models:
        _check_model(finals[min(finals)], model)
    if recorded.last_step and any(own.totals[DATA] == _NO_DATA for own in finals.values()):
        uncommitted["training data"] = "the loop does not pass its batches to a Recorder"
    if not sources.program:
        uncommitted["program"] = "it is not in a file"
    if list_continued(ledger.files[min(ledger.files)]):
        uncommitted["program before the resume"] = "the proof has that of the resumed run"
    if missing := [f"step {point.step}" for point in points if not point.is_there]:
        why = f"removed or replaced since: {describe_names(missing, len(missing))}"
        uncommitted[pluralize(len(missing), "checkpoint")] = why
    final = {str(rank): dict(own.totals) for rank, own in finals.items()}
    run = {**ledger.header.as_record(), "sources": sources.as_record(), "final": final}
    (place,), files, named = (
        # Relative, so that the folder can be published as a whole.
        {os.path.relpath(path.resolve(), folder.resolve()): path for path in paths}
        for paths in ([ledger.path], _list_files(recorded), models)
    )
    packages, unread = _hash_packages(sources)
    said = Training(place, run, [*named], packages, uncommitted | unread)
    return {name: hash_file(path) for name, path in (files | named).items()}, said


def _read_ledger(recorded: RecordedRun) -> tuple[Sources, dict[int, Digests]]:
    """Return the record of the program, and the final digests by rank.

    Raises:
        SettingError: If a state that ends a segment has no SHA-256.
    """
    sources, finals, is_committed = None, dict[int, Digests](), True
    # Each rank: who has forged the XXH3 of one shard has forged the model.
    for rank, last in recorded.ledger.files.items():
        states = list[Checkpoint | StepDigests]()
        for file in (*list_continued(last), last):
            with RankReader(file) as reader:
                for record in reader.read_lines():
                    if isinstance(record, Sources):
                        sources = record
                    elif isinstance(record, Checkpoint | StepDigests):
                        states.append(record)
                    elif isinstance(record, Digests) and record.moment == FINAL:
                        finals[rank] = record
        # The first step after a checkpoint shows its state, and ends the segment before it.
        ends = [after for own, after in pairwise(states) if isinstance(own, Checkpoint)]
        known = [own.totals for own in ends if isinstance(own, StepDigests)]
        known.append(finals[rank].totals if rank in finals else {})
        is_committed &= all(totals.keys() >= {*COMMITTED} for totals in known)
    if sources is None or not is_committed:
        raise SettingError(
            f"{recorded.ledger.path} was not recorded for a proof throughout: its digests are "
            "XXH3, which can be forged. Train with DeterminismCallback(provable=True) or "
            "LIGHTNING_D9M_PROVABLE=1."
        )
    return sources, finals


def _check_model(final: Digests, model: Path) -> None:
    """Raise a ``SettingError`` unless a file holds the weights of a record."""
    from lightning_d9m.engine.hashing.sha256 import hash_named
    from lightning_d9m.integrations.lightning.saved_state import find_weights, load_checkpoint

    weights = find_weights(load_checkpoint(model))
    # By SHA-256 of the whole, not by the digests of the record: those are XXH3.
    names = final.groups.get("weights", {})  # a model has buffers, too
    found = hash_named({name: weights.get(name) for name in names})
    if found[:DIGEST_DIGITS] != final.totals[WEIGHTS_HASH]:
        raise SettingError(
            f"{escape(str(model), 400)} does not hold the final weights of the run. Name a file "
            "that the training has saved at its end, with whole weights."
        )


def _list_files(recorded: RecordedRun) -> Iterator[Path]:
    """Yield the files of a run: its ledger, those that it continues, and its checkpoints."""
    for own in recorded.ledger.files.values():
        yield from (own, *list_continued(own))
    for path in (point.path for point in recorded.points if point.is_there):
        yield from sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]


def _hash_packages(sources: Sources) -> tuple[dict[str, str], dict[str, str]]:
    """Return the hash of each package that a run has used, and which have none, and why."""
    hashes, unread = dict[str, str](), dict[str, str]()
    # An environment has hundreds; what was not loaded computed nothing.
    of_module = packages_distributions()
    used = {name for module in sources.used for name in of_module.get(module, ())}
    for name in sorted(used & sources.packages.keys()):
        here, version = Distribution.from_name(name), sources.packages[name]
        if here.version != version:
            unread[name] = f"the training used {version}, and here is {here.version}"
        elif digest := hash_package(here):
            hashes[name] = digest
        else:
            unread[name] = "it is a package that lists no files, as one installed from a folder"
    return hashes, unread


def hash_package(package: Distribution) -> str:
    """Return the SHA-256 of the files of a package; empty if it does not list them."""
    content = [
        file
        for file in sorted(package.files or (), key=str)
        # Scripts, which are outside, name the path of the interpreter.
        if file.name not in _NOT_CONTENT and file.suffix != ".pyc" and ".." not in file.parts
    ]
    if not content or "editable" in (package.read_text("direct_url.json") or ""):
        return ""  # its code is elsewhere
    paths = {file: Path(str(file.locate())) for file in content}
    hashes = {file: hash_file(own) if own.is_file() else "missing" for file, own in paths.items()}
    return sha256("".join(f"{file} {own}\n" for file, own in hashes.items()).encode()).hexdigest()


def open_proof(path: Path, signer: Method) -> tuple[RecordedRun, list[str], list[str]]:
    """Read a proof, and compare it with its files and with program, packages and stack here.

    Returns:
        The run that it is about, sentences on what contradicts it, and on what limits a check.

    Raises:
        LedgerError: If it is not a proof, or its ledger is not where it says.
    """
    files, said, problems = read_statement(path, TRAINING, Training, signer)
    folder = path.absolute().parent.resolve()
    recorded = RecordedRun(folder / said.ledger)
    left_out = "; ".join(map(escape, said.uncommitted))
    notes = [*([] if signer else [UNSIGNED]), f"The proof does not commit to: {left_out}."]
    if not problems:
        try:
            found, own = make_proof(recorded, [folder / name for name in said.models], folder)
        except D9mError as error:
            problems = [str(error)]
        else:
            problems, differing = _compare(files, said, found, own)
            if differing:
                shown = describe_names(differing[:4], len(differing))
                notes.insert(0, f"Results here may differ, as the stack does: {shown}.")
    return recorded, problems, notes


def _compare(
    files: Mapping[str, str], said: Training, found: Mapping[str, str], own: Training
) -> tuple[list[str], list[str]]:
    """Compare a proof with the one that is made here.

    Returns:
        What contradicts the proof, such as other content of the same version of a package; and what
        may let results differ here, such as another stack.
    """
    from lightning_d9m.engine.ledger.stack import capture_stack, stack_differences

    stack = [
        f"{name}: {escape(there)} there, {escape(here)} here"
        for name, there, here in stack_differences(own.run["stack"], capture_stack({}))
        if not name.startswith(_OF_SESSION)
    ]
    # For another Python or platform, the same version of a package has other files.
    is_other = any(line.startswith(("python.", "os.", "cpu.machine")) for line in stack)
    gaps = own.uncommitted.keys() - said.uncommitted.keys() - said.packages.keys()
    problems = [
        f"The proof does not say that it does not commit to: {gap}." for gap in sorted(gaps)
    ]
    differing = list[str]()
    parts: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("ledger's field", said.run, own.run),
        ("file", files, found),
        ("package", said.packages, own.packages),
    ]
    for what, expected, actual in parts:
        for name in sorted(expected.keys() | (actual.keys() - said.uncommitted.keys())):
            text = f"The {what} {escape(name, 200)}"
            if name not in expected:
                problems.append(f"{text} is not in the proof.")
            elif actual.get(name) == expected[name]:
                continue
            elif what == "package" and (is_other or name not in actual):
                why = own.uncommitted.get(name, "it has other content, or was not loaded")
                differing.append(f"{name}: {why}")
            else:
                is_there = name in actual
                problems.append(f"{text} is {'not that of the proof' if is_there else 'not here'}.")
    return problems, differing + stack


def choose_segments(proof: Path, number: int, there: Sequence[int], count: int) -> list[int]:
    """Return the segments that a number chooses: nobody knows them before the proof exists."""
    # Both must be fixed before: who makes a proof would choose a number, and a checker a proof.
    seed = int(sha256(f"{hash_file(proof)} {number}".encode()).hexdigest(), 16)
    return sorted(Random(seed).sample([*there], min(count, len(there))))  # noqa: S311 - it can be repeated
