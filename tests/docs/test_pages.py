"""The pages say what the code does: settings, records, replacements, files; and they stay short."""

import ast
import json
import os
import re
import shlex
import subprocess
from dataclasses import fields
from fnmatch import fnmatch
from inspect import isclass, signature

import pytest
from ledger_runs import LedgerWriter, list_batches, make_probes, write_rank
from lightning.pytorch import Trainer, seed_everything
from scripts import ROOT, load_script
from traced_paths import FILE, PATH, TRACES, read_trace

import lightning_d9m
from lightning_d9m import DeterminismCallback, Settings
from lightning_d9m.engine.control import environment
from lightning_d9m.engine.ledger.folder import rank_path
from lightning_d9m.engine.ledger.format import records
from lightning_d9m.engine.ledger.format.records import MAX_LAYOUT_PLACES, MAX_NAME
from lightning_d9m.errors import D9mError
from lightning_d9m.tools.cli.main import COMMANDS, build_parser

WRITERS = {
    name: load_script(f"docs/write_{name}.py")
    for name in ("commands", "errors", "ledger_fields", "ops")
}
MOST_WORDS = 20_000
README, SETTINGS, LEDGER, MIGRATION, CONTRIBUTING = (
    (ROOT / name).read_text()
    for name in (
        *("README.md", "docs/settings.md", "docs/ledger.md", "docs/migration.md"),
        "CONTRIBUTING.md",
    )
)


@pytest.mark.parametrize("name", WRITERS)
def test_a_page_that_is_written_from_the_code_is_up_to_date(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    page = WRITERS[name].PAGE.read_text()
    assert page == WRITERS[name].format_page(), f"run: python docs/write_{name}.py"


def test_the_pages_that_people_write_are_short():
    generated = {writer.PAGE for writer in WRITERS.values()}
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path not in generated]
    assert len(pages) > 20
    # Code included, without the bars and dashes of tables.
    words = {
        page.name: sum(re.search(r"\w", word) is not None for word in page.read_text().split())
        for page in [ROOT / "README.md", *pages]
    }
    assert sum(words.values()) < MOST_WORDS, words
    assert len(CONTRIBUTING.splitlines()) < 200  # half of them draw paths through the code


def test_the_readme_begins_with_a_failing_run_and_its_line():
    shown = README.partition("\n## ")[0]
    assert "Bit-exact PyTorch Lightning training" in shown
    assert "docs/images/terminal.svg" in shown
    picture = (ROOT / "docs/images/terminal.svg").read_text().replace("&#160;", " ")
    assert "d9m repeat" in picture
    assert "values recorded there" in picture  # as cli/locate.py says it today
    assert "np.random.default_rng()" in picture


def test_the_readme_is_short_and_names_every_command():
    words = [word for word in README.split() if re.search(r"\w", word)]
    assert len(words) <= 800
    assert set(COMMANDS) == set(re.findall(r"`d9m ([a-z-]+)", README)) & set(COMMANDS)
    assert "**No GPU has run it yet.**" in README


def test_the_readme_names_the_commands_without_json():
    parsers = WRITERS["commands"]._list_commands(build_parser(*COMMANDS))
    without = [parser.prog for parser in parsers if "--json" not in parser.format_help()]
    assert without == ["d9m report", "d9m completion"]
    assert "All commands but `completion` and `report` have `--json`." in README


def test_the_reference_has_every_public_name():
    pages = sorted((ROOT / "docs").glob("reference*.md"))
    page = "\n".join(page.read_text() for page in pages)
    shown = set(re.findall(r"^::: lightning_d9m\.(\w+)$", page, re.MULTILINE))
    errors = {
        name
        for name in lightning_d9m.__all__
        if isclass(value := getattr(lightning_d9m, name)) and issubclass(value, D9mError)
    }
    assert shown == {*lightning_d9m.__all__, "errors"} - errors - {"__version__"}


def test_the_settings_page_names_every_variable_and_its_value():
    for variable in environment.VARIABLES:
        line = rf"^\| `{variable.name}` \| `{re.escape(variable.wanted)}`"
        assert re.search(line, SETTINGS, re.MULTILINE), variable.name


