"""docs/ledger-fields.md says what the classes of the records describe."""

import importlib.util
from pathlib import Path

WRITER = Path(__file__).parents[2] / "docs" / "write_ledger_fields.py"


def load():
    spec = importlib.util.spec_from_file_location("write_ledger_fields", WRITER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    writer = load()
    page = writer.PAGE.read_text()
    assert page == writer.format_page(), "run: python docs/write_ledger_fields.py"
    for row in (
        "| `count` | a whole number from 1 to 65535 | may be missing | Number of batches. |",
        "| `error` | a text of at most 4096 characters, or null | may be missing, never compared |",
    ):
        assert row in page
