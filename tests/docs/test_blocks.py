"""The pages' code runs as it stands, their commands are ours, and their links lead somewhere.

The blocks of a page run one after the other, in an empty folder. A reader sees every block.

Every block names its language. ``python`` is run; of ``sh`` the commands of ours are parsed, and
others are not run: they start the reader's own programs; of ``yaml`` callbacks are built and hooks
looked up; ``json`` is read as records. ``text`` is what a command has printed.
"""

import gc
import json
import re
import shlex
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import yaml
from sybil import Sybil
from sybil.example import SybilFailure
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from lightning_d9m.tools.cli.main import build_parser
from lightning_d9m.tools.comparison.causes import Cause
from lightning_d9m.tools.lint.rules import Finding
from lightning_d9m.tools.locate.op_evidence import OpFinding
from lightning_d9m.tools.locate.search import SearchResult

ROOT = Path(__file__).parents[2]
SKILL = ROOT / "lightning_d9m/.agents/skills/lightning-d9m/SKILL.md"
PAGES = [
    SKILL,
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
HOOKS = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
CALLBACK = "{class_path: lightning_d9m.DeterminismCallback, init_args: {sed: 1}}"
LANGUAGES = {"diff", "python", "sh", "yaml", "json", "text"}
_FENCED = re.compile(r"^ *```(.*)\n(?:.*\n)*? *```$", re.MULTILINE)
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
            # As `main` does: what follows belongs to the program.
            own = words[: words.index("--")] if "--" in words else words
            build_parser(words[1]).parse_args(own[1:])
        except SystemExit as ended:
            if ended.code:
                return f"d9m does not take: {line}"
    return None


def read_yaml(example):
    """Build the callbacks of LightningCLI's YAML; look up pre-commit's hooks and our inputs."""
    match yaml.safe_load(example.parsed):
        case {"trainer": {"callbacks": callbacks}}:
            for callback in callbacks:
                module, _, name = callback["class_path"].rpartition(".")
                getattr(import_module(module), name)(**callback["init_args"])
        case {"repos": [{"hooks": hooks}]}:
            assert {hook["id"] for hook in hooks} <= HOOKS
        case {"steps": [{"uses": _}, {"uses": action, "with": inputs}]}:
            assert action.partition("@")[0].endswith("/lightning_d9m")
            assert inputs.keys() <= ACTION["inputs"].keys()
        case other:
            raise ValueError(other)


def read_records(example):
    """Read the records of a ledger, however they are broken into lines."""
    rest = example.parsed.strip()
    while rest:
        record, end = json.JSONDecoder().raw_decode(rest)
        assert record["kind"]
        rest = rest[end:].strip()


SYBIL = Sybil(
    parsers=[
        PythonCodeBlockParser(),
        CodeBlockParser(language="sh", evaluator=read_command),
        CodeBlockParser(language="yaml", evaluator=read_yaml),
        CodeBlockParser(language="json", evaluator=read_records),
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
def test_blocks_say_what_they_are_and_links_lead_to_files(page):
    text = page.read_text()
    assert "<!---" not in text  # no block is invisible
    assert set(_FENCED.findall(text)) <= LANGUAGES
    links = [link.partition("#")[0] for link in _LINK.findall(text)]
    local = [link for link in links if link and "://" not in link and "mailto:" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_skill_names_fields_that_the_json_has():
    """An assistant loads it from the wheel, by its front matter."""
    head, text = SKILL.read_text().split("---\n", 2)[1:]
    front = yaml.safe_load(head)
    assert front["name"] == SKILL.parent.name
    assert len(front["description"]) < 1024
    shown = {"locate": set(), "scan": set(), "repeat": set()}
    for row in re.findall(r"^\| `\w+` \|.*$", text, re.MULTILINE):
        command, *names = re.findall(r"`(\w+)`", row)
        shown[command].update(names)
    line = Finding(file="a.py", rule="D9M201", line=1, end_line=1).as_record()
    found = SearchResult(Cause("data", "", ""), (MagicMock(rank=0),), lines=[])
    op = {own.name for own in fields(OpFinding)}
    assert shown["scan"] <= {"findings", *line}
    assert shown["locate"] <= {*found.as_json(), "lines", "op", *line, *op}


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("sh\nX=1 d9m compare a b\nd9m compare --sideways a b  # no", SybilFailure),
        ("python\n1 / 0", ZeroDivisionError),
        ("json\n{'kind'}", json.JSONDecodeError),
        ("yaml\nrepos: [{hooks: [{id: d9m-scam}]}]", AssertionError),
        (f"yaml\ntrainer: {{callbacks: [{CALLBACK}]}}", TypeError),
    ],
)
def test_a_block_that_fails_is_found(block, error, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"```{block}\n```\n")
    (example,) = SYBIL.parse(page).examples()
    with pytest.raises(error):
        example.evaluate()
