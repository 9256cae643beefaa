"""Records as JSON: checked in full when written and when read.

A ledger may come from elsewhere, so nothing of it is used before its types, ranges, lengths and
nesting have been checked. Nothing is unpickled, nothing is executed.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from lightning_d9m.evidence.display import shown
from lightning_d9m.evidence.records import (
    DIGEST_DIGITS,
    MAX_NAME,
    MAX_PLACES,
    Digests,
    End,
    Header,
    Json,
    Layout,
    LoaderFacts,
    Opaque,
    Place,
    Probes,
    Record,
    Resume,
    RunFacts,
    Scalar,
)

MAX_RANKS = 65_536
MAX_WHOLE = 2**63 - 1
MAX_DEPTH = 16
# Bounds the memory that parsing one record takes: a JSON value of 3 bytes becomes about 100 bytes.
MAX_ITEMS = 1_000_000

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
        super().__init__(f"field {shown(field)} {problem}")
        self.field = field
        self.problem = problem


class _Fields:
    """The fields of one record, taken out one by one; what is left is unknown to this version."""

    def __init__(self, fields: Mapping[str, Json], path: str = "") -> None:
        self.rest = dict(fields)
        self.path = path

    def take(self, name: str) -> Json:
        if name not in self.rest:
            raise FieldError(self.path + name, "is missing")
        return self.rest.pop(name)

    def text(self, name: str, *, limit: int = MAX_NAME) -> str:
        value = self.take(name)
        if not isinstance(value, str) or len(value) > limit:
            allowed = f"must be a text of at most {limit} characters"
            raise FieldError(self.path + name, f"{allowed}, and is {shown(value)}")
        return value

    def whole(self, name: str, *, low: int = 0, high: int = MAX_WHOLE) -> int:
        value = self.take(name)
        if type(value) is not int or not low <= value <= high:
            allowed = f"must be a whole number from {low} to {high}"
            raise FieldError(self.path + name, f"{allowed}, and is {shown(value)}")
        return value

    def whole_or_none(self, name: str) -> int | None:
        if self.rest.get(name, 0) is None:
            return self.rest.pop(name)  # type: ignore[no-any-return]
        return self.whole(name)

    def table(self, name: str) -> dict[str, Json]:
        value = self.take(name)
        if not isinstance(value, dict):
            raise FieldError(self.path + name, f"must be an object, and is {shown(value)}")
        if max(map(len, value), default=0) > MAX_NAME:
            long = max(value, key=len)
            allowed = f"must have names of at most {MAX_NAME} characters"
            raise FieldError(self.path + name, f"{allowed}, and has {shown(long)}")
        return value

    def scalars(self, name: str) -> dict[str, Scalar]:
        table = self.table(name)
        for key, value in table.items():
            small = not isinstance(value, str) or len(value) <= MAX_NAME
            finite = not isinstance(value, float) or math.isfinite(value)
            if not isinstance(value, str | int | float | None) or not small or not finite:
                allowed = "must be a short text, a finite number, a boolean or null"
                raise FieldError(f"{self.path}{name}.{key}", f"{allowed}, and is {shown(value)}")
        return table

    def digest(self, name: str) -> str:
        return _digest(self.path + name, self.take(name))

    def digests(self, name: str) -> dict[str, str]:
        table = self.table(name)
        if not _are_digests(table.values()):
            for key, value in table.items():
                _digest(f"{self.path}{name}.{key}", value)
        return table


def _are_digests(values: Collection[Json]) -> bool:
    """Whether all are digests: together, because one by one takes most of the reading's time."""
    try:
        digits = "".join(values).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return set(map(len, values)) <= {DIGEST_DIGITS} and not digits.translate(None, _HEX)


def _digest(path: str, value: Json) -> str:
    if not isinstance(value, str) or _HEX_32.fullmatch(value) is None:
        raise FieldError(path, f"must be 32 lowercase hex digits, and is {shown(value)}")
    return value


def _hex_float(path: str, value: Json) -> str:
    # Only the text that float.hex() gives, so that equal bits and equal texts are the same thing.
    try:
        canonical = isinstance(value, str) and float.fromhex(value).hex() == value
    except (ValueError, OverflowError):
        canonical = False
    if not canonical:
        raise FieldError(path, f"must be a text that float.hex() gives, and is {shown(value)}")
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
        settings=fields.scalars("settings"),
        stack=fields.scalars("stack"),
        extra=fields.rest,
    )


