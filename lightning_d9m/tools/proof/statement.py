"""Statements of in-toto (version 1): files with their SHA-256, and what is said about them.

A proof is one, and so is the verdict of a check on it, a Simple Verification Result. The command of
the package ``model-signing`` of OpenSSF signs them: beside the file it writes a bundle of Sigstore,
with an envelope (DSSE) that names the file's SHA-256. A method is the words that this command takes
between ``sign`` or ``verify`` and the file, so that the keys, certificates and identities that
Sigstore knows can be used as there.
"""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec import Struct, convert, json

from lightning_d9m.engine.hashing.files import hash_file
from lightning_d9m.errors import LedgerError, SettingError, file_errors, written_whole
from lightning_d9m.text import escape
from lightning_d9m.tools.segments.check import CheckReport
from lightning_d9m.version import __version__

_VERDICT = "https://in-toto.io/attestation/svr/v0.1"
# The property of a verdict has what a third party compares, so that it cannot pass for the verdict
# of another check: how many segments are equal, of how many, and the number that has chosen them.
_EQUAL = re.compile(r"LIGHTNING_D9M_SEGMENTS_EQUAL_\d+_OF_\d+(?:_CHOSEN_BY_(\d+))?", re.ASCII)

# A proof comes from anybody; one of 1,000 epochs has 35 kB.
_MOST_BYTES = 64 * 2**20
Method: TypeAlias = Sequence[str] | None
Predicate = TypeVar("Predicate")


# Not the classes of in-toto's packages: they need protobuf, and a proof can be written, read and
# checked without a package that signs.
class _Subject(Struct):
    name: str
    digest: dict[Literal["sha256"], str]


class _Statement(Struct, rename={"form": "_type", "kind": "predicateType"}):
    subject: list[_Subject]
    kind: str
    predicate: Any  # its own form is decoded when the kind is known
    form: Literal["https://in-toto.io/Statement/v1"]


def write_statement(
    path: Path, kind: str, files: Mapping[str, str], predicate: Any, method: Method
) -> None:
    """Write a statement, and its signature beside it.

    If it cannot be written, ``path`` stays as it was.

    Args:
        path: Its file.
        kind: The type of the predicate, a URI.
        files: The SHA-256 of each file that it is about, by the path from the folder of ``path``.
        predicate: What it says, JSON types or structs of them.
        method: How it is signed; None for not at all.

    Raises:
        LedgerError: If it cannot be written.
        SettingError: If ``model-signing`` is not installed, or the method cannot be used.
    """
    subjects = [_Subject(name, {"sha256": own}) for name, own in files.items()]
    statement = _Statement(subjects, kind, predicate, "https://in-toto.io/Statement/v1")
    with file_errors(LedgerError, f"{path} cannot be written"), written_whole(path) as part:
        part.write_bytes(json.format(json.encode(statement), indent=1) + b"\n")
    if problem := _call_signer("sign", path, method):
        raise SettingError(
            f"{path} is written and cannot be signed with {' '.join(method or ())}: {problem}. "
            "Install 'lightning-d9m[proof]', and give the words of model_signing sign, such as "
            "sigstore, or with a private key of an elliptic curve: key --private_key FILE."
        )


def read_statement(
    path: Path, kind: str, form: type[Predicate], method: Method = None
) -> tuple[dict[str, str], Predicate, list[str]]:
    """Read a statement of a kind, whose predicate has a form, and verify its signature.

    Returns:
        The SHA-256 of each file that it is about, the predicate, and why the signature is not
        valid: nothing if it is, or without a method.

    Raises:
        LedgerError: If the file cannot be read, or is not a statement of this kind.
    """
    with file_errors(LedgerError, f"{path} cannot be read"):
        try:
            text = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b""
            found = json.decode(text, type=_Statement)
            if found.kind != kind:
                raise LedgerError(f"{path} is a statement of {escape(found.kind)}, not of {kind}.")
            predicate = convert(found.predicate, form)
        except RecursionError as error:
            raise ValueError("its values are nested too deeply") from error
    problem = _call_signer("verify", path, method)
    said = f"{path}, as it is now, has no valid signature by {' '.join(method or ())}: {problem}."
    files = {own.name: own.digest.get("sha256", "") for own in found.subject}
    return files, predicate, [said] if problem else []


def _call_signer(verb: str, path: Path, method: Method) -> str:
    """Run the command, if there is a method; return the last line that it prints if it fails."""
    if method is None:
        return ""
    # The command, not the functions below it: what a method means stays that package's affair, and
    # anybody can verify with the same words and without this package.
    # Isolated (-I), because Python would import the modules of the working folder first, and it may
    # be the publisher's.
    words = [sys.executable, "-I", "-m", "model_signing", verb, *method]
    words += ["--signature", f"{path}.sig", str(path)]
    # Without keys, it may open a browser or ask for a code, so that its words must be seen.
    if verb == "sign" and sys.stdin.isatty():
        return f"exit status {status}" if (status := subprocess.call(words, stdout=2)) else ""
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = done.stdout.decode(errors="replace").strip() or f"exit status {done.returncode}"
    return text.rpartition("\n")[2] if done.returncode else ""


class _Verdict(Struct):
    properties: list[str]


def write_verdict(path: Path, proof: Path, report: CheckReport, method: Method) -> None:
    """Write the verdict of a check on a proof; the rest is as for ``write_statement``."""
    found = f"LIGHTNING_D9M_SEGMENTS_EQUAL_{len(report.equal)}_OF_{len(report.there)}"
    found += "" if report.choice is None else f"_CHOSEN_BY_{report.choice}"
    predicate = {
        "verifier": {"id": f"urn:lightning-d9m:{__version__}"},
        "timeCreated": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "properties": [found] * (report.verdict == "equal"),
        "urn:lightning-d9m:check:1": report.as_json(),
    }
    write_statement(path, _VERDICT, {proof.name: hash_file(proof)}, predicate, method)


def check_verdict(path: Path, proof: Path, signer: Method, number: int | None) -> list[str]:
    """Return sentences on why a verdict is not one that a proof holds.

    Args:
        path: The verdict.
        proof: The proof.
        signer: The method that must verify the signature; None for none.
        number: The number with which its segments must have been chosen; None for any.

    Raises:
        LedgerError: If a file cannot be read, or is not a verdict.
    """
    files, verdict, problems = read_statement(path, _VERDICT, _Verdict, signer)
    # By content, because a stranger may have renamed it.
    if [*files.values()] != [hash_file(proof)]:
        problems.append(f"It is a verdict on another file than {proof}.")
    found = _EQUAL.fullmatch(" ".join(verdict.properties))
    if found is None:
        problems.append("It does not say that the run is equal.")
    elif number is not None and found[1] != str(number):
        problems.append(f"Its segments were chosen with {found[1]}, not {number}.")
    return problems
