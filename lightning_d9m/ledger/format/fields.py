"""The types of fields: what each may have, how it is checked when read, and how it is written.

A ledger may come from an untrusted source: types, ranges, lengths and nesting are checked before
use. Nothing is unpickled or executed.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from lightning_d9m.text import quote

Scalar: TypeAlias = str | int | float | bool | None
Json: TypeAlias = Any
# Kind, name, call: the place of a value within a batch.
ProbeKey: TypeAlias = tuple[str, str, int]

MAX_NAME = 4096
MAX_WHOLE = 2**63 - 1
# The most places of one layout, so that a frame has at most 256 KiB.
MAX_LAYOUT_PLACES = 16_384
DIGEST_DIGITS = 32
DIGEST_BYTES = DIGEST_DIGITS // 2
# Numbers of a sketch of a weight, and the hex digits of these float64.
SKETCH_BUCKETS = 8
SKETCH_DIGITS = 16 * SKETCH_BUCKETS

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


def _same(value: Any) -> Json:
    return value


@dataclass(frozen=True, slots=True)
class FieldType:
    """The values that a field may have.

    Attributes:
        allowed: The values, as messages and docs/ledger-fields.md name them.
        read: Function of (dotted name, JSON value) that returns the value of the attribute, or
            raises ``FieldError``.
        write: Function of the value of the attribute that returns the JSON value.
    """

    allowed: str
    read: Callable[[str, Json], Any]
    write: Callable[[Any], Json] = _same


def _refuse(name: str, allowed: str, value: Json) -> FieldError:
    return FieldError(name, f"must be {allowed}, and is {quote(value)}")


def whole(low: int = 0, high: int = MAX_WHOLE) -> FieldType:
    """Return the type of whole numbers within bounds, both included; True is none."""
    allowed = f"a whole number from {low} to {high}"

    def read(name: str, value: Json) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _refuse(name, allowed, value)
        return value

    return FieldType(allowed, read)


def text(*, cut: bool = False) -> FieldType:
    """Return the type of short texts; with ``cut``, a longer one is cut when it is written."""
    allowed = f"a text of at most {MAX_NAME} characters"

    def read(name: str, value: Json) -> str:
        if not isinstance(value, str) or len(value) > MAX_NAME:
            raise _refuse(name, allowed, value)
        return value

    return FieldType(allowed, read, (lambda value: value[:MAX_NAME]) if cut else _same)


def matching(pattern: str, allowed: str) -> FieldType:
    """Return the type of texts that a pattern fits."""
    fits = re.compile(pattern).fullmatch

    def read(name: str, value: Json) -> str:
        if not isinstance(value, str) or fits(value) is None:
            raise _refuse(name, allowed, value)
        return value

    return FieldType(allowed, read)


def optional(kind: FieldType) -> FieldType:
    """Return the type of values that another type has, or null."""
    return FieldType(
        f"{kind.allowed}, or null",
        lambda name, value: None if value is None else kind.read(name, value),
        lambda value: None if value is None else kind.write(value),
    )


def list_of(kind: FieldType, allowed: str) -> FieldType:
    """Return the type of lists, read as tuples, whose entries have another type."""

    def read(name: str, value: Json) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _refuse(name, "a list", value)
        return tuple(kind.read(f"{name}.{number}", entry) for number, entry in enumerate(value))

    return FieldType(f"a list of {allowed}", read, lambda values: [*map(kind.write, values)])


def table_of(
    kind: FieldType,
    allowed: str,
    are_valid: Callable[[Collection[Json]], bool] = lambda _: False,
) -> FieldType:
    """Return the type of objects whose entries have another type, by short names.

    ``are_valid`` returns whether all entries certainly have the type, and are read as they are.
    Checking them one by one dominates the time of reading and writing.
    """

    def read(name: str, value: Json) -> dict[str, Any]:
        table = read_table(name, value)
        if are_valid(table.values()):
            return table
        return {key: kind.read(f"{name}.{key}", entry) for key, entry in table.items()}

    def write(table: Mapping[str, Any]) -> dict[str, Json]:
        if kind.write is _same:
            return dict(table)
        return {key: kind.write(value) for key, value in table.items()}

    return FieldType(f"an object of {allowed}", read, write)


def read_table(name: str, value: Json) -> dict[str, Json]:
    """Return an object with short names.

    Raises:
        FieldError: When it is something else.
    """
    if not isinstance(value, dict):
        raise _refuse(name, "an object", value)
    if value and max(map(len, value)) > MAX_NAME:
        allowed = f"must have names of at most {MAX_NAME} characters"
        raise FieldError(name, f"{allowed}, and has {quote(max(value, key=len))}")
    return value


def _read_scalar(name: str, value: Json) -> Scalar:
    short = not isinstance(value, str) or len(value) <= MAX_NAME
    finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, str | int | float | None) or not short or not finite:
        raise _refuse(name, SCALAR.allowed, value)
    return value


def _read_hex_float(name: str, value: Json) -> str:
    # Only the text of float.hex() is accepted, so that equal texts mean equal bits.
    try:
        canonical = isinstance(value, str) and float.fromhex(value).hex() == value
    except (ValueError, OverflowError):
        canonical = False
    if not canonical:
        raise _refuse(name, HEX_FLOAT.allowed, value)
    return str(value)


def _are_hex(digits: int, values: Collection[Json]) -> bool:
    try:
        joined = "".join(values).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return {digits}.issuperset(map(len, values)) and not joined.translate(None, _HEX)


def _are_hex_floats(values: Collection[Json]) -> bool:
    try:
        return list(map(float.hex, map(float.fromhex, values))) == list(values)
    except (TypeError, ValueError, OverflowError):
        return False


def _read_places(name: str, value: Json) -> tuple[ProbeKey, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_LAYOUT_PLACES:
        found = f"has {len(value)}" if isinstance(value, list) else f"is {quote(value)}"
        raise FieldError(name, f"must be {PLACES.allowed}, and {found}")
    places = tuple(_read_place(f"{name}.{number}", entry) for number, entry in enumerate(value))
    if len(set(places)) < len(places):
        (twice, _), *_ = Counter(places).most_common(1)
        raise FieldError(name, f"names a place twice: {quote(twice)}")
    return places


def _read_place(name: str, value: Json) -> ProbeKey:
    if isinstance(value, list) and len(value) == 3:  # noqa: PLR2004 - kind, name, call
        kind, place, call = value
        texts = isinstance(kind, str) and isinstance(place, str)
        if texts and len(kind) + len(place) <= MAX_NAME and type(call) is int and call >= 0:
            return kind, place, call
    raise _refuse(name, PLACE.allowed, value)


def _read_packed_digests(name: str, value: Json) -> bytes:
    """Read the digests of a record of schema 1, which are text, or those for the writer."""
    digests = value if isinstance(value, bytes) else _unpack_digests(name, value)
    if not digests or len(digests) % DIGEST_BYTES:
        allowed = f"must have {DIGEST_BYTES} bytes for each place"
        raise FieldError(name, f"{allowed}, and has {len(digests)} bytes")
    return digests


def _unpack_digests(name: str, value: Json) -> bytes:
    limit = DIGEST_DIGITS * MAX_LAYOUT_PLACES
    found = f"has {len(value)} characters" if isinstance(value, str) else f"is {quote(value)}"
    short = isinstance(value, str) and value.isascii() and 0 < len(value) <= limit
    if not short or len(value) % DIGEST_DIGITS or value.encode().translate(None, _HEX):
        raise FieldError(name, f"must be {PACKED_DIGESTS.allowed}, and {found}")
    return bytes.fromhex(value)


WHOLE = whole()
TEXT = text()
HEX64 = matching(r"[0-9a-f]{16}", "16 lowercase hex digits")
CHECK_OR_EMPTY = matching(
    r"(?:[0-9a-f]{16})?", "16 lowercase hex digits, or empty where there is no ledger"
)
DIGEST = matching(r"[0-9a-f]{32}", f"{DIGEST_DIGITS} lowercase hex digits")
SKETCH = matching(rf"[0-9a-f]{{{SKETCH_DIGITS}}}", f"{SKETCH_DIGITS} lowercase hex digits")
SCALAR = FieldType("a short text, a finite number, a boolean or null", _read_scalar)
HEX_FLOAT = FieldType("a text that float.hex() gives", _read_hex_float)
SCALARS = table_of(SCALAR, "short texts, finite numbers, booleans and nulls")
HEX_FLOATS = table_of(HEX_FLOAT, "texts that float.hex() gives", _are_hex_floats)
DIGESTS = table_of(
    DIGEST, f"digests of {DIGEST_DIGITS} hex digits", partial(_are_hex, DIGEST_DIGITS)
)
SKETCHES = table_of(
    SKETCH, f"sketches of {SKETCH_DIGITS} hex digits", partial(_are_hex, SKETCH_DIGITS)
)
PLACE = FieldType(
    f"[kind, name, call], texts of at most {MAX_NAME} characters and a number", _read_place, list
)
PLACES = FieldType(
    f"a list of 1 to {MAX_LAYOUT_PLACES} places",
    _read_places,
    lambda places: [*map(list, places)],
)
PACKED_DIGESTS = FieldType(
    f"{DIGEST_DIGITS} lowercase hex digits for each place", _read_packed_digests
)
