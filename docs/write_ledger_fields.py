"""Write docs/ledger-fields.md: every field of every record, as the classes describe them.

``python docs/write_ledger_fields.py`` writes the page; ``tests/docs/test_pages.py``
compares it with the code.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from msgspec import inspect as schema
from msgspec.structs import FieldInfo, fields

from lightning_d9m.engine.ledger.format.records import (
    MAX_WHOLE,
    LoaderFacts,
    RankDrift,
    Record,
    RecordPart,
    find_uncompared,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "ledger-fields.md"
_HEAD = """# Ledger fields

Each field of each record of [the ledger](ledger.md), in the order in which they are written. A
field with its default is left out. A reader refuses a record with a value that is not allowed,
without a required field, or with an unknown one. A comparison reads every field but those that are
never compared, and those that pair records and are therefore equal.
"""


def format_page() -> str:
    """Return the page."""
    parts = {f"`{entry.__struct_config__.tag}`": entry for entry in get_args(Record)}
    parts |= {entry.__name__: entry for entry in (LoaderFacts, RankDrift)}
    return "\n".join([_HEAD, *(_format_entry(*part) for part in parts.items())])


def _format_entry(title: str, entry: type[RecordPart]) -> str:
    text = inspect.getdoc(entry) or ""
    rows = [
        f"| `{part.name}` | {_name_values(values)} | {_describe(part, entry)} | {meaning} |"
        for part in fields(entry)
        for meaning in [_read_meaning(text, part.name)]
        for values in [schema.type_info(part.type)]
    ]
    head = ["| field | value | in a record | means |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## {title}", "", text.splitlines()[0], "", *head, *rows, ""])


def _name_values(kind: schema.Type) -> str:
    """Return the values that a type allows, in words."""
    return _VALUES[type(kind)](kind)


def _name_whole(kind: schema.IntType) -> str:
    highest = "2^63 - 1" if kind.le == MAX_WHOLE else kind.le
    return "a whole number" + ("" if kind.ge is None else f" from {kind.ge} to {highest}")


def _name_text(kind: schema.StrType) -> str:
    return f"a text of {'at most ' if kind.min_length is None else ''}{kind.max_length} characters"


def _name_union(kind: schema.UnionType) -> str:
    named = [_name_values(own) for own in kind.types]
    return f"{', '.join(named[:-1])}, or {named[-1]}"


def _name_list(kind: schema.VarTupleType) -> str:
    counted = f" of {kind.min_length} to {kind.max_length} entries" if kind.max_length else ""
    return f"a list{counted}, each {_name_values(kind.item_type)}"


_VALUES: dict[type[schema.Type], Callable[[Any], str]] = {
    schema.Metadata: lambda kind: (
        (kind.extra_json_schema or {}).get("description") or _name_values(kind.type)
    ),
    schema.UnionType: _name_union,
    schema.LiteralType: lambda kind: " or ".join(map(repr, kind.values)),
    schema.StructType: lambda kind: f"an object: {kind.cls.__name__}",
    schema.DictType: lambda kind: f"an object, each value {_name_values(kind.value_type)}",
    schema.VarTupleType: _name_list,
    schema.TupleType: lambda kind: f"[{'; '.join(map(_name_values, kind.item_types))}]",
    schema.StrType: _name_text,
    schema.BytesType: lambda kind: f"base64 of at least {kind.min_length or 0} bytes",
    schema.IntType: _name_whole,
    schema.FloatType: lambda _: "a finite number",
    schema.BoolType: lambda _: "a boolean",
    schema.NoneType: lambda _: "null",
}


def _describe(part: FieldInfo, entry: type[RecordPart]) -> str:
    is_required = part.required or part.name == "schema"
    presence = "required" if is_required else "may be missing"
    return ", ".join([presence, *filter(None, [find_uncompared(entry).get(part.name)])])


def _read_meaning(text: str, name: str) -> str:
    """Return what a docstring says about an attribute."""
    found = re.search(rf"^    {name}: (.*(?:\n {{8}}.*)*)", text, re.MULTILINE)
    assert found is not None, f"{name} is not documented"
    return " ".join(found[1].replace("``", "`").split())


if __name__ == "__main__":
    PAGE.write_text(format_page())
