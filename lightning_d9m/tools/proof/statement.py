"""A proof: one file that commits to everything that decides the result of a training.

It is a statement of in-toto (version 1) about files: the ledger, the checkpoints, and models with
the final weights. docs/proof.md describes its predicate. The part ``run`` follows from the ledger
alone, so a check makes it again; ``packages`` is read where the proof is made.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import Distribution, packages_distributions
from pathlib import Path
from random import Random
from typing import Any

from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.engine.ledger.folder import Ledger
from lightning_d9m.engine.ledger.format.reader import list_continued
from lightning_d9m.engine.ledger.format.records import (
    DIGEST_DIGITS,
    Checkpoint,
    Digests,
    Sources,
    StepDigests,
)
from lightning_d9m.engine.ledger.kinds import COMMITTED, DATA, WEIGHTS_HASH
from lightning_d9m.errors import LedgerError, SettingError, file_errors, written_whole
from lightning_d9m.text import describe_names, escape, pluralize
from lightning_d9m.tools.segments.segment import RecordedRun

STATEMENT = "https://in-toto.io/Statement/v1"
TRAINING = "urn:lightning-d9m:training:1"
_MOST_BYTES = 64 * 2**20
# What pip writes beside the files of a package, and what Python makes of them.
_NOT_CONTENT = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
_NO_DATA = sha256().hexdigest()[:DIGEST_DIGITS]
_NEVER = {
    "validation data": "only the batches of training are hashed",
    "other files": "of the files that the program reads, those of at most 256 MiB are hashed that "
    "its command names",
}


def make_proof(recorded: RecordedRun, models: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Return the proof of a run, whose subjects have paths relative to ``folder``.

    Args:
        recorded: The run, which has finished.
        models: Files that hold its final weights.
        folder: The folder that will have the proof.

    Raises:
        SettingError: If a model has other weights, or a package has changed since the training.
    """
    ledger = recorded.ledger
    if not recorded.is_finished:
        raise SettingError(
            f"The fit of {ledger.path} has not finished, so it has no result to prove. Prove a "
            "training that ended."
        )
    folder = folder.resolve()
    for model in models:
        check_model(ledger, model)
    files = [*list_files(recorded), *(model.resolve() for model in models)]
    packages, unread = _hash_packages(find_sources(ledger))
    left_out = {**_NEVER, **unread, **list_uncommitted(recorded)}
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": os.path.relpath(file, folder), "digest": {"sha256": hash_file(file)}}
            for file in dict.fromkeys(files)
        ],
        "predicateType": TRAINING,
        "predicate": {
            "run": describe_run(recorded),
            "models": [os.path.relpath(model.resolve(), folder) for model in models],
            "packages": packages,
            "uncommitted": [{"what": what, "why": why} for what, why in left_out.items()],
        },
    }


def describe_run(recorded: RecordedRun) -> dict[str, Any]:
    """Return what follows from the ledger of a run."""
    ledger, header = recorded.ledger, recorded.ledger.header
    sources = find_sources(ledger)
    finals = {rank: ledger.outcome(rank).final for rank in ledger.files}
    return {
        "package": header.package,
        "created": header.created,
        "program": dict(header.program),
        "seed": header.seed,
        "ranks": header.world_size,
        "settings": dict(header.settings),
        "stack": dict(header.stack),
        "steps": recorded.last_step,
        "checkpoints": [point.step for point in recorded.points],
        "files": {} if sources is None else dict(sources.program),
        "named": {} if sources is None else dict(sources.named),
        "final": {str(rank): dict(own.totals) if own else {} for rank, own in finals.items()},
    }


def find_sources(ledger: Ledger) -> Sources | None:
    """Return the record of the program that a run has left; None without one."""
    with ledger.open(min(ledger.files)) as reader:
        found = (record for record in reader.read_lines() if isinstance(record, Sources))
        return next(found, None)


def check_model(ledger: Ledger, model: Path) -> None:
    """Raise a ``SettingError`` unless a file holds the final weights of a run."""
    from lightning_d9m.engine.recording.commitment import hash_weights
    from lightning_d9m.integrations.lightning.saved_state import find_weights, load_checkpoint

    final = ledger.outcome(min(ledger.files)).final
    expected = "" if final is None else final.totals.get(WEIGHTS_HASH, "")
    if final is None or not expected:
        raise SettingError(
            f"{ledger.path} has no SHA-256 of its final weights, so no model can be proved. Train "
            "with DeterminismCallback(provable=True), on whole weights."
        )
    weights = find_weights(load_checkpoint(model))
    names = final.groups.get("weights", {}).keys()  # a model has buffers, too
    if hash_weights({name: weights.get(name) for name in names}) != expected:
        raise SettingError(
            f"{escape(str(model))} does not hold the final weights of {ledger.path}. Name a file "
            "that the training has saved at its end."
        )


