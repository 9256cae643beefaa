"""Bundles: one archive with what a bug report needs, without weights, data or secrets.

An archive holds the two ledgers and the result of ``d9m locate``, as its folder does, so that any
command reads them when it is unpacked; ``zip`` adds other files to it. Ledgers are written again
record by record, so that a resumed run becomes one ledger, and what is removed from a record leaves
the chain of hashes whole. A segment has the records that it has computed itself. Secrets are
removed from texts: tokens in URLs, options and variables.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import msgspec

from lightning_d9m.engine.ledger.command import SEGMENT
from lightning_d9m.engine.ledger.folder import Ledger, rank_path
from lightning_d9m.engine.ledger.format.reader import RankReader
from lightning_d9m.engine.ledger.format.records import Batch, ProbeKey, ProbeLayout, ProbesRecord
from lightning_d9m.engine.ledger.format.writer import LedgerWriter
from lightning_d9m.errors import LedgerError, file_errors, written_whole
from lightning_d9m.text import printable

# `d9m locate` leaves its result in its folder, with its report and the ledgers that it compared.
LOCATE_JSON = "locate.json"
SIDES = ("reference", "this-run")
# Lines of source before and after the one that is named.
_CONTEXT = 5
_CALLED_AT = re.compile(r"(.+):(\d+) in ")
REMOVED = "[removed]"
# The values of a result that may come from anybody: what is nested more deeply than that of
# d9m locate would end the recursion that removes secrets.
_Json: Any = str | int | float | bool | None
for _ in range(8):
    _Json = str | int | float | bool | None | list[_Json] | dict[str, _Json]
# A name is secret by its last word, so that ``HF_TOKEN`` is and ``max_tokens`` is not.
_NAME = (
    r"(?:(?:[\w-]*[_-])?(?:token|secret|passw(?:or)?d|passphrase|credentials?|auth|signature|sig"
    r"|key|apikey|(?-i:pwd))|[\w-]+[_-]pwd)"  # not PWD, the working folder
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
        r"((?<![\w-])(?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:\w+ +)?)([^\s'\"]+)",
        r"(\bbearer +)([^\s'\"]+)",
        rf"(\b(?:\w+-)+{_NAME}: *)([^\s'\"]+)",  # a header
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
        return self._replace(text, _QUOTED, _ASSIGNED)

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

    def _replace(self, text: str, *further: re.Pattern[str]) -> str:
        def replace(found: re.Match[str]) -> str:
            # A later pattern finds what an earlier one has replaced, which counts once.
            if REMOVED in found[0]:
                return found[0]
            self.count += 1
            return f"{found[1]}{REMOVED}"

        for pattern in (*self._patterns, *further):
            text = pattern.sub(replace, text)
        return text


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
                facts = msgspec.json.decode(path.read_bytes(), type=dict[str, _Json])
                for name in ("report", "source", "ledgers"):
                    facts[name] = msgspec.convert(facts.get(name, []), list[str])
                return facts, [folder / name for name in facts["ledgers"]]
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
    path: Path,
    ledgers: Sequence[Ledger],
    located: tuple[Mapping[str, Any], Sequence[str]],
    secrets: SecretFilter,
) -> dict[str, int]:
    """Write an archive; return the sizes of its files in bytes.

    Args:
        path: The archive, which must not exist.
        ledgers: The two ledgers.
        located: The result of `d9m locate` and its report, as ``read_located`` returns them.
        secrets: Removes the secrets, and counts them.

    Raises:
        LedgerError: If a file cannot be read, or the archive cannot be written.
    """
    sizes = dict[str, int]()
    with tempfile.TemporaryDirectory(prefix="d9m-bundle-") as name:
        folder = Path(name)
        for side, ledger in zip(SIDES, ledgers, strict=True):
            (folder / side).mkdir()
            for rank in ledger.files:
                _copy_records(ledger, rank, rank_path(folder / side, rank), secrets)
        facts, report = located
        if facts:
            facts = secrets.clean_values({**facts, "report": [], "source": [], "ledgers": SIDES})
            facts["report"] = list(map(secrets.clean_code, report))
            text = msgspec.json.format(msgspec.json.encode(facts), indent=1)
            (folder / LOCATE_JSON).write_bytes(text)
        with (
            file_errors(LedgerError, f"No bundle is written to {path}"),
            written_whole(path) as part,
            ZipFile(part, "x", ZIP_DEFLATED, strict_timestamps=False) as archive,
        ):
            for file in sorted(filter(Path.is_file, folder.rglob("*"))):
                member = str(file.relative_to(folder))
                sizes[member] = file.stat().st_size
                archive.write(file, member)
    return sizes


def _copy_records(ledger: Ledger, rank: int, path: Path, secrets: SecretFilter) -> None:
    """Write the records of one rank again, without secrets."""
    numbers: dict[tuple[ProbeKey, ...], int] = {}
    header = ledger.headers[rank]
    # The file of a segment names the place at which it begins; what it continues is another run's.
    is_part = SEGMENT in header.program
    reader = RankReader(ledger.files[rank]) if is_part else ledger.open(rank)
    with reader, LedgerWriter(path) as writer:
        writer.write(secrets.clean_values(header.as_record()))
        for record in reader.records():
            # A batch that was read has its layout, and a line of a ledger has the number of one.
            if isinstance(record, Batch):
                names = ("epoch", "step", "batch", "problem")
                fields = secrets.clean_values({name: getattr(record, name) for name in names})
                layout = numbers[record.layouts[0]]
                writer.write(ProbesRecord(**fields, digests=record.digests, layout=layout))
            elif isinstance(record, ProbeLayout):
                numbers[record.places] = record.id
                writer.write(record)
            else:
                writer.write(secrets.clean_values(record.as_record()))


def read_located(ledgers: Sequence[Ledger]) -> tuple[dict[str, Any], list[str]]:
    """Return what `d9m locate` found, if it compared these ledgers, and its report with sources.

    Raises:
        LedgerError: If it cannot be read.
    """
    facts, compared = find_located(ledgers[1].path)
    paths = [ledger.path.resolve() for ledger in ledgers]
    if paths != [path.resolve() for path in compared]:
        facts = {}
    return facts, [*facts.get("report", []), *facts.get("source", [])]


def list_source(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that the JSON of `d9m locate` names, with those around them.

    For use where runs were located: elsewhere, another file may have such a name.
    """
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
