"""docs/ledger-fields.md says what the classes of the records describe."""

from scripts import load_script

WRITER = load_script("docs/write_ledger_fields.py")


def test_the_page_is_up_to_date():
    page = WRITER.PAGE.read_text()
    assert page == WRITER.format_page(), "run: python docs/write_ledger_fields.py"
    for row in (
        "| `count` | a whole number from 1 to 65535 | may be missing | Number of batches. |",
        "| `error` | a text of at most 4096 characters, or null | may be missing, never compared |",
    ):
        assert row in page
