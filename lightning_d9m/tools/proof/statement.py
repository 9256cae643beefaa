"""Statements of in-toto (version 1): files with their SHA-256, and what is said about them.

A proof is one, and so is the verdict of a check on it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec import Raw, Struct, json

from lightning_d9m.errors import LedgerError, file_errors, written_whole
from lightning_d9m.text import escape

_IN_TOTO: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
# A proof comes from anybody; one of 1,000 epochs has 35 kB.
_MOST_BYTES = 64 * 2**20
Predicate = TypeVar("Predicate")


class _Subject(Struct):
    name: str
    digest: dict[Literal["sha256"], str]


class _Statement(Struct, rename={"form": "_type", "kind": "predicateType"}):
    subject: list[_Subject]
    kind: str
    predicate: Raw
    form: Literal["https://in-toto.io/Statement/v1"]


def write_statement(path: Path, kind: str, files: Mapping[str, str], predicate: Any) -> None:
    """Write a statement; on an error, ``path`` stays as it was.

    Args:
        path: Its file.
        kind: The type of the predicate, a URI.
        files: The SHA-256 of each file that it is about, by the path from the folder of ``path``.
        predicate: What it says, JSON types or structs of them.

    Raises:
        LedgerError: If it cannot be written.
    """
    subjects = [_Subject(name, {"sha256": own}) for name, own in files.items()]
    text = json.encode(_Statement(subjects, kind, Raw(json.encode(predicate)), _IN_TOTO))
    with file_errors(LedgerError, f"{path} cannot be written"), written_whole(path) as part:
        part.write_bytes(json.format(text, indent=1) + b"\n")


def read_statement(
    path: Path, kind: str, form: type[Predicate]
) -> tuple[dict[str, str], Predicate]:
    """Read a statement of a kind, whose predicate has a form.

    Returns:
        The SHA-256 of each file that it is about, and the predicate.

    Raises:
        LedgerError: If the file cannot be read, or is none.
    """
    with file_errors(LedgerError, f"{path} cannot be read"):
        try:
            text = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b""
            found = json.decode(text, type=_Statement)
            if found.kind != kind:
                raise LedgerError(f"{path} is a statement of {escape(found.kind)}, not of {kind}.")
            files = {own.name: own.digest.get("sha256", "") for own in found.subject}
            return files, json.decode(found.predicate, type=form)
        except RecursionError as error:
            raise ValueError("its values are nested too deeply") from error
