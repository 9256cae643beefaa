"""Bundles: one archive with what a bug report needs, without weights, data or secrets.

An archive holds ``bundle.json``, the two ledgers, the report of ``d9m locate`` as text, and files
that the user asked for. Ledgers are written again record by record, so that a resumed run becomes
one ledger, and what is removed from a record leaves the chain of hashes whole.
"""

import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from lightning_d9m.errors import LedgerError
from lightning_d9m.file_errors import explain_file_error
from lightning_d9m.history.secrets import SecretFilter
from lightning_d9m.ledger.folder import Ledger, rank_path, read_ledger
from lightning_d9m.ledger.format.frames import Batch, pack_places
from lightning_d9m.ledger.format.records import (
    SCHEMA,
    Digests,
    FramesEnd,
    ProbeLayout,
    ProbesRecord,
)
from lightning_d9m.ledger.format.writer import LedgerWriter
from lightning_d9m.version import __version__

# `d9m locate` leaves its result in its folder, with its report and the ledgers that it compared.
LOCATE_JSON = "locate.json"
SIDES = ("reference", "this-run")
_MANIFEST, _ADDED = "bundle.json", "added"
_LEDGER_FILE = re.compile(rf"(?:{'|'.join(SIDES)})/rank-\d{{1,9}}\.(?:jsonl|frames)", re.ASCII)
_CONTEXT = 5
_CALLED_AT = re.compile(r"(.+):(\d+) in ")
# The first date that a zip archive knows: the bytes do not depend on the time.
_DATE = (1980, 1, 1, 0, 0, 0)
MOST_BYTES = 4 * 2**30
_MOST_MANIFEST = 64 * 2**20


class Excerpt(msgspec.Struct, frozen=True):
    """A line that was named as a cause, with the lines around it.

    Attributes:
        file: The file's path.
        line: The line's number, from 1.
        first: The number of the first of ``text``.
        text: The lines.
    """

    file: str
    line: int
    first: int
    text: list[str]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``bundle.json``.

    Attributes:
        package: The version of lightning_d9m that wrote it.
        verdict: How the two ledgers compare.
        command: The command that trains; empty if the runs had different ones.
        ledgers: The paths of the two ledgers.
        locate: The JSON of `d9m locate`, if it was there.
        report: Its report as text.
        excerpts: The lines that it names.
        sizes: The size in bytes of each other file in the archive.
        secrets: How many secrets were removed.
    """

    package: str
    verdict: str
    command: str
    ledgers: list[str]
    locate: dict[str, Any] | None
    report: list[str]
    excerpts: list[Excerpt]
    sizes: dict[str, int]
    secrets: int


def find_located(start: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return the result of `d9m locate` that a folder, or one above it, holds, and its two ledgers.

    Raises:
        LedgerError: If it cannot be read.
    """
    for folder in (start, *list(start.absolute().parents)[:3]):
        path = folder / LOCATE_JSON
        try:
            if path.is_file():
                facts = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
                names = msgspec.convert(facts.get("ledgers", []), list[str])
                return facts, [folder / name for name in names]
        except (OSError, ValueError) as error:
            raise LedgerError(
                f"The result of d9m locate in {folder} cannot be used: {error}. Run d9m locate "
                "again, or remove it."
            ) from error
    return {}, []


def write_bundle(
    path: Path,
    ledgers: Sequence[Ledger],
    verdict: str,
    command: str,
    located: Mapping[str, Any],
    added: Sequence[Path],
) -> None:
    """Write an archive; equal inputs give equal bytes.

    Args:
        path: The archive, which must not exist.
        ledgers: The two ledgers.
        verdict: How they compare.
        command: The command that trains.
        located: The result of `d9m locate`; empty without one.
        added: Files and folders that are added as they are.

    Raises:
        LedgerError: If a file cannot be read, or the archive cannot be written.
    """
    secrets = SecretFilter()
    facts = {name: value for name, value in located.items() if name != "report"}
    with tempfile.TemporaryDirectory(prefix="d9m-bundle-") as name:
        folder = Path(name)
        for side, ledger in zip(SIDES, ledgers, strict=True):
            (folder / side).mkdir()
            for rank in ledger.files:
                _copy_records(ledger, rank, rank_path(folder / side, rank), secrets)
        files = {str(one.relative_to(folder)): one for one in folder.glob("*/*")}
        files |= _list_added(added)
        try:
            manifest = Manifest(
                package=__version__,
                verdict=verdict,
                command=secrets.clean_command(command),
                ledgers=[secrets.clean(str(ledger.path)) for ledger in ledgers],
                locate=secrets.clean_values(facts) or None,
                report=[secrets.clean_code(line) for line in located.get("report", [])],
                excerpts=list(_read_excerpts(located, secrets)),
                sizes={name: files[name].stat().st_size for name in sorted(files)},
                secrets=secrets.count,
            )
            _write_archive(path, manifest, files)
        except OSError as error:
            raise LedgerError(
                f"No bundle is written to {path}: {explain_file_error(error)}"
            ) from error


