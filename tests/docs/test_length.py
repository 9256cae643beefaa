"""The documentation stays short: everything is said once."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Made by docs/write_commands.py, write_errors.py, write_ledger_fields.py and `d9m ops --markdown`.
GENERATED = {"commands.md", "errors.md", "ledger-fields.md", "ops.md"}
MOST_WORDS = 20_000


def count_words(text):
    """Return the number of words, code included, without the bars and dashes of tables."""
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_the_pages_that_people_write_are_short():
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name not in GENERATED]
    assert len(pages) > 20
    words = {page.name: count_words(page.read_text()) for page in [ROOT / "README.md", *pages]}
    assert sum(words.values()) < MOST_WORDS, words


def test_the_bars_of_tables_are_not_words():
    assert count_words("| a word | `x=1` |\n| --- | --- |\n") == 3
