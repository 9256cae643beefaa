"""Write docs/ledger-fields.md: every field of every record, as the classes describe them.

``python docs/write_ledger_fields.py`` writes the page; ``tests/docs/test_ledger_fields_page.py``
compares it with the code.
"""

import inspect
import re
from pathlib import Path

from lightning_d9m.ledger.format.entry import Entry, Field, Mark, describe_fields
from lightning_d9m.ledger.format.fields import MAX_WHOLE
from lightning_d9m.ledger.format.records import RECORD_TYPES, LoaderFacts, RankDrift

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "ledger-fields.md"
_HEAD = """# Ledger fields

Each field of each record of [the ledger](ledger.md), in the order in which they are written. The
classes of `lightning_d9m.ledger.format.records` describe the fields; reading, checking and writing
follow from the same descriptions. A record with a value that is not allowed is refused, and so is
one without a required field. Other fields are kept and compared, except in `layout`, `probes` and
`frames`, which refuse them.

This page is written from the code by `python docs/write_ledger_fields.py`.
"""


def format_page() -> str:
    """Return the page."""
    parts = {f"`{name}`": kind for name, kind in RECORD_TYPES.items()}
    parts |= {entry.__name__: entry for entry in (LoaderFacts, RankDrift)}
    return "\n".join([_HEAD, *(_format_entry(*part) for part in parts.items())])


def _format_entry(title: str, entry: type[Entry]) -> str:
    text = inspect.getdoc(entry) or ""
    rows = [
        f"| `{field.name}` | {_plain(field.type.allowed)} | {_describe(field)} | {meaning} |"
        for field in describe_fields(entry)
        for meaning in [_read_meaning(text, field.name)]
    ]
    head = ["| field | value | in a record | means |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## {title}", "", text.splitlines()[0], "", *head, *rows, ""])


def _plain(allowed: str) -> str:
    return allowed.replace(str(MAX_WHOLE), "2^63 - 1")


def _describe(field: Field) -> str:
    presence = "required" if field.is_required else "may be missing"
    return presence + (", never compared" if Mark.INFORMATIONAL in field.marks else "")


def _read_meaning(text: str, name: str) -> str:
    """Return what a docstring says about an attribute."""
    found = re.search(rf"^    {name}: (.*(?:\n {{8}}.*)*)", text, re.MULTILINE)
    assert found is not None, f"{name} is not documented"
    return " ".join(found[1].replace("``", "`").split())


if __name__ == "__main__":
    PAGE.write_text(format_page())
