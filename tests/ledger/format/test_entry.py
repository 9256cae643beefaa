"""One description of a record serves writing, reading and checking."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import pytest

from lightning_d9m.ledger.format import fields as types
from lightning_d9m.ledger.format.entry import Entry, Mark, describe_fields, part_of, read_entry
from lightning_d9m.ledger.format.fields import FieldError


@dataclass(frozen=True, slots=True)
class Size(Entry):
    """A part of a record."""

    samples: Annotated[int | None, types.optional(types.WHOLE)]
    extra: dict = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Later(Entry):
    """A record that knows all its fields."""

    kind: ClassVar[str] = "later"
    version: Annotated[int, types.whole(1, 3), Mark.REQUIRED] = 2
    name: Annotated[str, types.text(cut=True)]
    sizes: Annotated[tuple, types.list_of(part_of(Size), "Size")] = ()
    note: Annotated[str, types.TEXT, Mark.OMITTED] = ""

    def check(self):
        if self.name == "forbidden":
            raise FieldError("name", "is forbidden")


def test_a_record_is_written_as_it_is_described():
    """In the order of the class, with the parts, without what is left out at its default."""
    record = Later(name="n" * 5000, sizes=(Size(None), Size(3, {"a": [1]})))
    written = record.as_record()
    assert list(written) == ["kind", "version", "name", "sizes"]
    assert written["name"] == "n" * types.MAX_NAME
    assert written["sizes"] == [{"samples": None}, {"samples": 3, "a": [1]}]
    assert "note" in Later(name="", note="x").as_record()


def test_what_is_written_is_read():
    record = Later(name="n", sizes=(Size(None), Size(3, {"a": [1]})), note="x")
    rest = record.as_record()
    del rest["kind"]
    assert read_entry(Later, rest) == record
    assert read_entry(Later, {"version": 1, "name": "n"}) == Later(version=1, name="n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "n"}, "field 'version' is missing"),
        ({"version": 1}, "field 'name' is missing"),
        (
            {"version": 4, "name": ""},
            "field 'version' must be a whole number from 1 to 3, and is 4",
        ),
        ({"version": 1, "name": "", "x": 1}, "field 'x' is not a field of later"),
        ({"version": 1, "name": "forbidden"}, "field 'name' is forbidden"),
        ({"version": 1, "name": "", "sizes": ()}, "field 'sizes' must be a list"),
        ({"version": 1, "name": "", "sizes": [1]}, "field 'sizes.0' must be an object"),
        ({"version": 1, "name": "", "sizes": [{}]}, "field 'sizes.0.samples' is missing"),
        (
            {"version": 1, "name": "", "sizes": [{"samples": 1}, {"samples": -1}]},
            "field 'sizes.1.samples' must be a whole number",
        ),
    ],
)
def test_what_does_not_fit_the_description_is_refused(given, message):
    with pytest.raises(FieldError, match=message):
        read_entry(Later, given)


def test_the_description_can_be_read():
    version, _, sizes, note = describe_fields(Later)
    assert version.is_required
    assert not sizes.is_required
    assert note.marks == {Mark.OMITTED}
    assert [part.name for part in describe_fields(Size)] == ["samples"]