def test_the_settings_page_has_a_line_for_every_flag():
    lines = {
        "torch.deterministic_algorithms": "torch.use_deterministic_algorithms",
        "torch.deterministic_warn_only": "warn_only",
        "torch.fill_uninitialized_memory": "fill_uninitialized_memory",
        "cudnn.deterministic": "torch.backends.cudnn.deterministic",
        "cudnn.benchmark": "torch.backends.cudnn.benchmark",
        "sdpa.cudnn": "cuDNN attention",
        "mkldnn.deterministic": "torch.backends.mkldnn.deterministic",
    }
    flags = environment.wanted_flags(fill_uninitialized_memory=True)
    assert set(lines) == set(flags) - {"inductor.deterministic"}
    assert all(text in SETTINGS for text in lines.values())


def test_the_settings_page_has_every_setting_with_its_default():
    shown = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", SETTINGS, re.MULTILINE))
    of_session = {field.name: field.default for field in fields(Settings)}
    of_callback = {
        name: parameter.default
        for name, parameter in signature(DeterminismCallback).parameters.items()
    }
    # The callback inherits what is not given, and counts no calls of `seed_everything`.
    assert "takes all settings but `repeat_fits`" in SETTINGS
    inherited = of_session.keys() - {"repeat_fits"}
    assert all(of_callback.pop(name) is None for name in inherited)
    assert "repeat_fits" not in of_callback
    del of_session["seed"]  # the page has a section on it
    del of_session["portable"]
    assert "| `portable` | `True` with `LIGHTNING_D9M_PORTABLE=1` |" in SETTINGS
    for defaults in (of_session, of_callback):
        for name, value in defaults.items():
            assert shown[name] == repr(value).replace("'", '"'), name


EXAMPLE = re.search(r"```json\n(.*?)```", LEDGER, re.DOTALL)[1].replace("\n ", "")
DIGEST, CHECK = "00112233445566778899aabbccddeeff", "0011223344556677"


def example_records():
    text = EXAMPLE.replace("<32 hex>", DIGEST).replace('"..."', f'"{CHECK}"')
    return [json.loads(line) for line in text.splitlines()]


def test_the_ledger_page_shows_records_as_they_are():
    """Each is read, and written again with the same fields in the same order."""
    for shown in example_records():
        assert list(shown)[-1] == "check"
        check = shown.pop("check")
        assert len(check) == len(CHECK)
        record = records.decode_record(json.dumps(shown, separators=(",", ":")).encode())
        written = record.as_record()
        assert list(written) == list(shown)
        assert written == shown


def test_the_ledger_page_has_the_schema_and_the_limits_of_the_reader():
    said = " ".join(LEDGER.split())
    for text in (
        f"## Records, schema {records.SCHEMA} ",
        f"a line has at most {records.MAX_LINE // 2**20} MiB",
        f"(the header {records.MAX_HEADER // 2**20} MiB)",
        f"a name {MAX_NAME:,} characters",
        f"a ledger {records.MAX_RANKS:,} ranks",
        f"a list of at most {MAX_LAYOUT_PLACES:,} `[kind, name, call]`",
        f"({len(records.CHAIN_START)} zeros before the first)",
    ):
        assert text in said


@pytest.mark.parametrize("edited", [None, (b'"seed":42', b'"seed":43')])
def test_the_example_verifies_a_ledger(tmp_path, edited):
    path = tmp_path / "rank-0.jsonl"
    with LedgerWriter(path) as writer:
        for record in example_records():
            del record["check"]
            writer.write(record)
    if edited:
        path.write_bytes(path.read_bytes().replace(*edited))
    found = load_script("examples/read_ledger.py").verify(path)
    assert found.startswith("line 1 was edited") if edited else found is None


def test_the_example_reads_probes(tmp_path):
    probes = make_probes([("a", "b"), ("a", "c")], [(1, 2), (3, 4)])
    lines = rank_path(write_rank(tmp_path, probes), 0).read_text().splitlines()
    batches = load_script("examples/read_ledger.py").list_batches(map(json.loads, lines))
    found = [
        (*where, [(tuple(place), digest.hex()) for place, digest in entries])
        for *where, entries in batches
    ]
    assert len(found) == 2
    assert found == list_batches(lightning_d9m.read_ledger(tmp_path))


NAMES = {name: getattr(lightning_d9m, name) for name in lightning_d9m.__all__}
NAMES |= {"lightning_d9m": lightning_d9m, "Trainer": Trainer, "seed_everything": seed_everything}


