"""Proofs, files that commit to everything that decides the result of a training, and verdicts.

Both are statements of in-toto (version 1), files with their SHA-256 and what is said about them: a
proof is about the ledger, the checkpoints, and models with the final weights, and a verdict (a
Simple Verification Result) about a proof. docs/proof.md describes what a proof says. All of it
follows from these files and from the packages that are installed, so a check makes it again, and
compares.

The command of the package ``model-signing`` of OpenSSF signs statements: beside the file it writes
a bundle of Sigstore, with an envelope (DSSE) that names the file's SHA-256. A method is the words
that this command takes between ``sign`` or ``verify`` and the file, so that the keys, certificates
and identities that Sigstore knows can be used as there.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import Distribution, packages_distributions
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeAlias

from msgspec import Raw, Struct, json

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
from lightning_d9m.errors import D9mError, LedgerError, SettingError, file_errors, written_whole
from lightning_d9m.text import describe_names, escape, pluralize
from lightning_d9m.tools.segments.check import CheckReport
from lightning_d9m.tools.segments.segment import RecordedRun
from lightning_d9m.version import __version__

UNSIGNED = "Nobody's signature was verified: give --signer."
# A proof comes from anybody; one of 1,000 epochs has 35 kB.
_MOST_BYTES = 64 * 2**20
# What pip writes beside the files of a package: it names the installer and where it came from, so
# two machines with the same package differ in it.
_NOT_CONTENT = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
_GAP = "package "
_NO_DATA = sha256().hexdigest()[:DIGEST_DIGITS]
_NEVER = {
    "validation data": "only the batches of training are hashed",
    "other files": "of the files that the program reads, those of at most 256 MiB are hashed that "
    "its command names",
    "other packages": "of those that were not loaded, the ledger has the versions alone",
}
# A session sets them, and a process without one has others.
_OF_SESSION = ("flag.", "variable.", "world.", "python.hash", "compiler.", "horovod.", "package.")
# Without the working folder, whose modules Python would import first: it may be the publisher's.
# Python's option -I would hide a package of the user's folder or of PYTHONPATH, too.
_COMMAND = """
import os, sys
here = os.path.realpath("")
sys.path[:] = [own for own in sys.path if os.path.realpath(own) != here]
import runpy
runpy.run_module("model_signing", run_name="__main__", alter_sys=True)
"""
# Its status is 1 for a signature that is not valid, for a key that cannot be read, and without it.
_ANSWER = re.compile(
    r"^Verification failed with error:(?!.*\[Errno| Unable to load PEM) ?(.*)", re.MULTILINE
)
Method: TypeAlias = Sequence[str] | None


# Not the classes of in-toto's packages: they need protobuf, and a proof can be written, read and
# checked without a package that signs.
class _Subject(Struct):
    name: str
    digest: dict[Literal["sha256"], str]


class _Statement(Struct, kw_only=True, tag_field="predicateType", rename={"form": "_type"}):
    form: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
    subject: list[_Subject]

    def __post_init__(self) -> None:
        """Refuse two files of one name, of which ``files`` would have the last alone."""
        if len(self.files) != len(self.subject):
            raise ValueError("two files have one name")

    @property
    def files(self) -> dict[str, str]:
        """The SHA-256 of each file that it is about, by the path from its folder."""
        return {own.name: own.digest.get("sha256", "") for own in self.subject}


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


class Proof(_Statement, tag="urn:lightning-d9m:training:1"):
    """A proof."""

    predicate: Training


class _Result(Struct, rename={"time": "timeCreated", "check": "urn:lightning-d9m:check:1"}):
    verifier: dict[str, str]
    time: str
    properties: list[str]
    check: CheckReport


class _Verdict(_Statement, tag="https://in-toto.io/attestation/svr/v0.1"):
    predicate: _Result


def write_statement(path: Path, statement: Proof | _Verdict, method: Method) -> None:
    """Write a statement, and its signature beside it; without a method, it is not signed.

    Raises:
        LedgerError: If it cannot be written; ``path`` stays as it was.
        SettingError: If ``model-signing`` is not installed, or the method cannot be used.
    """
    with file_errors(LedgerError, f"{path} cannot be written"), written_whole(path) as part:
        part.write_bytes(json.format(json.encode(statement), indent=1) + b"\n")
    _call_signer("sign", path, method)


def read_statement(path: Path, kind: type[Any], method: Method) -> tuple[Any, list[str]]:
    """Read a statement; return why its signature is not valid, too: nothing without a method.

    Raises:
        LedgerError: If the file cannot be read, or is not a statement of this kind.
        SettingError: If ``model-signing`` is not installed, or the method cannot be used.
    """
    with file_errors(LedgerError, f"{path} cannot be read"):
        text = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b""
        found = json.decode(text, type=kind)
        # msgspec lets a tag and a field with a default be left out.
        if not {"_type", "predicateType"} <= json.decode(text, type=dict[str, Raw]).keys():
            raise ValueError("it lacks _type or predicateType")
    problem = _call_signer("verify", path, method)
    said = f"{path}, as it is now, has no valid signature by {' '.join(method or ())}: {problem}."
    return found, [said] if problem else []


def _call_signer(verb: str, path: Path, method: Method) -> str:
    """Run the command, if there is a method; return why the signature is not valid, if it is not.

    Raises:
        SettingError: If the command says nothing of the signature.
    """
    signature = Path(f"{path}.sig")
    if method is None:
        return ""
    if verb == "verify" and not signature.is_file():
        return f"No such file: {signature}"
    # The command, not the functions below it: what a method means stays that package's affair, and
    # anybody can verify with the same words and without this package.
    words = [sys.executable, "-c", _COMMAND, verb, *method]
    words += ["--signature", str(signature), str(path)]
    # Without keys, it may open a browser or ask for a code, so that its words must be seen.
    pipes = None if verb == "sign" and sys.stdin.isatty() else subprocess.PIPE
    done = subprocess.run(words, check=False, stdout=pipes or 2, stderr=pipes and subprocess.STDOUT)
    if not done.returncode:
        return ""
    text = (done.stdout or b"").decode(errors="replace").strip()
    problem = text.rpartition("\n")[2] or f"exit status {done.returncode}"
    if verb == "verify" and (answer := _ANSWER.search(text)):
        return answer[1] or "it is not that of this file and key"  # as cryptography says nothing
    raise SettingError(
        f"model_signing cannot {verb} {path}, which is here, with {' '.join(method)}: {problem}. "
        "Install 'lightning-d9m[proof]', and give its words, such as sigstore, or with a key of "
        "an elliptic curve: key --private_key FILE to sign, key --public_key FILE to verify."
    )


def make_proof(recorded: RecordedRun, models: Sequence[Path], folder: Path) -> Proof:
    """Make the proof of a run.

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
    return Proof(subject=_hash_subjects(files | named), predicate=said)


