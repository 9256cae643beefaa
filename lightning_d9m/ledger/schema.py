"""The schema of records, checked when a record is written and when it is read.

A ledger may come from an untrusted source: types, ranges, lengths and nesting are checked before
use. Nothing is unpickled or executed.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from lightning_d9m.ledger.records import (
    DIGEST_DIGITS,
    MAX_LAYOUT_PLACES,
    MAX_NAME,
    Digests,
    End,
    FramesEnd,
    Header,
    Json,
    LoaderFacts,
    Opaque,
    ProbeKey,
    ProbeLayout,
    ProbesRecord,
    RankDrift,
    Record,
    Resume,
    RunFacts,
    Scalar,
)
from lightning_d9m.text import quote

MAX_RANKS = 65_536
MAX_WHOLE = 2**63 - 1
# Most batches in one record of probes, and most growth from batch to batch.
MAX_GROUP = 2**16 - 1
MAX_GROWTH = 255

_HEX_32 = re.compile(r"[0-9a-f]{32}")
_CHECK = re.compile(r"[0-9a-f]{16}")
_HEX = b"0123456789abcdef"


class FieldError(ValueError):
    """A field of a record is missing or has a value that the schema does not allow.

    Attributes:
        field: Its name, dotted where it is nested.
        problem: The rest of a sentence that begins with the field.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"field {quote(field)} {problem}")
        self.field = field
        self.problem = problem


class _Fields:
    """The fields of a record; parsed ones are removed, so that ``rest`` has the unknown ones."""

    def __init__(self, fields: Mapping[str, Json], path: str = "") -> None:
        self.rest = dict(fields)
        self.path = path

    def take(self, name: str) -> Json:
        try:
            return self.rest.pop(name)
        except KeyError:
            raise FieldError(self.path + name, "is missing") from None

    def text(self, name: str, *, limit: int = MAX_NAME) -> str:
        value = self.take(name)
        if not isinstance(value, str) or len(value) > limit:
            allowed = f"must be a text of at most {limit} characters"
            raise FieldError(self.path + name, f"{allowed}, and is {quote(value)}")
        return value

    def whole(self, name: str, *, low: int = 0, high: int = MAX_WHOLE) -> int:
        value = self.take(name)
        if type(value) is not int or not low <= value <= high:
            allowed = f"must be a whole number from {low} to {high}"
            raise FieldError(self.path + name, f"{allowed}, and is {quote(value)}")
        return value

    def whole_or_none(self, name: str) -> int | None:
        if self.rest.get(name, 0) is None:
            return self.rest.pop(name)  # type: ignore[no-any-return]
        return self.whole(name)

    def table(self, name: str) -> dict[str, Json]:
        value = self.take(name)
        if not isinstance(value, dict):
            raise FieldError(self.path + name, f"must be an object, and is {quote(value)}")
        if value and max(map(len, value)) > MAX_NAME:
            long = max(value, key=len)
            allowed = f"must have names of at most {MAX_NAME} characters"
            raise FieldError(self.path + name, f"{allowed}, and has {quote(long)}")
        return value

    def scalars(self, name: str) -> dict[str, Scalar]:
        table = self.table(name)
        for key, value in table.items():
            small = not isinstance(value, str) or len(value) <= MAX_NAME
            finite = not isinstance(value, float) or math.isfinite(value)
            if not isinstance(value, str | int | float | None) or not small or not finite:
                allowed = "must be a short text, a finite number, a boolean or null"
                raise FieldError(f"{self.path}{name}.{key}", f"{allowed}, and is {quote(value)}")
        return table

    def end(self, kind: str) -> None:
        """Refuse fields that were not parsed."""
        if self.rest:
            raise FieldError(self.path + next(iter(self.rest)), f"is not a field of {kind}")

    def digest(self, name: str) -> str:
        return _digest(self.path + name, self.take(name))

    def digests(self, name: str) -> dict[str, str]:
        table = self.table(name)
        if not _are_digests(table.values()):
            for key, value in table.items():
                _digest(f"{self.path}{name}.{key}", value)
        return table


def _are_digests(values: Collection[Json]) -> bool:
    """Return whether all are digests, checked together: one by one dominates the reading time."""
    if not values:
        return True
    try:
        digits = "".join(values).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return set(map(len, values)) == {DIGEST_DIGITS} and not digits.translate(None, _HEX)


