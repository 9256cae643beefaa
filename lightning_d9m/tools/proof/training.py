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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from hashlib import sha256
from importlib.machinery import PathFinder, all_suffixes
from importlib.metadata import packages_distributions
from pathlib import Path
from random import Random
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

from msgspec import Struct, json

from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.engine.ledger.format.reader import list_continued
from lightning_d9m.engine.ledger.format.records import DIGEST_DIGITS, Digests, Sources
from lightning_d9m.engine.ledger.kinds import COMMITTED, DATA, FINAL, WEIGHTS_HASH
from lightning_d9m.engine.ledger.stack import (
    MISSING,
    capture_stack,
    stack_differences,
    table_differences,
)
from lightning_d9m.errors import D9mError, LedgerError, SettingError, file_errors, written_whole
from lightning_d9m.text import describe_names, escape, pluralize
from lightning_d9m.tools.segments.check import CheckReport
from lightning_d9m.tools.segments.segment import RecordedRun, find_resume
from lightning_d9m.version import __version__

UNSIGNED = "Nobody's signature was verified: give --signer."
# A proof comes from anybody; one of 1,000 epochs has 48 kB.
_MOST_BYTES = 64 * 2**20
_NO_DATA = sha256().hexdigest()[:DIGEST_DIGITS]
_NEVER = {
    "validation data": "only the batches of training are hashed",
    "other files": "of the files that the program reads, those of at most 256 MiB are hashed that "
    "its command names",
    "other packages": "of those that were not loaded, the ledger has the versions alone, and of "
    "Python's own modules that of Python",
    "other processes": "what only they have loaded, such as the workers of a loader, is not hashed",
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
_FORM: Final = "https://in-toto.io/Statement/v1"
_is_hash = re.compile("[0-9a-f]{64}").fullmatch
_S = TypeVar("_S")
_Kind = TypeVar("_Kind")
_Predicate = TypeVar("_Predicate")
Method: TypeAlias = Sequence[str] | None


# Not the classes of in-toto's packages: they need protobuf, and a proof can be written, read and
# checked without a package that signs.
class _Subject(Struct):
    name: str
    digest: dict[Literal["sha256"], str]


class _Statement(
    Struct, Generic[_Kind, _Predicate], rename={"form": "_type", "kind": "predicateType"}
):
    form: Literal["https://in-toto.io/Statement/v1"]
    kind: _Kind
    subject: list[_Subject]
    predicate: _Predicate


# What a reader would take for proven although nothing checks it is refused.
class ProvenTraining(Struct, forbid_unknown_fields=True):
    """The predicate of a proof: facts on its files, which docs/proof.md describes."""

    ledger: str
    run: dict[str, Any]
    models: list[str]
    packages: dict[str, str]
    uncommitted: dict[str, str]

    @property
    def gaps(self) -> dict[str, str]:
        """All that the proof does not commit to, and why."""
        known = self.packages.items()
        return self.uncommitted | {f"package {n}": own for n, own in known if not _is_hash(own)}


class _Result(Struct, rename={"time": "timeCreated", "check": "urn:lightning-d9m:check:1"}):
    verifier: dict[str, str]
    time: str
    properties: list[str]
    check: CheckReport


Proof: TypeAlias = _Statement[Literal["urn:lightning-d9m:training:1"], ProvenTraining]
_Verdict: TypeAlias = _Statement[Literal["https://in-toto.io/attestation/svr/v0.1"], _Result]


def write_statement(path: Path, statement: Struct, method: Method) -> None:
    """Write a statement, and its signature beside it; without a method, it is not signed.

    Raises:
        LedgerError: If it cannot be written; ``path`` stays as it was.
        SettingError: If it cannot be signed; ``path`` is removed.
    """
    with file_errors(LedgerError, f"{path} cannot be written"), written_whole(path) as part:
        part.write_bytes(json.format(json.encode(statement), indent=1) + b"\n")
    try:
        _call_signer("sign", path, method)
    except BaseException:  # one without the signature could be taken for what was asked for
        path.unlink()
        raise


def read_statement(path: Path, kind: type[_S], method: Method) -> _S:
    """Read a statement, whose signature must be valid by the method, if there is one.

    Raises:
        LedgerError: If the file cannot be read, or is not a statement of this kind.
        SettingError: If its signature is not valid, or cannot be verified.
    """
    _call_signer("verify", path, method)
    advice = "Give a file that d9m prove wrote, or the ledger of a run."
    with file_errors(LedgerError, f"{path} cannot be read", advice):
        text = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b""
        return json.decode(text, type=kind)


def _call_signer(verb: str, path: Path, method: Method) -> None:
    """Sign or verify a file, if there is a method.

    Raises:
        SettingError: If the command fails.
    """
    if method is None:
        return
    # The command, not the functions below it: what a method means stays that package's affair, and
    # anybody can verify with the same words and without this package.
    words = [sys.executable, "-c", _COMMAND, verb, *method, "--signature", f"{path}.sig", str(path)]
    # Without keys, it may open a browser or ask for a code, so that its words must be seen.
    pipes = None if verb == "sign" and sys.stdin.isatty() else subprocess.PIPE
    done = subprocess.run(words, check=False, stdout=pipes or 2, stderr=pipes and subprocess.STDOUT)
    if done.returncode:
        said = (done.stdout or b"").decode(errors="replace").strip().rpartition("\n")[2]
        advice = (
            " Install 'lightning-d9m[proof]', and give its words, such as sigstore, or with a key "
            "of an elliptic curve: key --private_key FILE to sign, key --public_key FILE to verify."
        )
        raise SettingError(
            f"model_signing does not {verb} {path}, as it is now, by {' '.join(method)}: "
            f"{said or f'exit status {done.returncode}'}."
            f"{'' if said.startswith('Verification failed') else advice}"
        )


def try_to_sign(method: Method) -> None:
    """Sign what is thrown away, so that a wrong key is an error before what takes hours.

    Raises:
        SettingError: If it cannot be signed.
    """
    # That of sigstore would ask for a login twice, and stay in a public log.
    if method and method[0] != "sigstore":
        with tempfile.TemporaryDirectory() as folder:
            write_statement(Path(folder, "trial.json"), _Subject("", {}), method)


def make_proof(recorded: RecordedRun, models: Sequence[Path], folder: Path) -> Proof:
    """Make the proof of a run; ``models`` hold its final weights, ``folder`` has the proof.

    Raises:
        SettingError: If the run has not finished, or was not recorded for a proof, a model has
            other weights, or the program in the working folder is not that of the run.
    """
    ledger = recorded.ledger
    # Each rank: who has forged the XXH3 of one shard has forged the model.
    ranks = {str(rank): RecordedRun(file) for rank, file in ledger.files.items()}
    finals = {rank: own.last_state for rank, own in ranks.items()}
    is_finished = all(own.is_finished for own in ranks.values())
    is_finished &= all(getattr(own, "moment", "") == FINAL for own in finals.values())
    ends = [own.totals.keys() for run in ranks.values() for own in run.ends]
    sources = recorded.sources
    if sources is None or not (is_finished and all(own >= {*COMMITTED} for own in ends)):
        what = "it was not recorded for a proof throughout: its XXH3 can be forged"
        raise SettingError(
            f"{ledger.path} cannot be proved, as {what if is_finished else 'it has not finished'}. "
            "Train to the end with DeterminismCallback(provable=True) or LIGHTNING_D9M_PROVABLE=1."
        )
    for file, known in {**sources.program, **sources.named}.items():
        if not Path(file).is_file() or hash_file(Path(file)) != known:
            raise SettingError(
                f"The program's file {escape(file, 200)} is not here as it was when the training "
                "ran. Use the working folder and the code of the run."
            )
    for model in models:
        _check_model(recorded, model)
    final = {rank: dict(own.totals) for rank, own in finals.items() if own is not None}
    run = {**ledger.header.as_record(), "sources": sources.as_record(), "final": final}

    def name(path: Path) -> str:  # relative, so that the folder can be published as a whole
        return os.path.relpath(path.resolve(), folder.resolve())

    files = {name(path): path for path in (*_list_files(recorded), *models)}
    subject = [_Subject(own, {"sha256": hash_file(path)}) for own, path in files.items()]
    packages, gaps = dict(_hash_packages(sources)), dict(_list_gaps(recorded, final))
    said = ProvenTraining(name(ledger.path), run, [*map(name, models)], packages, gaps)
    return Proof(_FORM, "urn:lightning-d9m:training:1", subject, said)


def _check_model(recorded: RecordedRun, model: Path) -> None:
    """Raise a ``SettingError`` unless a file holds the final weights of a run."""
    from lightning_d9m.engine.recording.commitment import hash_named
    from lightning_d9m.integrations.lightning.saved_state import find_weights, load_checkpoint

    final = recorded.last_state
    assert isinstance(final, Digests), "the run has finished"
    weights = find_weights(load_checkpoint(model), final.groups.get("weights", ()))
    # By SHA-256 of the whole, not by the digests of the record: those are XXH3.
    if hash_named(weights)[:DIGEST_DIGITS] != final.totals[WEIGHTS_HASH]:
        raise SettingError(
            f"{escape(str(model), 400)} does not hold the final weights of the run, or more than "
            "its parameters and saved buffers. Name a file that the training has saved at its "
            "end, with whole weights."
        )


def _list_files(recorded: RecordedRun) -> Iterator[Path]:
    """Yield the files of a run: its ledger, those that it continues, and its checkpoints."""
    for own in recorded.ledger.files.values():
        yield from (own, *list_continued(own))
    for path in (point.path for point in recorded.points if point.is_there):
        yield from sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]