def _hash_subjects(files: Mapping[str, Path]) -> list[_Subject]:
    return [_Subject(name, {"sha256": hash_file(path)}) for name, path in files.items()]


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
        # What a broken installation leaves has no metadata, and hides the package. Its version is
        # None or an error, by the package that finds it.
        there = (
            own
            for own in Distribution.discover(name=name)
            if own.read_text("METADATA") or own.read_text("PKG-INFO")
        )
        here, version = next(there, Distribution.from_name(name)), sources.packages[name]
        if here.version != version:
            unread[_GAP + name] = f"the training used {version}, and here is {here.version}"
        elif digest := hash_package(here):
            hashes[name] = digest
        else:
            unread[_GAP + name] = "it lists no files, as one installed from a folder"
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
    proof, problems = read_statement(path, Proof, signer)
    said, folder = proof.predicate, path.absolute().parent.resolve()
    recorded = RecordedRun(folder / said.ledger)
    left_out = "; ".join(map(escape, said.uncommitted))
    notes = [*([] if signer else [UNSIGNED]), f"The proof does not commit to: {left_out}."]
    if not problems:
        try:
            own = make_proof(recorded, [folder / name for name in said.models], folder)
        except D9mError as error:
            problems = [str(error)]
        else:
            problems, differing = _compare(proof, own)
            if differing:
                shown = describe_names(differing[:4], len(differing))
                notes.insert(0, f"Results here may differ, as the stack does: {shown}.")
    return recorded, problems, notes