def list_files(recorded: RecordedRun) -> list[Path]:
    """Return the files of a run: its ledger, those that it continues, and its checkpoints."""
    files = []
    for own in recorded.ledger.files.values():
        files += [own, *list_continued(own)]
    for path in (point.path for point in recorded.points if point.is_there):
        files += (
            sorted(own for own in path.rglob("*") if own.is_file()) if path.is_dir() else [path]
        )
    return [own.resolve() for own in files]


def list_uncommitted(recorded: RecordedRun) -> dict[str, str]:
    """Return what a proof of a run does not commit to, as its ledger tells, with the reason."""
    ledger, found = recorded.ledger, dict[str, str]()
    sources = find_sources(ledger)
    why = "the run was not recorded with provable=True"
    for rank in ledger.files:
        for record in _list_needed(ledger, rank):
            if not record.totals.keys() >= {*COMMITTED}:
                found["state"] = f"{why} throughout: its digests are XXH3, and can be forged"
                found["training data"] = why
        final = ledger.outcome(rank).final
        if final is not None and final.totals.get(DATA) == _NO_DATA and recorded.last_step:
            found["training data"] = "the loop does not pass its batches to a Recorder"
    if sources is None or not sources.program:
        found["program"] = why if sources is None else "it is not in a file"
    if list_continued(ledger.files[min(ledger.files)]):
        found["program before the resume"] = "the proof has that of the resumed run"
    missing = [point.step for point in recorded.points if not point.is_there]
    if missing:
        named = describe_names([f"step {step}" for step in missing[:3]], len(missing))
        found[pluralize(len(missing), "checkpoint")] = f"removed or replaced since: {named}"
    return found


def _list_needed(ledger: Ledger, rank: int) -> Iterator[Digests | StepDigests]:
    """Yield the records whose state a proof needs: all but later steps after a checkpoint."""
    with ledger.open(rank) as reader:
        is_first = False
        for record in reader.read_lines():
            if isinstance(record, Digests) or (isinstance(record, StepDigests) and is_first):
                yield record
            if isinstance(record, Checkpoint | StepDigests):
                is_first = isinstance(record, Checkpoint)


