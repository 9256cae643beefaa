"""Entries of a ledger: objects that are read, checked and written by the types of their fields."""

import enum
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from dataclasses import Field as DataclassField
from typing import Any, ClassVar, TypeVar, get_args

from lightning_d9m.ledger.format.fields import FieldError, FieldType, Json, read_table

_Entry = TypeVar("_Entry", bound="Entry")
# The described fields of each class that was used.
_DESCRIBED: "dict[type[Entry], tuple[Field, ...]]" = {}


class Mark(enum.Enum):
    """A property of a field, beside its type."""

    REQUIRED = "is in every file, although the attribute has a default"
    OMITTED = "is not written while it has its default"
    INFORMATIONAL = "is never compared"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an entry, as its class describes it.

    Attributes:
        name: Its name, in the file and as an attribute.
        type: What it may have.
        marks: Its properties.
        default: Value of the attribute where the field is missing; ``MISSING`` if it has none.
    """

    name: str
    type: FieldType
    marks: frozenset[Mark]
    default: object

    @property
    def is_required(self) -> bool:
        """Whether a record without the field is refused."""
        return self.default is MISSING or Mark.REQUIRED in self.marks


class Entry:
    """A frozen dataclass whose annotations describe its fields: ``Annotated[int, WHOLE]``.

    Reading, checking, writing and docs/ledger-fields.md follow from the description. Fields are
    written in the order of the class. Of a class with an attribute ``extra``, it holds the fields
    that this version does not know; other classes refuse them.

    Attributes:
        kind: What the record begins with; empty for a part of a record.
    """

    __slots__ = ()
    kind: ClassVar[str] = ""

    def as_record(self) -> dict[str, Json]:
        """Return what is written, JSON values by name."""
        record: dict[str, Json] = {"kind": self.kind} if self.kind else {}
        for field in describe_fields(type(self)):
            value = getattr(self, field.name)
            if Mark.OMITTED not in field.marks or value != field.default:
                record[field.name] = field.type.write(value)
        return {**record, **getattr(self, "extra", {})}

    def check(self) -> None:
        """Raise a ``FieldError`` if fields do not fit each other."""


def read_entry(entry: type[_Entry], given: Mapping[str, Json], path: str = "") -> _Entry:
    """Check the fields of an entry and return it.

    Args:
        entry: Its class.
        given: The fields, without ``kind``.
        path: What precedes their names in errors, such as ``"train.0."``.

    Raises:
        FieldError: When a field is missing, unknown, or has a value that is not allowed.
    """
    rest = dict(given)
    values: dict[str, Any] = {}
    for field in describe_fields(entry):
        name = field.name
        if name in rest:
            values[name] = field.type.read(path + name, rest.pop(name))
        elif field.is_required:
            raise FieldError(path + name, "is missing")
    if hasattr(entry, "extra"):
        values["extra"] = rest
    elif rest:
        raise FieldError(path + next(iter(rest)), f"is not a field of {entry.kind}")
    made = entry(**values)
    made.check()
    return made


def part_of(entry: type[Entry]) -> FieldType:
    """Return the type of fields that hold an entry."""

    def read(name: str, value: Json) -> Entry:
        return read_entry(entry, read_table(name, value), f"{name}.")

    return FieldType(f"an object: {entry.__name__}", read, Entry.as_record)


def describe_fields(entry: type[Entry]) -> tuple[Field, ...]:
    """Return the fields of a class, in the order in which they are written."""
    described = _DESCRIBED.get(entry)
    if described is None:
        parts: tuple[DataclassField[Any], ...] = fields(entry)  # type: ignore[arg-type]
        described = tuple(_make_field(part) for part in parts if part.name != "extra")
        _DESCRIBED[entry] = described
    return described


def _make_field(part: DataclassField[Any]) -> Field:
    _, kind, *marks = get_args(part.type)
    default = part.default if part.default_factory is MISSING else part.default_factory()
    return Field(part.name, kind, frozenset(marks), default)
