"""Records as JSON text, checked against their descriptions in both directions."""

import json
import re
from collections.abc import Mapping
from itertools import chain

from lightning_d9m.ledger.format.entry import Entry
from lightning_d9m.ledger.format.fields import FieldError, Json
from lightning_d9m.ledger.format.records import Record, parse_record

MAX_DEPTH = 16
# Bounds the memory that parsing one record takes: a JSON value of 3 bytes becomes about 100 bytes.
MAX_ITEMS = 1_000_000
_CONTAINERS = frozenset({dict, list})


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_TO_PARENTHESES = bytes.maketrans(b"[{]}", b"(())")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
# Bytes of memory that an empty container and a number take, beside their text.
_CONTAINER_BYTES, _NUMBER_BYTES = 64, 32


def estimate_memory(body: bytes) -> int:
    """Return about how many bytes a record takes when it is parsed."""
    containers = body.count(b"[") + body.count(b"{")
    return len(body) + _CONTAINER_BYTES * containers + _NUMBER_BYTES * body.count(b",")


def _check_depth(body: bytes, fields: object) -> None:
    """Raise if a record nests too deeply; most have too few brackets for that.

    Works on the text: a call for each container takes seconds for a record of millions of them.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", body).translate(_TO_PARENTHESES, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH + 1):
        brackets = brackets.replace(b"()", b"")  # the innermost level
    if not brackets:
        return
    for name, value in fields.items() if isinstance(fields, Mapping) else ():
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


# Made once: `json.dumps` makes one in each call.
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode_quickly = json.JSONDecoder(parse_constant=_reject_constant).decode
_decode_unique = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_reject_constant).decode


def _decode(body: bytes) -> Json:
    """Decode JSON in which no object has a name twice.

    Checking each object takes most of the time. It is not needed if the number of names equals the
    number of colons: every pair has a colon, and a name that occurs twice is counted once.
    """
    text = body.decode("utf-8")
    fields = _decode_quickly(text)
    whole = type(fields) in _CONTAINERS and _count_names(fields) == body.count(b":")
    return fields if whole else _decode_unique(text)


def _count_names(value: Json) -> int:
    """Count the names of all objects, one level of nesting at a time."""
    names = 0
    level = [value]
    while level:
        objects = [entry for entry in level if type(entry) is dict]
        lists = [entry for entry in level if type(entry) is list]
        names += sum(map(len, objects))
        inner = chain(chain.from_iterable(map(dict.values, objects)), chain.from_iterable(lists))
        level = [entry for entry in inner if entry and type(entry) in _CONTAINERS]
    return names


def kind_prefix(entry: type[Entry]) -> bytes:
    """Return the bytes with which the JSON text of each record of a kind begins."""
    return b'{"kind":"%b"' % entry.kind.encode()


def decode_record(body: bytes) -> Record:
    """Parse the JSON text of one record, without its chain hash.

    Raises:
        FieldError: When it is not JSON, or not a record of the schema.
    """
    if len(body) > MAX_ITEMS and body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_ITEMS:
        raise FieldError("record", f"holds more than {MAX_ITEMS} values")
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
    _check_depth(body, fields)
    record = parse_record(fields)
    # Readers tell kinds apart by the first bytes.
    if not body.startswith(b'{"kind":' + _to_json(fields["kind"]).encode("ascii")):
        raise FieldError("kind", "must come first, without spaces")
    return record


def encode_record(record: Mapping[str, Json]) -> bytes:
    """Return the JSON text of one record: ASCII, compact, fields in the order given.

    Raises:
        FieldError: When the record is not one that ``decode_record`` would accept.
    """
    parse_record(dict(record))
    if next(iter(record)) != "kind":
        raise FieldError("kind", "must come first")
    try:
        text = _to_json(record)
    except RecursionError as error:
        raise FieldError("record", f"nests deeper than {MAX_DEPTH} levels") from error
    except (TypeError, ValueError) as error:
        raise FieldError("record", f"cannot be written as JSON: {error}") from error
    body = text.encode("ascii")
    _check_depth(body, record)
    return body
