"""Statements of in-toto (version 1): files with their SHA-256, and what is said about them.

A proof is one, and so is the verdict of a check on it. The command of the package ``model-signing``
of OpenSSF signs them: beside the file it writes a bundle of Sigstore, with an envelope (DSSE) that
names the file's SHA-256. A method is what that command takes between ``sign`` or ``verify`` and the
file, so that keys, certificates and identities that Sigstore knows can be used as there.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec import Raw, Struct, json

from lightning_d9m.errors import LedgerError, SettingError, file_errors, written_whole
from lightning_d9m.text import escape

_IN_TOTO: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
# A proof comes from anybody; one of 1,000 epochs has 35 kB.
_MOST_BYTES = 64 * 2**20
# Without the working folder, whose modules Python would import first: it may be the publisher's.
_COMMAND = """
import runpy, sys
sys.path[:] = filter(None, sys.path)
runpy.run_module("model_signing", run_name="__main__", alter_sys=True)
"""
Predicate = TypeVar("Predicate")


# Not the classes of in-toto's packages: they need protobuf, and a proof can be written, read and
# checked without a package that signs.
class _Subject(Struct):
    name: str
    digest: dict[Literal["sha256"], str]


class _Statement(Struct, rename={"form": "_type", "kind": "predicateType"}):
    subject: list[_Subject]
    kind: str
    predicate: Raw
    form: Literal["https://in-toto.io/Statement/v1"]


def write_statement(
    path: Path, kind: str, files: Mapping[str, str], predicate: Any, method: str | None
) -> str | None:
    """Write a statement, and sign it; on an error of the first, ``path`` stays as it was.

    Args:
        path: Its file.
        kind: The type of the predicate, a URI.
        files: The SHA-256 of each file that it is about, by the path from the folder of ``path``.
        predicate: What it says, JSON types or structs of them.
        method: How it is signed; None for not at all.

    Returns:
        The path of the signature, beside the file; None without one.

    Raises:
        LedgerError: If it cannot be written.
        SettingError: If ``model-signing`` is not installed, or the method cannot be used.
    """
    subjects = [_Subject(name, {"sha256": own}) for name, own in files.items()]
    text = json.encode(_Statement(subjects, kind, Raw(json.encode(predicate)), _IN_TOTO))
    with file_errors(LedgerError, f"{path} cannot be written"), written_whole(path) as part:
        part.write_bytes(json.format(text, indent=1) + b"\n")
    if problem := _call_signer("sign", path, method):
        raise SettingError(
            f"{path} is written and cannot be signed with {method}: {problem}. Install "
            "'lightning-d9m[proof]', and give the words of model_signing sign, such as sigstore, "
            "or with a private key of an elliptic curve: key --private_key FILE."
        )
    return None if method is None else f"{path}.sig"


def read_statement(
    path: Path, kind: str, form: type[Predicate], method: str | None = None
) -> tuple[dict[str, str], Predicate, list[str]]:
    """Read a statement of a kind, whose predicate has a form, and verify its signature.

    Returns:
        The SHA-256 of each file that it is about, the predicate, and why the signature is not
        valid: nothing if it is, or without a method.

    Raises:
        LedgerError: If the file cannot be read, or is none.
    """
    with file_errors(LedgerError, f"{path} cannot be read"):
        try:
            text = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b""
            found = json.decode(text, type=_Statement)
            if found.kind != kind:
                raise LedgerError(f"{path} is a statement of {escape(found.kind)}, not of {kind}.")
            predicate = json.decode(found.predicate, type=form)
        except RecursionError as error:
            raise ValueError("its values are nested too deeply") from error
    problem = _call_signer("verify", path, method)
    said = [f"{path}, as it is now, has no valid signature by {method}: {problem}."]
    files = {own.name: own.digest.get("sha256", "") for own in found.subject}
    return files, predicate, said if problem else []


def _call_signer(verb: str, path: Path, method: str | None) -> str:
    """Run the command, if there is a method; return the last line that it prints if it fails."""
    if method is None:
        return ""
    # The command, not the functions below it: what a method means stays that package's affair, and
    # anybody can verify with the same words and without this package.
    words = [sys.executable, "-c", _COMMAND, verb, *shlex.split(method)]
    words += ["--signature", f"{path}.sig", str(path)]
    # Without keys, it may open a browser or ask for a code, so that its words must be seen.
    if verb == "sign" and sys.stdin.isatty():
        return f"exit status {status}" if (status := subprocess.call(words, stdout=2)) else ""
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = done.stdout.decode(errors="replace").strip() or f"exit status {done.returncode}"
    return text.rpartition("\n")[2] if done.returncode else ""
