"""The check of a proof: what can be told without training, and the verdict after it."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec import field as renamed

from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.errors import D9mError, LedgerError
from lightning_d9m.text import describe_names, escape
from lightning_d9m.tools.proof.statement import read_statement, write_statement
from lightning_d9m.tools.proof.training import (
    NOT_HERE,
    TRAINING,
    Training,
    choose_segments,
    make_proof,
)
from lightning_d9m.tools.segments.check import CheckReport
from lightning_d9m.tools.segments.segment import RecordedRun
from lightning_d9m.version import __version__

VERDICT = "https://in-toto.io/attestation/svr/v0.1"
CHECK = "urn:lightning-d9m:check:1"
UNSIGNED = "Nobody's signature was verified: give --signer."


def open_proof(path: Path, signer: str | None) -> tuple[RecordedRun, list[str], list[str]]:
    """Read a proof, and compare it with its files and with program, packages and stack here.

    Returns:
        The run that it is about, sentences on what contradicts it, and on what limits a check.

    Raises:
        LedgerError: If it is none, or its ledger is not beside it.
    """
    files, said, problems = read_statement(path, TRAINING, Training, signer)
    folder = path.absolute().parent.resolve()
    ledgers = [folder / name for name in files if name.endswith(".jsonl")]
    if not any(ledger.is_file() for ledger in ledgers):
        raise LedgerError(
            f"The ledger that {path} is about is not where it says: "
            f"{describe_names([str(own) for own in ledgers], len(ledgers))}. Put the files of the "
            "proof beside it, as they were."
        )
    recorded = RecordedRun(next(own for own in ledgers if own.is_file()).parent)
    left_out = "; ".join(map(escape, said.uncommitted))
    notes = [*([] if signer else [UNSIGNED]), f"The proof does not commit to: {left_out}."]
    # In the order of what a contradiction means for all that follows.
    problems = problems or [*_list_changed("The file", files, folder)]
    if not problems:
        try:
            names, own = make_proof(recorded, [folder / name for name in said.models], folder)
        except D9mError as error:
            problems = [str(error)]
        else:
            problems = [*_list_left_out({*names} - files.keys(), said, own)]
            _compare_here(said, own, problems, notes)
    return recorded, problems, notes


def _list_changed(what: str, hashes: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Yield sentences on files that do not have the SHA-256 that a proof says."""
    for name, expected in hashes.items():
        path, shown = folder / name, f"{what} {escape(name, 200)}"
        if not path.is_file():
            yield f"{shown} is not here."
        elif hash_file(path) != expected:
            yield f"{shown} has other content than the proof says."


def _list_left_out(files: Iterable[str], said: Training, own: Training) -> Iterator[str]:
    """Yield sentences on what a proof says of its run that the ledger and its files do not."""
    names = sorted(own.run.keys() | said.run.keys())
    named = [name for name in names if said.run.get(name) != own.run.get(name)]
    if named:
        yield f"The ledger is that of another run: {describe_names(named, len(named))} differ."
    for name in sorted(files):
        yield f"The proof is not about {escape(name, 200)}, which is a file of the run."
    # What the maker of the proof has installed and never loaded is not missed here.
    here = {what for what, why in own.uncommitted.items() if why != NOT_HERE}
    for what in sorted(
        (here | own.packages.keys()) - said.uncommitted.keys() - said.packages.keys()
    ):
        yield f"The proof does not say that it does not commit to: {what}."


def _compare_here(said: Training, own: Training, problems: list[str], notes: list[str]) -> None:
    """Compare program, packages and stack with those here, without training.

    Other files of the program, or other content of the same version of a package, contradict the
    proof; another stack limits the check.
    """
    sources = own.run["sources"]
    files = {**sources["program"], **sources["named"]}
    problems += _list_changed("The program's file", files, Path())
    stack, differing = [*_compare_stack(own.run["stack"])], list[str]()
    # For another Python or platform, the same version of a package has other files.
    is_other = any(line.startswith(("python.", "os.", "cpu.machine")) for line in stack)
    for name, expected in said.packages.items():
        if (here := own.packages.get(name)) is None:
            why = own.uncommitted.get(name, "the training has not loaded it")
            differing.append(f"{escape(name)}: {why}")
        elif here != expected:
            text = f"The package {escape(name)} {sources['packages'][name]} has other files here"
            if is_other:
                differing.append(text)
            else:
                problems.append(f"{text}.")
    if differing := [*differing, *stack]:
        shown = describe_names(differing[:4], len(differing))
        notes.insert(0, f"Results here may differ, as the stack does: {shown}.")


# A session sets them, and a process without one has others.
_OF_SESSION = ("flag.", "variable.", "world.", "python.hash", "compiler.", "horovod.", "package.")


def _compare_stack(expected: Mapping[str, Any]) -> Iterator[str]:
    from lightning_d9m.engine.ledger.stack import capture_stack, stack_differences

    for name, there, here in stack_differences(expected, capture_stack({})):
        if not name.startswith(_OF_SESSION):
            yield f"{name}: {escape(there)} there, {escape(here)} here"


class _Verdict(Struct):
    properties: list[str]
    check: CheckReport = renamed(name=CHECK)


def write_verdict(path: Path, proof: Path, report: CheckReport, method: str | None) -> None:
    """Write the verdict of a check, a Simple Verification Result of in-toto (version 0.1).

    Its subject is the proof, and it has the number of the check's choice, so that it cannot pass
    for the verdict on another proof or of another check. ``method`` and errors are those of
    ``write_statement``.
    """
    predicate = {
        "verifier": {"id": f"urn:lightning-d9m:{__version__}"},
        "timeCreated": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "properties": _list_properties(report),
        CHECK: report.as_json(),
    }
    write_statement(path, VERDICT, {proof.name: hash_file(proof)}, predicate, method)


def _list_properties(report: CheckReport) -> list[str]:
    """Return what a verdict says of a run, in the form of its standard."""
    count = f"{len(report.equal)}_OF_{len(report.there)}"
    return [f"LIGHTNING_D9M_SEGMENTS_EQUAL_{count}"] * (report.verdict == "equal")


def check_verdict(path: Path, proof: Path, signer: str | None, number: int | None) -> list[str]:
    """Return sentences on why a verdict is not one on a proof.

    Args:
        path: The verdict.
        proof: The proof.
        signer: The method that must verify the signature; None for none.
        number: The number with which its segments must have been chosen; None for any.

    Raises:
        LedgerError: If a file cannot be read, or is not a verdict.
    """
    files, verdict, problems = read_statement(path, VERDICT, _Verdict, signer)
    found = verdict.check
    # By content, because a stranger may have renamed it.
    if [*files.values()] != [hash_file(proof)]:
        problems.append(f"It is a verdict on another proof than {proof}.")
    _, said, _ = read_statement(proof, TRAINING, Training)
    there, numbers = said.run.get("segments", []), [own.number for own in found.checked]
    if found.there != there:
        problems.append("It is about other segments than those of the run.")
    if number is not None and (
        found.choice != number or numbers != choose_segments(proof, number, there, len(numbers))
    ):
        problems.append(f"Its segments were chosen with {found.choice}, not {number}.")
    # Who reads the verdict without this package reads the properties alone.
    if not verdict.properties or verdict.properties != _list_properties(found):
        problems.append(f"It says that the run is {found.verdict}.")
    return problems
