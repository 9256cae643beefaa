"""Bundles: one archive with what a bug report needs, without weights, data or secrets.

An archive holds ``bundle.json``, the two ledgers, the report of ``d9m locate`` as text, and files
that the user asked for. Ledgers are written again record by record, so that a resumed run becomes
one ledger, and what is removed from a record leaves the chain of hashes whole. Secrets are removed
from texts: tokens in URLs, options and variables.
"""

import lzma
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, is_zipfile

import msgspec

from lightning_d9m.engine.ledger.folder import Ledger, rank_path, read_ledger
from lightning_d9m.engine.ledger.format.records import Batch, ProbeKey, ProbeLayout, ProbesRecord
from lightning_d9m.engine.ledger.format.writer import LedgerWriter
from lightning_d9m.errors import LedgerError, file_errors, written_whole
from lightning_d9m.text import printable
from lightning_d9m.version import __version__

# `d9m locate` leaves its result in its folder, with its report and the ledgers that it compared.
LOCATE_JSON = "locate.json"
SIDES = ("reference", "this-run")
_MANIFEST = "bundle.json"
CAPSULE_FACTS = "capsule.json"
# The only names that are unpacked, so that none leads out of the folder.
_LEDGER_FILE = re.compile(rf"(?:{'|'.join(SIDES)})/rank-\d{{1,9}}\.jsonl", re.ASCII)
# Lines of source before and after the one that is named.
_CONTEXT = 5
_CALLED_AT = re.compile(r"(.+):(\d+) in ")
# A small archive can hold any number of zeros: a bundle from a stranger must not fill the disk.
MOST_BYTES = 4 * 2**30
_MOST_MANIFEST = 64 * 2**20
REMOVED = "[removed]"
# A name is secret by its last word, so that ``HF_TOKEN`` is and ``max_tokens`` is not.
_NAME = (
    r"(?:(?:[\w-]*[_-])?(?:token|secret|passw(?:or)?d|passphrase|credentials?|auth|signature|sig"
    r"|key|apikey)|[\w-]+[_-]pwd)"  # not PWD, the working folder
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# A shorter value of a variable occurs in other words.
_SHORTEST = 6
# What stands before a secret is kept; the secret itself is the last group.
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(\b[a-z][\w+.-]*://)([^\s/@'\"]+)(?=@)",  # user:password@host
        rf"([?&;]{_NAME}=)([^\s&#'\"]+)",  # of a URL's query
        rf"(--?{_NAME}(?:=| +))('[^']*'|\"[^\"]*\"|[^\s'\"]+)",  # an option
        r"(\bauthorization: *(?:bearer|basic) +)([^\s'\"]+)",
        # Tokens that common services give out, by the letters that they begin with.
        r"()\b((?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-|AKIA)[\w-]{12,})",
    )
)
_ASSIGNED = re.compile(rf"((?<![\w-]){_NAME}=)('[^']*'|\"[^\"]*\"|[^\s'\"&]+)", re.IGNORECASE)
_QUOTED = re.compile(rf"({_NAME}['\"]?\]? *[:=] *)[rbf]?('[^']+'|\"[^\"]+\")", re.IGNORECASE)