def _hash_packages(sources: Sources | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return version and hash of the packages of a run, and which have no hash, and why.

    Raises:
        SettingError: If one has another version here.
    """
    if sources is None:
        return {}, {"packages": "the run was not recorded with provable=True"}
    packages: dict[str, Any] = {}
    unread = {}
    of_module = packages_distributions()
    used = {name for module in sources.used for name in of_module.get(module, ())}
    for name, version in sorted(sources.packages.items()):
        packages[name] = {"version": version}
        here = next(iter(Distribution.discover(name=name)), None)
        if here is None:
            unread[f"package {name}"] = "it is not installed any more"
        if here is None or name not in used:
            continue
        if here.version != version:
            raise SettingError(
                f"The training used {name} {version}, and here is {here.version}. Prove it in the "
                "environment of the training."
            )
        digest = hash_package(here)
        if digest is None:
            unread[f"package {name}"] = "it lists no files, as one that is installed from a folder"
        else:
            packages[name]["sha256"] = digest
    return packages, unread


def hash_package(package: Distribution) -> str | None:
    """Return the SHA-256 of the files of a package; None if it does not list them."""
    hasher = sha256()
    with suppress(ValueError):  # of an installer that writes no JSON
        if '"editable": true' in json.dumps(
            json.loads(package.read_text("direct_url.json") or "{}")
        ):
            return None  # its code is elsewhere
    files = sorted(package.files or (), key=str)
    content = [
        file
        for file in files
        # Scripts, which are outside, name the path of the interpreter.
        if file.name not in _NOT_CONTENT and file.suffix != ".pyc" and ".." not in file.parts
    ]
    if not any(file.suffix in (".py", ".so", ".pyd") for file in content):
        return None
    for file in content:
        path = Path(str(file.locate()))
        own = hash_file(path) if path.is_file() else "missing"
        hasher.update(f"{file} {own}\n".encode())
    return hasher.hexdigest()


def check_new_file(path: Path | None) -> None:
    """Raise a ``SettingError`` if a statement cannot be written to a new file."""
    if path is not None and (path.exists() or not path.absolute().parent.is_dir()):
        raise SettingError(
            f"{path} {'exists already' if path.exists() else 'is in no folder'}, so nothing can be "
            "written to it. Give another file."
        )


def write_statement(statement: Mapping[str, Any], path: Path) -> None:
    """Write a statement; on an error, ``path`` stays as it was.

    Raises:
        LedgerError: If it cannot be written.
    """
    with file_errors(LedgerError, f"{path} cannot be written"), written_whole(path) as part:
        part.write_text(json.dumps(statement, indent=1) + "\n", encoding="utf-8")


def read_statement(path: Path) -> dict[str, Any]:
    """Read a statement of in-toto.

    Raises:
        LedgerError: If the file cannot be read, or is none.
    """
    with file_errors(LedgerError, f"{path} cannot be read"):
        size = path.stat().st_size
        text = path.read_bytes() if size <= _MOST_BYTES else b""
    try:
        found = json.loads(text)
        is_statement = found["_type"] == STATEMENT and isinstance(found["predicate"], dict)
        is_statement &= isinstance(found["predicateType"], str)
        names = [(own["name"], own["digest"]["sha256"]) for own in found["subject"]]
        is_statement &= all(isinstance(word, str) for pair in names for word in pair)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_statement = False
    if not is_statement:
        raise LedgerError(
            f"{path} is not a statement of in-toto. Give a file that d9m prove or d9m check "
            "--verdict has written."
        )
    return dict(found)


def list_changed(statement: Mapping[str, Any], folder: Path) -> list[str]:
    """Return sentences on the files that are not as a statement about them says.

    They are found from the folder of the statement.
    """
    problems = []
    for subject in statement["subject"]:
        path, shown = folder / subject["name"], escape(subject["name"], 200)
        if not path.is_file():
            problems.append(f"{shown} is not there.")
        elif hash_file(path) != subject["digest"]["sha256"]:
            problems.append(f"{shown} has been changed since.")
    return problems


def compare_here(proof: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Compare program, packages and stack of a proof with those here, without training.

    Returns:
        Sentences on what contradicts the proof: other files of the program, or other content of
        the same version of a package. And on what may change results: the stack.
    """
    predicate = proof["predicate"]
    run, problems, notes = predicate["run"], [], []
    stack = [*_compare_stack(run["stack"])]
    # A package has other files for another Python or platform.
    is_elsewhere = any(text.startswith(("python.", "os.", "cpu.machine")) for text in stack)
    for path, expected in {**run["files"], **run["named"]}.items():
        file = Path(path)
        if not file.is_file():
            problems.append(f"The program's file {escape(path, 200)} is not here.")
        elif hash_file(file) != expected:
            problems.append(f"The program's file {escape(path, 200)} has other content here.")
    for name, known in predicate["packages"].items():
        if "sha256" not in known:
            continue
        found = [own for own in Distribution.discover(name=name) if own.version]
        if not found or found[0].version != known["version"]:
            here = found[0].version if found else "not installed"
            notes.append(f"{escape(name)}: {escape(known['version'])} there, {here} here")
        elif hash_package(found[0]) not in (None, known["sha256"]):
            text = f"The package {escape(name)} {escape(known['version'])} has other files here."
            (notes if is_elsewhere else problems).append(text.rstrip("." if is_elsewhere else ""))
    return problems, [*notes, *stack]


# A session sets them, and a process without one has others.
_OF_SESSION = ("flag.", "variable.", "world.", "python.hash", "compiler.", "horovod.")


def _compare_stack(expected: Mapping[str, Any]) -> Iterator[str]:
    from lightning_d9m.engine.ledger.stack import capture_stack, stack_differences

    for name, there, here in stack_differences(expected, capture_stack({})):
        if not name.startswith(_OF_SESSION) and not name.startswith("package."):
            yield f"{name}: {escape(there)} there, {escape(here)} here"


def choose_segments(proof: Path, number: int | None, there: Sequence[int], count: int) -> list[int]:
    """Return the segments that a number chooses: nobody knows them before the proof exists.

    Without a number, all count.
    """
    if number is None:
        return [*there]
    seed = int(sha256(f"{hash_file(proof)} {number}".encode()).hexdigest(), 16)
    return sorted(Random(seed).sample([*there], count))  # noqa: S311 - it can be repeated