def _compare(proof: Proof, here: Proof) -> tuple[list[str], list[str]]:
    """Compare a proof with the one that is made here.

    Returns:
        What contradicts the proof, such as other content of the same version of a package; and what
        may let results differ here, such as another stack.
    """
    from lightning_d9m.engine.ledger.stack import capture_stack, stack_differences

    said, own = proof.predicate, here.predicate
    stack = [
        f"{name}: {escape(expected)} there, {escape(actual)} here"
        for name, expected, actual in stack_differences(own.run["stack"], capture_stack({}))
        if not name.startswith(_OF_SESSION)
    ]
    # For another Python or platform, the same version of a package has other files.
    is_other = any(line.startswith(("python.", "os.", "cpu.machine")) for line in stack)
    # No package has the name of another gap, nor does a gap excuse what is not a package.
    gaps = own.uncommitted.keys() - said.uncommitted.keys() - {_GAP + own for own in said.packages}
    problems = [
        f"The proof does not say that it does not commit to: {gap}." for gap in sorted(gaps)
    ]
    differing = list[str]()
    parts: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("ledger's field", said.run, own.run),
        ("file", proof.files, here.files),
        ("package", said.packages, own.packages),
    ]
    for what, expected, actual in parts:
        for name in sorted(expected.keys() | actual.keys()):
            text = f"The {what} {escape(name, 200)}"
            if name not in expected and what == "package" and _GAP + name in said.uncommitted:
                continue
            if name not in expected:
                problems.append(f"{text} is not in the proof.")
            elif actual.get(name) == expected[name]:
                continue
            elif what == "package" and (is_other or name not in actual):
                why = own.uncommitted.get(_GAP + name, "it has other content, or was not loaded")
                differing.append(f"{name}: {why}")
            else:
                problems.append(f"{text} is not here as the proof has it.")
    return problems, differing + stack


def choose_segments(proof: Path, number: int, there: Sequence[int], count: int) -> list[int]:
    """Return the segments that a number chooses: nobody knows them before the proof exists."""
    # Both must be fixed before: who makes a proof would choose a number, and a checker a proof.
    seed = int(sha256(f"{hash_file(proof)} {number}".encode()).hexdigest(), 16)
    return sorted(Random(seed).sample([*there], min(count, len(there))))  # noqa: S311 - it can be repeated


def write_verdict(path: Path, proof: Path, report: CheckReport, method: Method) -> None:
    """Write and sign the verdict of a check on a proof, as ``write_statement`` does."""
    verifier, now = {"id": f"urn:lightning-d9m:{__version__}"}, datetime.now(timezone.utc)
    properties = _list_properties(report)
    result = _Result(verifier, now.isoformat(timespec="seconds"), properties, report)
    verdict = _Verdict(subject=_hash_subjects({proof.name: proof}), predicate=result)
    write_statement(path, verdict, method)


def _list_properties(report: CheckReport) -> list[str]:
    """Return what a third party compares, so that no check passes for another."""
    found = f"LIGHTNING_D9M_SEGMENTS_EQUAL_{len(report.equal)}_OF_{len(report.there)}"
    found += "" if report.choice is None else f"_CHOSEN_BY_{report.choice}"
    return [found] * (report.verdict == "equal")


def check_verdict(
    path: Path, proof: Path, signer: Method, number: int | None
) -> tuple[str, list[str]]:
    """Return what a verdict says, and sentences on why it is not one that a proof holds.

    Args:
        path: The verdict.
        proof: The proof.
        signer: The method that must verify the signature; None for none.
        number: The number with which its segments must have been chosen; None for any.

    Raises:
        LedgerError: If a file cannot be read, or is not a verdict.
    """
    verdict, problems = read_statement(path, _Verdict, signer)
    # By content, because a stranger may have renamed it.
    if [*verdict.files.values()] != [hash_file(proof)]:
        problems.append(f"It is a verdict on another file than {proof}.")
    report, said = verdict.predicate.check, escape(" ".join(verdict.predicate.properties), 200)
    numbers, there = [own.number for own in report.checked], sorted({*report.there})
    chosen = there
    if report.choice is not None:
        chosen = choose_segments(proof, report.choice, there, len(numbers))
    if not said:
        problems.append("It does not say that the run is equal.")
    elif verdict.predicate.properties != _list_properties(report):
        problems.append(f"What it says does not follow from its check: {said}.")
    # Once each, and from the segments that are there.
    elif there != report.there or sorted(numbers) != sorted({*chosen} & {*numbers}):
        problems.append(f"Its check has other segments than those that were chosen: {numbers}.")
    elif number not in (None, report.choice):
        problems.append(f"Its segments were not chosen with {number}: {said}.")
    return said, problems