class SecretFilter:
    """Replaces secrets in text, and counts those that it has replaced.

    The values of environment variables with secret names are secrets wherever they occur.
    """

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        self.count = 0
        values = {
            value
            for name, value in variables.items()
            if _SECRET_NAME.fullmatch(name) and len(value) >= _SHORTEST
        }
        longest_first = sorted(values, key=lambda value: (-len(value), value))
        known = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._patterns = (re.compile(f"()(?:{known})"), *_PATTERNS)

    def clean(self, text: str) -> str:
        """Return a value or command without secrets; ``token=abc`` is one, as for Hydra."""
        return self._replace(text, _ASSIGNED)

    def clean_code(self, text: str) -> str:
        """Return a line of source without secrets: a text that is given to a secret name is one."""
        return self._replace(text, _QUOTED)

    def clean_values(self, value: Any) -> Any:
        """Return JSON types without secrets in their texts; keys are kept."""
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, Mapping):
            return {key: self.clean_values(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean_values(inner) for inner in value]
        return value

    def _replace(self, text: str, further: re.Pattern[str]) -> str:
        def replace(found: re.Match[str]) -> str:
            # A later pattern finds what an earlier one has replaced, which counts once.
            if REMOVED in found[0]:
                return found[0]
            self.count += 1
            return f"{found[1]}{REMOVED}"

        for pattern in (*self._patterns, further):
            text = pattern.sub(replace, text)
        return text


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``bundle.json``.

    Attributes:
        package: The version of lightning_d9m that wrote it.
        locate: The JSON of `d9m locate`, if it was there.
        report: Its report as text, and the lines of source that it names.
        sizes: The size in bytes of each other file in the archive.
        secrets: How many secrets were removed.
    """

    package: str
    locate: dict[str, Any] | None
    report: list[str]
    sizes: dict[str, int]
    secrets: int


def find_located(start: Path, parents: int = 3) -> tuple[dict[str, Any], list[Path]]:
    """Return the result of `d9m locate` that a folder, or one above it, holds, and its two ledgers.

    ``parents`` is how many folders above it are searched.

    Raises:
        LedgerError: If it cannot be read.
    """
    for folder in (start, *list(start.absolute().parents)[:parents]):
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


def list_located(ledgers: Sequence[Ledger]) -> list[str]:
    """Return the lines of the report of `d9m locate`, if it compared these two ledgers."""
    facts, _ = read_located(ledgers)
    return ["", "d9m locate:", *map(printable, facts.get("report", []))] if facts else []


def write_bundle(
    path: Path, ledgers: Sequence[Ledger], located: Mapping[str, Any], added: Sequence[Path]
) -> None:
    """Write an archive.

    Args:
        path: The archive, which must not exist.
        ledgers: The two ledgers.
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
        files = {str(file.relative_to(folder)): file for file in folder.glob("*/*")}
        files |= _list_added(added)
        with file_errors(LedgerError, f"No bundle is written to {path}"):
            manifest = Manifest(
                package=__version__,
                locate=secrets.clean_values(facts) or None,
                report=list(map(secrets.clean_code, _list_report(located))),
                sizes={member: files[member].stat().st_size for member in sorted(files)},
                secrets=secrets.count,
            )
            document = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
            with (
                written_whole(path) as part,
                ZipFile(part, "x", ZIP_DEFLATED, strict_timestamps=False) as archive,
            ):
                archive.writestr(_MANIFEST, document)
                for member in sorted(files):
                    archive.write(files[member], member)


def _copy_records(ledger: Ledger, rank: int, path: Path, secrets: SecretFilter) -> None:
    """Write the records of one rank again, without secrets."""
    numbers: dict[tuple[ProbeKey, ...], int] = {}
    with LedgerWriter(path) as writer:
        writer.write(secrets.clean_values(ledger.headers[rank].as_record()))
        for record in ledger.records(rank):
            # A batch that was read has its layout, and a line of a ledger has the number of one.
            if isinstance(record, Batch):
                fields = {name: getattr(record, name) for name in ("epoch", "step", "batch")}
                layout = numbers[record.layouts[0]]
                writer.write(ProbesRecord(**fields, digests=record.digests, layout=layout))
            elif isinstance(record, ProbeLayout):
                numbers[record.places] = record.id
                writer.write(record)
            else:
                writer.write(secrets.clean_values(record.as_record()))


def _list_added(added: Sequence[Path]) -> dict[str, Path]:
    """Return files by their names in the archive: their paths from the working folder."""
    files: dict[str, Path] = {}
    for path in added:
        if not path.exists():
            raise LedgerError(f"There is nothing at {path} to add. Check --add.")
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file():
                # An archive has no folder above its top.
                files[f"added/{os.path.relpath(file).replace('../', 'parent/')}"] = file
    return files


def read_located(ledgers: Sequence[Ledger]) -> tuple[dict[str, Any], list[str]]:
    """Return what `d9m locate` found, if it compared these ledgers, and its report with sources.

    Raises:
        LedgerError: If it cannot be read.
    """
    facts, compared = find_located(ledgers[1].path)
    paths = [ledger.path.resolve() for ledger in ledgers]
    if paths != [path.resolve() for path in compared]:
        facts = {}
    return facts, list(_list_report(facts))


def _list_report(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report of `d9m locate`, and the lines that it names, as far as they are here."""
    yield from facts.get("report", [])
    places = [(line.get("file"), line.get("line")) for line in facts.get("lines", [])]
    if called := _CALLED_AT.match(str((facts.get("op") or {}).get("source"))):
        places.insert(0, (called[1], int(called[2])))
    for file, number in dict.fromkeys(places):
        path = Path(str(file))
        if path.suffix == ".py" and path.is_file() and isinstance(number, int):
            yield from ("", f"{file}, line {number}:")
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            first = max(number - _CONTEXT, 1)
            for at, line in enumerate(lines[first - 1 : number + _CONTEXT], start=first):
                yield f"{'>' if at == number else ' '} {at:5} {line}".rstrip()


# Raised by methods of compression, or if it is encrypted or nested too deeply (RuntimeError).
_DAMAGE = (BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError)


def is_capsule(path: Path) -> bool:
    """Return whether a file is an archive with one step of a run; see ``capsule.py``."""
    with suppress(*_DAMAGE, OSError):
        if path.is_file() and is_zipfile(path):
            with ZipFile(path) as archive:
                return CAPSULE_FACTS in archive.namelist()
    return False


@contextmanager
def open_bundle(path: Path) -> Iterator[tuple[Manifest, list[Ledger]]]:
    """Yield what an archive holds; its ledgers are in a temporary folder until the end.

    An archive may come from anybody: only the files of ledgers are unpacked, under their own names,
    and nothing is unpacked if all are larger than ``MOST_BYTES``.

    Raises:
        LedgerError: If the file is not a bundle, is damaged, or too large.
    """
    with tempfile.TemporaryDirectory(prefix="d9m-bundle-") as name:
        folder = Path(name)
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a device may have no end
                raise ValueError("it is not a regular file")
            with ZipFile(path) as archive:
                manifest = _read_manifest(archive)
                _unpack_ledgers(archive, folder)
        except LedgerError:
            raise
        except OSError as error:
            raise LedgerError(
                f"The bundle {path} cannot be opened: {error.strerror or error}. Check its name."
            ) from error
        except _DAMAGE as error:
            raise LedgerError(
                f"{path} is not a bundle, or is damaged: {error}. Give a file that d9m bundle "
                "wrote."
            ) from error
        yield manifest, [read_ledger(folder / side) for side in SIDES]


def _read_manifest(archive: ZipFile) -> Manifest:
    if _MANIFEST not in archive.namelist():
        raise ValueError(f"it does not hold {_MANIFEST}")
    # Its size is read before it is unpacked.
    member = archive.getinfo(_MANIFEST)
    if member.file_size > _MOST_MANIFEST:
        raise ValueError(f"its {_MANIFEST} has {member.file_size:,} bytes")
    return msgspec.json.decode(archive.read(member), type=Manifest)


def _unpack_ledgers(archive: ZipFile, folder: Path) -> None:
    members = [info for info in archive.infolist() if _LEDGER_FILE.fullmatch(info.filename)]
    size = sum(member.file_size for member in members)
    if size > MOST_BYTES:
        raise LedgerError(
            f"The ledgers in the bundle {archive.filename} have {size:,} bytes, and at most "
            f"{MOST_BYTES:,} are unpacked. Ask for a bundle of a shorter training."
        )
    # A reader of zipfile gives no more than the size that a member names, and makes no links.
    archive.extractall(folder, members)
    for side in SIDES:
        # A bundle without ledgers of a side gets the error of an empty ledger.
        (folder / side).mkdir(exist_ok=True)