def _parse_run(fields: _Fields) -> RunFacts:
    train = fields.take("train")
    if not isinstance(train, list):
        raise FieldError("train", f"must be a list, and is {shown(train)}")
    loaders = []
    for number, entry in enumerate(train):
        if not isinstance(entry, dict):
            raise FieldError(f"train.{number}", f"must be an object, and is {shown(entry)}")
        loader = _Fields(entry, f"train.{number}.")
        loaders.append(
            LoaderFacts(
                loader.whole_or_none("samples"),
                loader.whole_or_none("batch_size"),
                loader.whole_or_none("batches"),
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


def _parse_layout(fields: _Fields) -> Layout:
    number, listed = fields.whole("id"), fields.take("places")
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_PLACES:
        found = f"has {len(listed)}" if isinstance(listed, list) else f"is {shown(listed)}"
        raise FieldError("places", f"must be a list of 1 to {MAX_PLACES} places, and {found}")
    places = tuple(_parse_place(index, entry) for index, entry in enumerate(listed))
    if len(set(places)) < len(places):
        (twice, _), *_ = Counter(places).most_common(1)
        raise FieldError("places", f"names a place twice: {shown(twice)}")
    if fields.rest:
        # Two layouts mean the same exactly when their places are equal.
        raise FieldError(next(iter(fields.rest)), "is not a field of a layout")
    return Layout(number, places)


def _parse_place(index: int, entry: Json) -> Place:
    if isinstance(entry, list) and len(entry) == 3:  # noqa: PLR2004 - kind, name, call
        kind, name, call = entry
        texts = isinstance(kind, str) and isinstance(name, str)
        if texts and len(kind) + len(name) <= MAX_NAME and type(call) is int and call >= 0:
            return kind, name, call
    allowed = f"must be [kind, name, call], texts of at most {MAX_NAME} characters and a number"
    raise FieldError(f"places.{index}", f"{allowed}, and is {shown(entry)}")


def _parse_probes(fields: _Fields) -> Probes:
    digests = fields.text("digests", limit=DIGEST_DIGITS * MAX_PLACES)
    if not digests or len(digests) % DIGEST_DIGITS or digests.encode().translate(None, _HEX):
        allowed = f"must be {DIGEST_DIGITS} lowercase hex digits for each place"
        raise FieldError("digests", f"{allowed}, and has {len(digests)} characters")
    return Probes(
        epoch=fields.whole("epoch"),
        step=fields.whole("step"),
        batch=fields.whole("batch"),
        layout=fields.whole("layout"),
        digests=digests,
        extra=fields.rest,
    )


def _parse_resume(fields: _Fields) -> Resume:
    check = fields.text("parent_check")
    if check and _CHECK.fullmatch(check) is None:
        allowed = "must be 16 lowercase hex digits, or empty where there is no ledger"
        raise FieldError("parent_check", f"{allowed}, and is {shown(check)}")
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
        raise FieldError("status", f"must be 'finished' or 'failed', and is {shown(status)}")
    error = fields.text("error") if fields.rest.get("error") is not None else None
    fields.rest.pop("error", None)
    return End(status=status, error=error, extra=fields.rest)


_PARSERS: dict[str, Callable[[_Fields], Record]] = {
    "header": _parse_header,
    "run": _parse_run,
    "digests": _parse_digests,
    "layout": _parse_layout,
    "probes": _parse_probes,
    "resume": _parse_resume,
    "end": _parse_end,
}
KNOWN_KINDS = tuple(_PARSERS)


def parse_record(fields: Json) -> Record:
    """Check one decoded record and give it its type.

    Raises:
        FieldError: When a field is missing, has another type, or is out of bounds.
    """
    if not isinstance(fields, dict):
        raise FieldError("kind", f"is missing: the record is {shown(fields)}, not an object")
    kind = fields.get("kind")
    if not isinstance(kind, str) or len(kind) > MAX_NAME:
        found = f"must be a short text, and is {shown(kind)}" if "kind" in fields else "is missing"
        raise FieldError("kind", found)
    if "check" in fields:
        raise FieldError("check", "occurs twice")
    rest = {name: value for name, value in fields.items() if name != "kind"}
    parser = _PARSERS.get(kind)
    return Opaque(kind, rest) if parser is None else parser(_Fields(rest))


def _check_depth(fields: Json) -> None:
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if not _nests_within(value, MAX_DEPTH):
            raise FieldError(name, f"nests deeper than {MAX_DEPTH} levels")


def _nests_within(value: Json, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_nests_within(entry, depth - 1) for entry in inner)


def _reject_constant(name: str) -> None:
    raise FieldError(name, "is not JSON: a ledger writes floats as texts of float.hex()")


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise FieldError(next(name for name in names if names.count(name) > 1), "occurs twice")
    return table


_decode_quickly = json.JSONDecoder(parse_constant=_reject_constant).decode
_decode_unique = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_reject_constant).decode


def _decode(body: bytes) -> Json:
    """Decode JSON in which no object has a name twice.

    The check of each object by itself takes most of the time. It is left out where the text became
    as many names as it has colons: every pair has one, and a name that comes twice is one name.
    """
    text = body.decode("utf-8")
    fields = _decode_quickly(text)
    return fields if _count_names(fields) == body.count(b":") else _decode_unique(text)


def _count_names(value: Json) -> int:
    if isinstance(value, dict):
        inner = [entry for entry in value.values() if isinstance(entry, dict | list)]
        return len(value) + sum(map(_count_names, inner))
    if isinstance(value, list):
        return sum(map(_count_names, value))
    return 0


_NUMBER = rb"(0|[1-9][0-9]{0,17})"
_PROBES_HEAD = re.compile(
    rb'{"kind":"probes","epoch":%b,"step":%b,"batch":%b,"layout":%b,"digests":"' % ((_NUMBER,) * 4)
)


def _decode_probes(body: bytes) -> Probes | None:
    """Read probes as lightning_d9m writes them, ten times faster than as any JSON."""
    head = _PROBES_HEAD.match(body)
    if head is None or not body.endswith(b'"}'):
        return None
    digests = body[head.end() : -2]
    size = len(digests)
    whole = 0 < size <= DIGEST_DIGITS * MAX_PLACES and not size % DIGEST_DIGITS
    if not whole or digests.translate(None, _HEX):
        return None
    epoch, step, batch, layout = map(int, head.groups())
    text = digests.decode("ascii")
    return Probes(epoch=epoch, step=step, batch=batch, layout=layout, digests=text)


_PROBES_FIELDS = ("kind", "epoch", "step", "batch", "layout", "digests")
_PROBES_TYPES = (str, int, int, int, int, str)
_PROBES_FORM = '{"kind":"%s","epoch":%s,"step":%s,"batch":%s,"layout":%s,"digests":"%s"}'


def _encode_probes(record: Mapping[str, Json]) -> bytes | None:
    """Write probes without a detour through JSON; None for a record that needs a closer look.

    It stands in every step of a training, where each line of Python costs microseconds.
    """
    values = tuple(record.values())
    if tuple(record) != _PROBES_FIELDS or tuple(map(type, values)) != _PROBES_TYPES:
        return None
    size = len(values[5])
    whole = 0 < size <= DIGEST_DIGITS * MAX_PLACES and not size % DIGEST_DIGITS
    if not whole or min(values[1:5]) < 0 or max(values[1:5]) > MAX_WHOLE:
        return None
    digests = values[5].encode()
    return None if digests.translate(None, _HEX) else (_PROBES_FORM % values).encode()


def decode_record(body: bytes) -> Record:
    """Parse the JSON text of one record, without its check.

    Raises:
        FieldError: When it is not JSON, or not a record of the schema.
    """
    if len(body) > MAX_ITEMS and body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_ITEMS:
        raise FieldError("record", f"holds more than {MAX_ITEMS} values")
    if (record := _decode_probes(body)) is not None:
        return record
    fields: Json
    try:
        fields = _decode(body)
    except UnicodeDecodeError as error:
        raise FieldError("record", f"is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise FieldError("record", f"is not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise FieldError("record", f"nests deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        if isinstance(error, FieldError):
            raise
        raise FieldError("record", "holds a number of thousands of digits") from error
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(fields)
    return parse_record(fields)


def encode_record(record: Mapping[str, Json]) -> bytes:
    """Return the JSON text of one record: ASCII, compact, fields in the order given.

    Raises:
        FieldError: When the record is not one that ``decode_record`` would accept.
    """
    if (body := _encode_probes(record)) is not None:
        return body
    parse_record(dict(record))
    _check_depth(record)
    try:
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FieldError("record", f"cannot be written as JSON: {error}") from error
    return text.encode("ascii")
