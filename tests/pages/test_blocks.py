"""The pages' code runs as it stands, their commands are ours, and their links lead somewhere.

Names that a block takes for granted (`train`, say) are defined in an invisible block of the page:
``<!--- invisible-code-block: python``. Each page runs in an empty folder.
"""

import gc
import re
import shlex
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from lightning_d9m.adapters.cli import build_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def read_command(example):
    """Parse the lines of a shell block that are commands of ours; return what is wrong."""
    text = example.parsed.replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words and "=" in words[0]:  # variables before the command
            words.pop(0)
        if words[:1] != ["d9m"] or len(words) == 1 or words[1].startswith("-"):
            continue
        try:
            build_parser(words[1]).parse_args(words[1:])
        except SystemExit as ended:
            if ended.code:
                return f"d9m does not take: {line}"
    return None


SYBIL = Sybil(
    parsers=[
        PythonCodeBlockParser(),
        CodeBlockParser(language="sh", evaluator=read_command),
        SkipParser(),
    ]
)


def run_page(page):
    for example in SYBIL.parse(page).examples():
        example.evaluate()


def ids(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
@pytest.mark.filterwarnings("ignore")  # Lightning's advice to small examples
def test_every_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    run_page(page)
    gc.collect()  # callbacks that a page makes and does not use


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_within_the_repository_leads_to_a_file(page):
    links = [link.partition("#")[0] for link in _LINK.findall(page.read_text())]
    local = [
        link for link in links if link and "://" not in link and not link.startswith("mailto:")
    ]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing


def test_a_command_that_we_do_not_have_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh\nX=1 d9m compare a b\nd9m compare --sideways a b  # no\n```\n")
    (example,) = SYBIL.parse(page).examples()
    with pytest.raises(Exception, match="d9m does not take: d9m compare --sideways"):
        example.evaluate()


def test_a_block_that_fails_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\n1 / 0\n```\n")
    (example,) = SYBIL.parse(page).examples()
    with pytest.raises(ZeroDivisionError):
        example.evaluate()