def _copy_records(ledger: Ledger, rank: int, path: Path, secrets: SecretFilter) -> None:
    """Write the records of one rank again, without secrets."""
    numbers: dict[bytes, int] = {}
    with LedgerWriter(path) as writer:
        header = ledger.headers[rank].as_record()
        writer.write({**secrets.clean_values(header), "schema": SCHEMA})
        for record in ledger.records(rank):
            if isinstance(record, Batch):
                fields = {name: getattr(record, name) for name in ("epoch", "step", "batch")}
                layout = numbers[record.layouts[0]]
                writer.write(ProbesRecord(**fields, digests=record.digests, layout=layout))
            elif isinstance(record, ProbeLayout):
                numbers[pack_places(record.places)] = record.id
                writer.write(record)
            elif isinstance(record, Digests):  # names of tensors and digests hold no secrets
                writer.write(record.as_record())
            elif not isinstance(record, FramesEnd):  # of schema 2
                writer.write(secrets.clean_values(record.as_record()))


def _list_added(added: Sequence[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in added:
        if not path.exists():
            raise LedgerError(f"There is nothing at {path} to add. Check --add.")
        found = (
            [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
        )
        for one in found:
            name = str(PurePosixPath(_ADDED, path.resolve().name, one.relative_to(path)))
            if files.setdefault(name, one) != one:
                raise LedgerError(
                    f"--add names two files {name}: {files[name]} and {one}. Rename one of them."
                )
    return files


def _read_excerpts(facts: Mapping[str, Any], secrets: SecretFilter) -> Iterator[Excerpt]:
    """Yield the lines that a result of `d9m locate` names, as far as their files are here."""
    places = [(line.get("file"), line.get("file_line")) for line in facts.get("lines", [])]
    if called := _CALLED_AT.match(str((facts.get("op") or {}).get("source"))):
        places.insert(0, (called[1], int(called[2])))
    for file, number in dict.fromkeys(places):
        path = Path(str(file))
        if path.suffix == ".py" and path.is_file() and isinstance(number, int):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            first = max(number - _CONTEXT, 1)
            shown = [secrets.clean_code(line) for line in lines[first - 1 : number + _CONTEXT]]
            yield Excerpt(str(file), number, first, shown)


def _write_archive(path: Path, manifest: Manifest, files: Mapping[str, Path]) -> None:
    with path.open("xb") as file, zipfile.ZipFile(file, "w") as archive:
        document = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        archive.writestr(_describe_member(_MANIFEST), document)
        for name in sorted(files):
            with (
                files[name].open("rb") as source,
                archive.open(_describe_member(name, files[name].stat().st_size), "w") as target,
            ):
                shutil.copyfileobj(source, target)


def _describe_member(name: str, size: int = 0) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, _DATE)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.external_attr = 0o644 << 16
    member.file_size = size  # beyond 2 GiB, another form of the header is needed
    return member


@contextmanager
def open_bundle(
    path: Path, most_bytes: int = MOST_BYTES
) -> Iterator[tuple[Manifest, list[Ledger]]]:
    """Yield what an archive holds; its ledgers are in a temporary folder until the end.

    An archive may come from anybody: only the files of ledgers are unpacked, under their own names,
    and nothing is unpacked if all are larger than ``most_bytes``.

    Raises:
        LedgerError: If the file is not a bundle, is damaged, or too large.
    """
    with tempfile.TemporaryDirectory(prefix="d9m-bundle-") as name:
        folder = Path(name)
        try:
            with zipfile.ZipFile(path) as archive:
                manifest = _read_manifest(archive)
                _unpack_ledgers(archive, folder, most_bytes)
        except LedgerError:
            raise
        except OSError as error:
            raise LedgerError(
                f"The bundle {path} cannot be opened: {error.strerror or error}. Check its name."
            ) from error
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
            raise LedgerError(
                f"{path} is not a bundle, or is damaged: {error}. Give a file that d9m bundle "
                "wrote."
            ) from error
        yield manifest, [read_ledger(folder / side) for side in SIDES]


def _read_manifest(archive: zipfile.ZipFile) -> Manifest:
    if _MANIFEST not in archive.namelist():
        raise ValueError(f"it does not hold {_MANIFEST}")
    member = archive.getinfo(_MANIFEST)
    if member.file_size > _MOST_MANIFEST:
        raise ValueError(f"its {_MANIFEST} has {member.file_size:,} bytes")
    return msgspec.json.decode(archive.read(member), type=Manifest)


def _unpack_ledgers(archive: zipfile.ZipFile, folder: Path, most_bytes: int) -> None:
    members = [one for one in archive.infolist() if _LEDGER_FILE.fullmatch(one.filename)]
    size = sum(member.file_size for member in members)
    if size > most_bytes:
        raise LedgerError(
            f"The ledgers in the bundle {archive.filename} have {size:,} bytes, and at most "
            f"{most_bytes:,} are unpacked. Ask for a bundle of a shorter training."
        )
    for side in SIDES:
        (folder / side).mkdir()
    for member in members:
        # A reader of zipfile gives no more than the size that the member names.
        with archive.open(member) as source, (folder / member.filename).open("xb") as target:
            shutil.copyfileobj(source, target)
