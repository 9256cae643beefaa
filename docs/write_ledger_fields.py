"""Write docs/ledger-fields.md: every field of every record, as the classes describe them.

``python docs/write_ledger_fields.py`` writes the page; ``tests/docs/test_pages.py``
compares it with the code.
"""

import inspect
import re
from pathlib import Path
from typing import get_args

from msgspec import Meta
from msgspec.structs import FieldInfo, fields

from lightning_d9m.engine.ledger.format.records import (
    RECORD_TYPES,
    LoaderFacts,
    RankDrift,
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
    parts = {f"`{name}`": kind for name, kind in RECORD_TYPES.items()}
    parts |= {entry.__name__: entry for entry in (LoaderFacts, RankDrift)}
    return "\n".join([_HEAD, *(_format_entry(*part) for part in parts.items())])


def _format_entry(title: str, entry: type[RecordPart]) -> str:
    text = inspect.getdoc(entry) or ""
    rows = [
        f"| `{part.name}` | {_name_values(part)} | {_describe(part, entry)} | {meaning} |"
        for part in fields(entry)
        for meaning in [_read_meaning(text, part.name)]
    ]
    head = ["| field | value | in a record | means |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## {title}", "", text.splitlines()[0], "", *head, *rows, ""])


def _name_values(part: FieldInfo) -> str:
    """Return the description of the outermost annotation."""
    metas = [meta for meta in get_args(part.type) if isinstance(meta, Meta)]
    return [meta.description for meta in metas if meta.description][-1]


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