def _list_gaps(
    recorded: RecordedRun, final: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield what the proof of a run does not commit to, beside packages, and why."""
    yield from {**_NEVER, **recorded.gaps}.items()
    if recorded.last_step and any(own[DATA] == _NO_DATA for own in final.values()):
        yield "training data", "the loop does not pass its batches to a Recorder"
    if recorded.sources is None or not recorded.sources.program:
        yield "program", "it is not in a file"
    if find_resume(recorded.ledger) is not None:
        yield "program before the resume", "the proof has that of the resumed run"
    if missing := [f"step {point.step}" for point in recorded.points if not point.is_there]:
        why = f"removed or replaced since: {describe_names(missing, len(missing))}"
        yield pluralize(len(missing), "checkpoint"), why


def _hash_packages(sources: Sources) -> Iterator[tuple[str, str]]:
    """Yield the hash of each package or module that a run has used, or why there is none."""
    from lightning_d9m.engine.recording.commitment import list_packages

    here, known = list_packages(tuple(sys.path)), sources.packages
    other = {name for name in known.keys() & here.keys() if here[name] != known[name]}
    of_module = packages_distributions() if other else {}  # it reads all lists of files
    # An environment has hundreds; what was not loaded computed nothing.
    for unit in sources.used:
        if named := sorted(other.intersection(of_module.get(re.split("[/.]", unit)[0], ()))):
            yield unit, f"the training used {known[named[0]]}, and here is {here[named[0]]}"
        else:
            path = _find_unit(unit)
            yield unit, hash_tree(path) if path else "it is not here"


def _find_unit(unit: str) -> Path | None:
    """Return the folder of a package, or the file of a module, that Python would import here."""
    spec, folders = None, None
    for part in unit.split("/"):
        ending = next(filter(part.endswith, all_suffixes()), "")
        name = part.removesuffix(ending)
        # The ledger may be anybody's, and name any folder.
        spec = PathFinder.find_spec(name, folders) if name.strip(".") else None
        if spec is None:
            return None
        # A package hides a module of its name, and a folder without __init__.py hides nothing.
        folders = spec.submodule_search_locations and [*spec.submodule_search_locations]
    origin = Path(spec.origin) if spec and spec.origin else None
    return origin.parent if origin and folders else origin


def hash_tree(path: Path) -> str:
    """Return the SHA-256 of the files of a package, or of one file."""
    # Not of those that RECORD lists: Python loads what is there.
    files = sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]
    names = {file.relative_to(path.parent).as_posix(): file for file in files}
    named = [(name, file) for name, file in names.items() if "/__pycache__/" not in name]
    return sha256("".join(f"{n} {hash_file(file)}\n" for n, file in named).encode()).hexdigest()


def open_proof(path: Path, signer: Method) -> tuple[RecordedRun, CheckReport]:
    """Read a proof, and compare it with its files and with program, packages and stack here.

    The report has what contradicts the proof, and what limits a check of the run. Its errors are
    those of ``read_statement`` and ``RecordedRun``.
    """
    proof, folder = read_statement(path, Proof, signer), path.absolute().parent.resolve()
    # Before its program runs, which may change the file.
    said, report = proof.predicate, CheckReport(proof=hash_file(path))
    recorded = RecordedRun(folder / said.ledger)
    recorded.watch(_list_files(recorded))
    try:
        here = make_proof(recorded, [folder / name for name in said.models], folder)
    except D9mError as error:
        report.problems = [str(error)]
    else:
        report.problems, differing = _compare(proof, here)
        if differing:
            report.notes = [f"Results here may differ, as the stack does: {'; '.join(differing)}."]
    left_out = "; ".join(map(escape, said.gaps))
    report.notes += [*([] if signer else [UNSIGNED]), f"The proof does not commit to: {left_out}."]
    return recorded, report


def _list_facts(proof: Proof) -> dict[tuple[str, str], Any]:
    """Return all that a proof says, by the kind of fact and its name."""
    said = proof.predicate
    tables = {"ledger's field": said.run, "package": said.packages}
    tables["uncommitted part"] = said.uncommitted
    facts = {(what, name): own for what, table in tables.items() for name, own in table.items()}
    for subject in proof.subject:
        place = ("file", subject.name)
        # Of two with one name, no file has both.
        facts[place] = f"{facts.get(place, '')} {subject.digest.get('sha256', '')}"
    return facts


def _compare(proof: Proof, here: Proof) -> tuple[list[str], list[str]]:
    """Return what contradicts a proof, and what may let results differ here: packages, stack."""
    stack = stack_differences(here.predicate.run["stack"], capture_stack())
    other = [
        f"{name}: {escape(expected)} there, {escape(actual)} here"
        for name, expected, actual in stack
        if not name.startswith(_OF_SESSION)
    ]
    problems, differing = list[str](), list[str]()
    for (what, fact), expected, actual in table_differences(_list_facts(proof), _list_facts(here)):
        name = escape(fact, 200)
        if expected is MISSING:
            problems.append(f"The {what} {name} is not in the proof.")
        elif what == "uncommitted part" or (what == "package" and not _is_hash(expected)):
            continue  # it may leave out more than it must, and says so
        elif what == "package" and not _is_hash(actual):
            differing.append(f"{name}: {escape(actual, 200)}")
        else:
            problems.append(f"The {what} {name} is not here as the proof has it.")
    return problems, differing + other


def choose_segments(proof: str, number: int, there: Sequence[int], count: int) -> list[int]:
    """Return the segments that a number chooses: nobody knows them before the proof exists.

    ``proof`` is the SHA-256 of its file.
    """
    # Both must be fixed before: who makes a proof would choose a number, and a checker a proof.
    seed = int(sha256(f"{proof} {number}".encode()).hexdigest(), 16)
    return sorted(Random(seed).sample([*there], min(count, len(there))))  # noqa: S311 - it can be repeated


def _name_property(report: CheckReport) -> str:
    """Return all of a check that a third party compares, so that none passes for another."""
    found = f"LIGHTNING_D9M_SEGMENTS_EQUAL_{len(report.equal)}_OF_{len(report.there)}"
    return found + ("" if report.choice is None else f"_CHOSEN_BY_{report.choice}")


def write_verdict(path: Path, name: str, report: CheckReport, method: Method) -> None:
    """Write and sign the verdict of a check on a proof, as ``write_statement`` does.

    ``name`` is that of the file of the proof.
    """
    # Without the folders of this machine.
    checked = [replace(own, ledgers=(), checkpoint="") for own in report.checked]
    said = replace(report, output="", run="", checked=checked)
    verifier, now = {"id": f"urn:lightning-d9m:{__version__}"}, datetime.now(timezone.utc)
    properties = [_name_property(report)] * (report.verdict == "equal")
    result = _Result(verifier, now.isoformat(timespec="seconds"), properties, said)
    subject = [_Subject(name, {"sha256": report.proof})]
    verdict = _Verdict(_FORM, "https://in-toto.io/attestation/svr/v0.1", subject, result)
    write_statement(path, verdict, method)


def check_verdict(
    path: Path, proof: Path, signer: Method, number: int | None
) -> tuple[str, list[str], list[str]]:
    """Return what a verdict says, its notes, and sentences on why it is not one that a proof holds.

    Unless ``number`` is None, its segments must have been chosen with it. The errors are those of
    ``read_statement``.
    """
    verdict, problems = read_statement(path, _Verdict, signer), list[str]()
    digest = hash_file(proof)
    said, report = verdict.predicate.properties, verdict.predicate.check
    # By content, because a stranger may have renamed it.
    if [own.digest for own in verdict.subject] != [{"sha256": digest}]:
        problems.append(f"It is a verdict on another file than {proof}.")
    if report.verdict != "equal" or said != [_name_property(report)]:
        problems.append("It does not say that the run is equal.")
    elif number not in (None, report.choice) and len(report.equal) != len(report.there):
        problems.append(f"Its segments were not chosen with {number}: {said[0]}.")
    elif report.choice is not None:
        checked = sorted(own.number for own in report.checked)
        if checked != choose_segments(digest, report.choice, report.there, len(checked)):
            problems.append(f"Its segments are not those that {report.choice} chooses: {checked}.")
    return escape(" ".join(said), 200), [escape(own, 400) for own in report.notes], problems