def read_replacements():
    """Return each piece of code of the second columns of the migration page."""
    rows = [line.strip("| ").split(" | ") for line in MIGRATION.splitlines() if line[:2] == "| "]
    return sorted({code for row in rows for code in re.findall(r"`([^`]+)`", row[1])})


def check_replacement(code):
    if code.startswith("d9m "):
        words = shlex.split(code)[1:]
        parser = build_parser(words[0])
        return parser.parse_args(words) if len(words) > 1 else parser
    if code.endswith("="):
        return signature(DeterminismCallback).parameters[code[:-1]]
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = eval(ast.unparse(node.func), NAMES)  # noqa: S307 - the page's own
            signature(function).bind_partial(*node.args, **{w.arg: w for w in node.keywords})
        if isinstance(node, ast.ImportFrom):
            exec(ast.unparse(node), {})  # noqa: S102 - the page's own
    return tree


@pytest.mark.parametrize("code", read_replacements())
def test_what_the_migration_page_gives_in_place_of_something_else_is_there(code):
    check_replacement(code)


@pytest.mark.parametrize(
    "code",
    [
        "DeterminismCallback(patch=True)",
        "lightning_d9m.seed(1)",
        "from lightning_d9m import Patch",
        "sed=",
        "d9m repeat --runs many",
    ],
)
def test_a_replacement_that_is_not_there_is_found(code):
    with pytest.raises((TypeError, AttributeError, ImportError, KeyError, SystemExit)):
        check_replacement(code)


FOLDERS = sorted(path.parent for path in (ROOT / "lightning_d9m").glob("*/**/__init__.py"))


def list_missing(names):
    folders = (ROOT / "lightning_d9m", ROOT)
    return [name for name in names if not any((folder / name).is_file() for folder in folders)]


def test_the_paths_of_contributing_name_files_that_exist_and_count_them():
    paths = PATH.findall(CONTRIBUTING)
    assert len(paths) == 5
    for name, count, _, text in paths:
        files = FILE.findall(text)
        assert list_missing(files) == [], name
        assert len(set(files)) == len(files) == int(count) == text.count(".py"), name
    named = re.findall(r"`([a-z0-9_/]+\.py)`", CONTRIBUTING)
    assert len(named) > 10
    assert list_missing(named) == []


@pytest.mark.parametrize("trace", ["digest", "logical"])
def test_a_trace_enters_the_files_of_a_path(trace, forking_python, tmp_path):
    """More than the files of the path stand around it; few of them come and go unseen."""
    log = tmp_path / "trace"
    code = f"import pathlib, traced_paths as t; t.TRACES[{trace!r}](pathlib.Path({str(log)!r}))"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests/support")}
    subprocess.run([forking_python, "-c", code], check=True, env=environment)
    _, _, entered, text = PATH.findall(CONTRIBUTING)[[*TRACES].index(trace)]
    files = {file for file, _ in read_trace(log)}
    assert {*FILE.findall(text)} <= files
    assert abs(len(files) - int(entered)) <= 2


def test_the_folders_of_contributing_are_those_of_the_package():
    drawing = CONTRIBUTING.partition("## Layout\n")[2].split("```")[1]
    top = {folder.name for folder in FOLDERS if folder.parent.name == "lightning_d9m"}
    assert not {name for name in top if not re.search(rf"\b{name}\b", drawing)}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_says_which_file_to_read_first(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    first = re.split(r"\bRead\s", text, maxsplit=1)[-1]
    named = re.findall(r"``([a-z0-9_/]+\.py)``", first)
    assert named
    assert [name for name in named if not (folder / name).is_file()] == []


def test_the_readme_of_benchmarks_names_every_script_and_no_other():
    folder = ROOT / "benchmarks"
    named = set(re.findall(r"`(?:\w+/)*([\w*]+\.(?:py|sh))\b", (folder / "README.md").read_text()))
    apart = {"loops", "wild", "sklearn"}  # programs that are measured, and a stand-in
    there = {path.name for path in folder.rglob("*.py") if path.parent.name not in apart}
    there |= {path.name for path in folder.rglob("*.sh")} | {"run.py"}
    assert {name for name in there if not any(fnmatch(name, one) for one in named)} == set()
    assert {one for one in named if not any(fnmatch(name, one) for name in there)} == set()