def _digest(path: str, value: Json) -> str:
    if not isinstance(value, str) or _HEX_32.fullmatch(value) is None:
        raise FieldError(path, f"must be 32 lowercase hex digits, and is {quote(value)}")
    return value


def _hex_float(path: str, value: Json) -> str:
    # Only the text of float.hex() is accepted, so that equal texts mean equal bits.
    try:
        canonical = isinstance(value, str) and float.fromhex(value).hex() == value
    except (ValueError, OverflowError):
        canonical = False
    if not canonical:
        raise FieldError(path, f"must be a text that float.hex() gives, and is {quote(value)}")
    return str(value)


def _parse_header(fields: _Fields) -> Header:
    world_size = fields.whole("world_size", low=1, high=MAX_RANKS)
    return Header(
        schema=fields.whole("schema", low=1),
        package=fields.text("package"),
        rank=fields.whole("rank", high=world_size - 1),
        world_size=world_size,
        fit=fields.whole("fit"),
        seed=fields.whole("seed"),
        created=fields.text("created"),
        program=fields.scalars("program") if "program" in fields.rest else {},
        settings=fields.scalars("settings"),
        stack=fields.scalars("stack"),
        extra=fields.rest,
    )


def _parse_run(fields: _Fields) -> RunFacts:
    train = fields.take("train")
    if not isinstance(train, list):
        raise FieldError("train", f"must be a list, and is {quote(train)}")
    loaders = []
    for number, entry in enumerate(train):
        if not isinstance(entry, dict):
            raise FieldError(f"train.{number}", f"must be an object, and is {quote(entry)}")
        loader = _Fields(entry, f"train.{number}.")
        loaders.append(
            LoaderFacts(
                loader.whole_or_none("samples"),
                loader.whole_or_none("batch_size"),
                loader.whole_or_none("batches"),
                loader.rest,
            )
        )
    return RunFacts(
        model=fields.text("model"),
        parameters=fields.whole("parameters"),
        train=tuple(loaders),
        trainer=fields.scalars("trainer") if "trainer" in fields.rest else {},
        extra=fields.rest,
    )


def _parse_digests(fields: _Fields) -> Digests:
    groups = fields.table("groups")
    nested = _Fields(groups, "groups.")
    scalars = fields.table("scalars") if "scalars" in fields.rest else {}
    loss = fields.rest.pop("loss", None)
    return Digests(
        moment=fields.text("moment"),
        epoch=fields.whole("epoch"),
        step=fields.whole("step"),
        totals=fields.digests("totals"),
        groups={group: nested.digests(group) for group in groups},
        loss=None if loss is None else _hex_float("loss", loss),
        scalars={key: _hex_float(f"scalars.{key}", value) for key, value in scalars.items()},
        extra=fields.rest,
    )


def _parse_layout(fields: _Fields) -> ProbeLayout:
    number, listed = fields.whole("id"), fields.take("places")
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_LAYOUT_PLACES:
        found = f"has {len(listed)}" if isinstance(listed, list) else f"is {quote(listed)}"
        raise FieldError(
            "places", f"must be a list of 1 to {MAX_LAYOUT_PLACES} places, and {found}"
        )
    places = tuple(_parse_place(index, entry) for index, entry in enumerate(listed))
    if len(set(places)) < len(places):
        (twice, _), *_ = Counter(places).most_common(1)
        raise FieldError("places", f"names a place twice: {quote(twice)}")
    fields.end("a layout")  # layouts are compared by their places alone
    return ProbeLayout(number, places)


def _parse_place(index: int, entry: Json) -> ProbeKey:
    if isinstance(entry, list) and len(entry) == 3:  # noqa: PLR2004 - kind, name, call
        kind, name, call = entry
        texts = isinstance(kind, str) and isinstance(name, str)
        if texts and len(kind) + len(name) <= MAX_NAME and type(call) is int and call >= 0:
            return kind, name, call
    allowed = f"must be [kind, name, call], texts of at most {MAX_NAME} characters and a number"
    raise FieldError(f"places.{index}", f"{allowed}, and is {quote(entry)}")


