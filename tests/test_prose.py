"""Docstrings, comments, messages and the pages are plain American English.

Each pattern is a habit that makes a sentence read as a translation, with what to write instead.
The list is short on purpose: it names what is hardly ever right.
"""

import ast
import io
import json
import re
import tokenize
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    ROOT / "dev.py",
    *(
        path
        for folder in ("lightning_d9m", "docs", "examples", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ),
]
GENERATED = {"errors.md", "ops.md"}  # written from the package, which is checked itself
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    ROOT / "examples/README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED),
    *sorted((ROOT / "docs/notebooks").glob("*.ipynb")),
    *sorted((ROOT / "lightning_d9m").rglob("*.txt")),
]
_CODE = re.compile(
    r"^( *)(`{3,}|~{3,})[^\n]*\n.*?^\1\2[^\n]*$|<!--.*?-->", re.DOTALL | re.MULTILINE
)

PATTERNS = {
    r"\banew\b": "again, fresh, from scratch",
    r"\b(held|holds?|holding) (?:\w+ ){0,4}against\b": "compared with, compares with",
    r"(?<![Tt]here )\b(is|are|was|were) no (?!longer|more|less|other)[a-z]+\b": "is not a ...",
    r"\ball the same\b": "anyway, still",
    r", also (?:after|before|by|for|if|in|on|when|where|within)\b": "even, including, too",
    r"\bfor ever\b": "indefinitely",
    r"\bgoes on\b|\bgo on with\b": "continues",
    r"\bother bits\b": "different values",
    r"\bthat comes? to nothing\b|\bcame to nothing\b": "has no effect",
    r"\b[Ww]hoever\b|\bwhosoever\b": "name the caller",
    r"\bis told\b|\bare told\b|\bis asked for\b": "name the function that passes it",
    r"\b(behaviour|colour|initialis|normalis|serialis|synchronis|catalogue\b)": "US spelling",
    r"\bmisspelt\b|\bspelt\b": "misspelled, spelled",
}
# "Whether ..." is the usual opening of a property that holds a bool.
OPENING = re.compile(r"(What|Which|Where|How|Who)\b(?!.*\?)")


def read_prose(path):
    """Yield (line, text, whether it is a docstring) of a file's strings and comments."""
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in docstrings
    comments = [
        (token.start[0], token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    # A sentence may go over several lines of comments.
    for (line, text), (_, following) in pairwise([*comments, (0, "")]):
        yield line, f"{text} {following}", False


def find_problems(texts):
    """Return (line, what was found, what to write instead)."""
    found = []
    for line, text, is_docstring in texts:
        words = " ".join(text.split())
        for pattern, advice in PATTERNS.items():
            if match := re.search(pattern, words):
                found.append((line, match[0], advice))
        if is_docstring and OPENING.match(words):
            found.append((line, words[:40], "begin with a noun phrase or a verb"))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_are_written_in_plain_english(path):
    found = find_problems(read_prose(path))
    assert not found, "\n" + "\n".join(f"{path}:{n}: {what!r}: {how}" for n, what, how in found)


def read_page(path):
    """Return the Markdown of a page; of a notebook, that of its cells of text."""
    text = path.read_text()
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def read_paragraphs(text):
    """Yield (line, text, False) of each paragraph of a Markdown page, without code blocks."""
    prose = _CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for match in re.finditer(r"(?:^.*\S.*$\n?)+", prose, re.MULTILINE):
        yield prose.count("\n", 0, match.start()) + 1, match[0], False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_pages_are_written_in_plain_english(page):
    found = find_problems(read_paragraphs(read_page(page)))
    assert not found, "\n" + "\n".join(f"{page}:{n}: {what!r}: {how}" for n, what, how in found)


def test_prose_is_found_in_the_text_of_a_notebook_and_between_blocks_of_code(tmp_path):
    page = "# Title\n\nIt is\nbuilt anew.\n\n```sh\nd9m anew\n```\n\nIt goes on.\n"
    cells = [("code", ["built = 'anew'"]), ("markdown", [page])]
    path = tmp_path / "page.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": t, "source": s} for t, s in cells]}))
    found = find_problems(read_paragraphs(read_page(path)))
    assert [(line, what) for line, what, _ in found] == [(3, "anew"), (10, "goes on")]
    assert find_problems([(1, "Where the ranks meet.", True)])
    assert not find_problems([(1, "There is no command to run where the ranks differ.", True)])
