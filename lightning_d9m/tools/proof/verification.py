"""The check of a proof: what can be told without training, and the verdict after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.errors import D9mError, LedgerError, SettingError
from lightning_d9m.text import describe_names, escape
from lightning_d9m.tools.proof.signature import verify
from lightning_d9m.tools.proof.statement import (
    STATEMENT,
    TRAINING,
    check_model,
    choose_segments,
    compare_here,
    describe_run,
    find_sources,
    list_changed,
    list_files,
    list_uncommitted,
    read_statement,
)
from lightning_d9m.tools.segments.check import CheckReport
from lightning_d9m.tools.segments.segment import RecordedRun
from lightning_d9m.version import __version__

VERDICT = "https://in-toto.io/attestation/svr/v0.1"
CHECK = "urn:lightning-d9m:check:1"
_UNSIGNED = "Nobody's signature was verified: give --public-key, or --identity."


@dataclass(frozen=True)
class Signer:
    """The signer that a statement must have: a public key, or an identity that Sigstore knows."""

    key: Path | None = None
    identity: str | None = None
    provider: str | None = None

    def __post_init__(self) -> None:
        if (self.identity is None) != (self.provider is None):
            raise SettingError("--identity and --provider belong together. Give both, or a key.")
        if self.key is not None and not self.key.is_file():
            raise SettingError(f"No such file: {self.key}. Give a public key.")

    def find_problem(self, path: Path) -> str:
        """Return why this signer has not signed a file; empty if it has, or none is given."""
        if self.key is None and self.identity is None:
            return ""
        return verify(path, self.key, self.identity or "", self.provider or "")

    @property
    def note(self) -> str:
        """A sentence if the signer is not given."""
        return "" if self.key or self.identity else _UNSIGNED


@dataclass
class Proof:
    """A proof whose files were read.

    Attributes:
        path: Its file.
        statement: Its content.
        recorded: The run that it is about.
        problems: Sentences on what contradicts it; none if it holds as far as no training tells.
        notes: Sentences on what limits a check.
    """

    path: Path
    statement: Mapping[str, Any]
    recorded: RecordedRun
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def open_proof(path: Path, signer: Signer) -> Proof:
    """Read a proof, and compare it with its files and with program, packages and stack here.

    Raises:
        LedgerError: If it is none, or its ledger is not beside it.
    """
    statement, folder = read_statement(path), path.absolute().parent.resolve()
    if statement["predicateType"] != TRAINING:
        raise LedgerError(f"{path} is not a proof of a training. d9m prove writes one.")
    names = [folder / own["name"] for own in statement["subject"]]
    ledgers = [name for name in names if name.suffix == ".jsonl" and name.is_file()]
    if not ledgers:
        raise LedgerError(
            f"The ledger that {path} is about is not where it says: "
            f"{describe_names([str(name) for name in names[:1]], 1)}. Put the files of the proof "
            "beside it, as they were."
        )
    proof = Proof(path, statement, RecordedRun(ledgers[0].parent))
    # In the order of what a contradiction means for all that follows.
    proof.problems += filter(None, [signer.find_problem(path)])
    proof.problems += list_changed(statement, folder)
    try:
        if not proof.problems:
            proof.problems += _compare_ledger(proof, folder)
        problems, notes = compare_here(statement)
        left_out = [own["what"] for own in statement["predicate"]["uncommitted"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"{path} has not the form of a proof of a training: {error}.") from error
    proof.problems += problems
    if notes:
        named = describe_names(notes[:4], len(notes))
        proof.notes.append(f"Results here may differ, as the stack does: {named}.")
    proof.notes += filter(None, [signer.note])
    proof.notes.append(f"The proof does not commit to: {'; '.join(map(escape, left_out))}.")
    return proof


def _compare_ledger(proof: Proof, folder: Path) -> list[str]:
    """Return sentences on what a proof says of its run that the ledger does not."""
    predicate = proof.statement["predicate"]
    try:
        run = describe_run(proof.recorded)
        for model in predicate["models"]:
            check_model(proof.recorded.ledger, folder / model)
    except D9mError as error:
        return [str(error)]
    named = [name for name, own in run.items() if predicate["run"].get(name) != own]
    if named:
        return [f"The ledger is that of another run: {describe_names(named, len(named))} differ."]
    # What a proof leaves out, it must name.
    subjects = {(folder / own["name"]).resolve() for own in proof.statement["subject"]}
    problems = [
        f"The proof is not about {escape(str(file), 200)}, which is a file of the run."
        for file in list_files(proof.recorded)
        if file not in subjects
    ]
    said = {own["what"] for own in predicate["uncommitted"]}
    left_out = sorted(list_uncommitted(proof.recorded).keys() - said)
    problems += [f"The proof does not say that it does not commit to: {own}." for own in left_out]
    sources = find_sources(proof.recorded.ledger)
    packages = {name: own["version"] for name, own in predicate["packages"].items()}
    if sources is not None and packages != dict(sources.packages):
        problems.append("The proof names other packages than the ledger.")
    return problems


def make_verdict(proof: Proof, report: CheckReport) -> dict[str, Any]:
    """Return the verdict of a check, a Simple Verification Result of in-toto (version 0.1).

    Its subject is the proof, and it has the number of the check's choice, so that it cannot pass
    for the verdict on another proof or of another check.
    """
    equal = report.verdict == "equal"
    count = f"{len(report.equal)}_OF_{report.segments}"
    return {
        "_type": STATEMENT,
        "subject": [{"name": proof.path.name, "digest": {"sha256": hash_file(proof.path)}}],
        "predicateType": VERDICT,
        "predicate": {
            "verifier": {"id": f"urn:lightning-d9m:{__version__}"},
            "timeCreated": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "properties": [f"LIGHTNING_D9M_SEGMENTS_EQUAL_{count}"] if equal else [],
            CHECK: report.as_json(),
        },
    }


def check_verdict(path: Path, proof: Path, signer: Signer, number: int | None) -> list[str]:
    """Return sentences on why a verdict is not one on a proof.

    Args:
        path: The verdict.
        proof: The proof.
        signer: The signer that the verdict must have.
        number: The number with which its segments must have been chosen; None for any.

    Raises:
        LedgerError: If a file cannot be read, or is not a statement.
    """
    statement = read_statement(path)
    problems = [*filter(None, [signer.find_problem(path)])]
    digests: Sequence[str] = [own["digest"]["sha256"] for own in statement["subject"]]
    found = statement["predicate"].get(CHECK, {})
    if statement["predicateType"] != VERDICT or not isinstance(found, dict):
        return [*problems, f"{path} is not a verdict of d9m check."]
    if digests != [hash_file(proof)]:
        problems.append(f"It is a verdict on another proof than {proof}.")
    try:
        there, numbers = found["there"], [own["number"] for own in found["checked"]]
        drawn = choose_segments(proof, found["choice"], there, len(numbers))
    except (KeyError, TypeError, ValueError):
        return [*problems, f"{path} has not the form of a verdict of d9m check."]
    if number is not None and (found["choice"] != number or drawn != numbers):
        problems.append(f"Its segments were chosen with {found['choice']}, not {number}.")
    if not statement["predicate"].get("properties"):
        problems.append(f"It says that the run is {found.get('verdict')}.")
    return problems