def _parse_probes(fields: _Fields) -> ProbesRecord:
    """Parse the probes of schema 1, which are text, or those that are given to the writer."""
    digests = fields.take("digests")
    if not isinstance(digests, bytes):
        digests = _unpack_digests(digests)
    if not digests or len(digests) % (DIGEST_DIGITS // 2):
        allowed = "must have 16 bytes for each place"
        raise FieldError("digests", f"{allowed}, and has {len(digests)} bytes")
    grouped = fields.whole("count", low=1, high=MAX_GROUP) if "count" in fields.rest else 1
    growth = [
        fields.whole(name, high=MAX_GROWTH) if name in fields.rest else 1
        for name in ("steps", "batches")
    ]
    record = ProbesRecord(
        epoch=fields.whole("epoch"),
        step=fields.whole("step"),
        batch=fields.whole("batch"),
        layout=fields.whole("layout"),
        digests=digests,
        count=grouped,
        steps=growth[0],
        batches=growth[1],
    )
    fields.end("probes")
    return record


def _unpack_digests(text: Json) -> bytes:
    limit = DIGEST_DIGITS * MAX_LAYOUT_PLACES
    if not isinstance(text, str) or not text.isascii() or not 0 < len(text) <= limit:
        found = f"has {len(text)} characters" if isinstance(text, str) else f"is {quote(text)}"
    elif len(text) % DIGEST_DIGITS or text.encode().translate(None, _HEX):
        found = f"has {len(text)} characters"
    else:
        return bytes.fromhex(text)
    allowed = f"must be {DIGEST_DIGITS} lowercase hex digits for each place"
    raise FieldError("digests", f"{allowed}, and {found}")


def _parse_frames(fields: _Fields) -> FramesEnd:
    record = FramesEnd(fields.whole("bytes"), _check(fields, "last"))
    fields.end("frames")
    return record


def _check(fields: _Fields, name: str) -> str:
    check = fields.text(name)
    if _CHECK.fullmatch(check) is None:
        allowed = "must be 16 lowercase hex digits"
        raise FieldError(name, f"{allowed}, and is {quote(check)}")
    return check


def _parse_resume(fields: _Fields) -> Resume:
    check = fields.text("parent_check")
    if check and _CHECK.fullmatch(check) is None:
        allowed = "must be 16 lowercase hex digits, or empty where there is no ledger"
        raise FieldError("parent_check", f"{allowed}, and is {quote(check)}")
    return Resume(
        parent=fields.text("parent"),
        parent_check=check,
        epoch=fields.whole("epoch"),
        step=fields.whole("step"),
        batch=fields.whole("batch"),
        extra=fields.rest,
    )


def _parse_end(fields: _Fields) -> End:
    status = fields.text("status")
    if status not in ("finished", "failed"):
        raise FieldError("status", f"must be 'finished' or 'failed', and is {quote(status)}")
    error = fields.text("error") if fields.rest.get("error") is not None else None
    fields.rest.pop("error", None)
    drift = _parse_rank_drift(fields.table("drift")) if "drift" in fields.rest else None
    return End(status=status, error=error, drift=drift, extra=fields.rest)


def _parse_rank_drift(table: dict[str, Json]) -> RankDrift:
    fields = _Fields(table, "drift.")
    return RankDrift(
        moment=fields.text("moment"),
        epoch=fields.whole("epoch"),
        step=fields.whole("step"),
        rank=fields.whole("rank", high=MAX_RANKS),
        group=fields.text("group"),
        name=fields.text("name"),
    )


_PARSERS: dict[str, Callable[[_Fields], Record]] = {
    "header": _parse_header,
    "run": _parse_run,
    "digests": _parse_digests,
    "layout": _parse_layout,
    "probes": _parse_probes,
    "frames": _parse_frames,
    "resume": _parse_resume,
    "end": _parse_end,
}
KNOWN_KINDS = tuple(_PARSERS)


def parse_record(fields: Json) -> Record:
    """Check a decoded record and return it as its type.

    Raises:
        FieldError: When a field is missing, has another type, or is out of bounds.
    """
    if not isinstance(fields, dict):
        raise FieldError("kind", f"is missing: the record is {quote(fields)}, not an object")
    kind = fields.get("kind")
    if not isinstance(kind, str) or len(kind) > MAX_NAME:
        found = f"must be a short text, and is {quote(kind)}" if "kind" in fields else "is missing"
        raise FieldError("kind", found)
    if "check" in fields:
        raise FieldError("check", "occurs twice")
    own = _Fields(fields)
    del own.rest["kind"]
    parser = _PARSERS.get(kind)
    return Opaque(kind, own.rest) if parser is None else parser(own)
