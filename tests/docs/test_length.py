"""The documentation stays short: everything is said once."""

import re
from math import ceil
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Made by docs/write_commands.py, write_errors.py, write_ledger_fields.py and write_ops.py.
GENERATED = {"commands.md", "errors.md", "ledger-fields.md", "ops.md"}
MOST_WORDS = 20_000
# A page of GitHub on a screen of 1280 by 900 pixels: the column's width, the height of a line, the
# characters in it, and the space below a paragraph. Chromium shows the README so in 877 pixels.
SCREEN, COLUMN, LINE, CHARACTERS, SPACE = 900, 838, 24, 95, 16
TITLE = 66


def count_words(text):
    """Return the number of words, code included, without the bars and dashes of tables."""
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_the_pages_that_people_write_are_short():
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name not in GENERATED]
    assert len(pages) > 20
    words = {page.name: count_words(page.read_text()) for page in [ROOT / "README.md", *pages]}
    assert sum(words.values()) < MOST_WORDS, words


def measure_first_screen(page):
    """Return the height in pixels of what stands above the first heading of a README."""
    height = TITLE
    for part in page.partition("\n## ")[0].split("\n\n")[1:]:
        if picture := re.match(r"!\[[^]]*\]\(([^)]+)\)", part):
            box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', (ROOT / picture[1]).read_text())
            width, high = map(float, box.groups())
            height += high * min(1, COLUMN / width) + SPACE
        else:
            shown = re.sub(r"\]\([^)]*\)|[*`\[]", "", part)
            height += LINE * ceil(len(shown) / CHARACTERS) + SPACE
    return height - SPACE


def test_what_and_the_failing_run_and_its_line_are_on_the_first_screen_of_the_readme():
    page = (ROOT / "README.md").read_text()
    shown = page.partition("\n## ")[0]
    assert "Bit-exact PyTorch Lightning training" in shown
    assert "docs/images/terminal.svg" in shown
    assert measure_first_screen(page) <= SCREEN
    picture = (ROOT / "docs/images/terminal.svg").read_text().replace("&#160;", " ")
    assert "d9m repeat" in picture
    assert "values recorded there" in picture  # as cli/locate.py says it today
    assert "np.random.default_rng()" in picture
