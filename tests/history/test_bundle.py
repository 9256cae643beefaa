"""``d9m bundle``: what others get, without secrets, and files that may come from anybody."""

import errno
import json
import re
import shutil
import zipfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from ledger_runs import make_digests, make_facts, make_probes, write_rank

from lightning_d9m.engine.ledger.command import SEGMENT
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.records import Resume
from lightning_d9m.tools.cli import locate as locate_module
from lightning_d9m.tools.comparison.causes import Cause
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.history.bundle import SIDES, SecretFilter
from lightning_d9m.tools.lint.rules import Finding
from lightning_d9m.tools.locate.runner import RunPair
from lightning_d9m.tools.locate.search import SearchResult
from lightning_d9m.tools.output.comparison_text import list_one_sided

SECRET = "s3cr3t-value"  # noqa: S105 - no secret
COMMAND = f"python train.py --hf-token {SECRET}"
PROGRAM = (
    "import numpy\n\npassword = 'hunter2hunter2'\nrng = numpy.random.default_rng()\nprint(rng)\n"
)


def write_probed(folder, *, differs=False):
    """Write a run of one rank with probes and a secret in its command."""
    folder.mkdir(parents=True)
    batches = [[0, 0], [0, 0], [0, 255 * differs]]
    probes = make_probes([("batch", "0"), ("loss", "loss")], batches)
    records = [make_facts(), make_digests("initial", 0), *probes]
    weights = {"weights": {"key": "f" * 32 if differs else "0" * 32}}
    records.append(make_digests("epoch", 0, groups=weights, totals={}))
    return write_rank(folder, records, program={"command": COMMAND})


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for number, differs in ((1, False), (2, True)):
        write_probed(tmp_path / f"runs/run-{number:03d}/fit-000", differs=differs)
    return tmp_path


@pytest.fixture
def located(here, d9m, monkeypatch):
    """Let ``d9m locate`` find a line in these runs, without training."""
    (here / "train.py").write_text(PROGRAM)
    ledgers = [read_ledger(here / f"runs/run-{number:03d}") for number in (1, 2)]
    comparison = compare_ledgers(*ledgers)
    code = "rng = numpy.random.default_rng()"
    line = Finding(file="train.py", rule="D9M201", line=4, end_line=4, code=code)
    found = SearchResult(
        Cause("data", "The batch differs.", "Look at the dataset."),
        tuple(comparison.divergences),
        pair=RunPair("fit-000", comparison, ledgers[0]),
        lines=[line],
    )
    monkeypatch.setattr(locate_module.Search, "locate", lambda *_: found)
    monkeypatch.setattr(locate_module, "make_output", lambda _: here / "runs")
    assert d9m("locate", "--", "python", "train.py")[0] == 1
    return here


@pytest.fixture
def bundle(d9m):
    return partial(d9m, "bundle")


@pytest.fixture
def unpacked(bundle, tmp_path):
    """Return a function that writes a bundle and unpacks it elsewhere: the folder, the output."""

    def write(*words):
        status, out, errors = bundle(*words)
        assert status in (0, 1), errors
        shutil.unpack_archive("d9m-bundle.zip", tmp_path / "elsewhere")
        return tmp_path / "elsewhere", out

    return write


def test_commands_read_a_bundle_as_the_folder_that_locate_left(located, unpacked, d9m, monkeypatch):
    other, written = unpacked("runs")
    assert written.startswith("different: ")
    assert "d9m locate:\ndifferent: data. The batch differs.\n" in written
    assert re.search(r"^reference/rank-0\.jsonl +\d", written, re.MULTILINE)
    assert max(map(len, written.splitlines())) <= 80
    monkeypatch.chdir(other)
    # Another file of this name is not that of the run.
    Path("train.py").write_text("another\n" * 9)
    status, shown, _ = d9m("compare", *SIDES)
    assert status == 1
    assert "d9m locate:\ndifferent: data. The batch differs.\n" in shown
    assert ">     4 rng = numpy.random.default_rng()\n      5 print(rng)\n" in shown
    assert "another" not in shown
    assert d9m("report", ".")[0] == 1
    page = Path("report.html").read_text()
    assert "<h1>Different</h1>" in page
    assert all(text in page for text in NAMED)


# What `d9m report` shows at the top: the line, the fix, and the lines around it.
NAMED = (
    "line:     train.py:4:1: rng = numpy.random.default_rng()",
    "fix:      Pass a seed that is fixed and recorded.",
    "<strong>&gt;     4 rng = numpy.random.default_rng()</strong>",
)


@pytest.mark.parametrize(("order", "shown"), [((), True), ((1, 2), True), ((2, 1), False)])
def test_a_report_names_the_line_of_the_pair_that_was_located(located, d9m, order, shown):
    folders = [located / f"runs/run-{number:03d}/fit-000" for number in order]
    assert d9m("report", *(folders or ["runs"]))[0] == 1
    page = (located / "report.html").read_text()
    assert [text in page for text in NAMED] == [shown] * len(NAMED)
    assert ("Next: <code>d9m locate" in page) is not shown


def test_a_page_says_what_it_leaves_out_of_a_report(located, d9m):
    file = located / "runs/locate.json"
    facts = json.loads(file.read_text()) | {"report": ["<" * 500] * 1005, "source": []}
    file.write_text(json.dumps(facts))
    assert d9m("report", "runs")[0] == 1
    page = (located / "report.html").read_text()
    assert (page.count(f"{'&lt;' * 400} ...\n"), "5 more are left out." in page) == (1000, True)


@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.parametrize("words", [["runs"], ["runs/run-001", "runs/run-002"]])
def test_what_was_located_is_said_in_place_of_the_advice_to_locate(located, d9m, command, words):
    if command == "compare" and not words[1:]:
        words = ["runs/run-001/fit-000", "runs/run-002/fit-000"]
    status, out, _ = d9m(command, *words)
    assert status == 1
    assert "d9m locate:\ndifferent: data. The batch differs.\n" in out
    assert "line:     train.py:4:1: rng = numpy.random.default_rng()\n" in out
    assert "d9m locate --" not in out


def test_what_cannot_be_written_whole_is_not_written(located, d9m, bundle, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    before = {path: path.stat().st_size for path in located.rglob("*")}

    def fail(self, *_, **__):
        self.write_bytes(b"a part")
        raise full

    monkeypatch.setattr(Path, "write_text", fail)
    monkeypatch.setattr(zipfile.ZipFile, "write", Mock(side_effect=full))
    for command in (partial(d9m, "report"), bundle):
        status, _, err = command("runs")
        assert (status, "No space left on device. Free some space" in err) == (2, True)
    assert {path: path.stat().st_size for path in located.rglob("*")} == before


def test_no_secret_is_in_any_file(located, unpacked, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "0.default")
    folder, out = unpacked("runs", "--json")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sorted(json.loads(out)["sizes"]) == sorted(str(p.relative_to(folder)) for p in files)
    texts = [path.read_bytes() for path in files]
    assert not [text for text in texts if SECRET.encode() in text or b"hunter2" in text]
    assert json.loads(out)["secrets"] >= 3  # a command in each ledger, a line of the program
    report = json.loads((folder / "locate.json").read_text())["report"]
    assert "      3 password = [removed]" in report
    # The names of tensors and their digests are not secrets.
    groups = [
        getattr(record, "groups", {})
        for record in read_ledger(folder / "reference").line_records(0)
    ]
    assert {"weights": {"key": "0" * 32}} in groups


@pytest.fixture
def resumed(here, runs):
    """Return a function that writes a run, and one that resumes after its first epoch."""

    def write(**header):
        whole = runs.write(3)
        first = runs.write(1, edit=lambda _, records: records.pop())
        check = json.loads((first / "rank-0.jsonl").read_text().splitlines()[3])["check"]
        resume = Resume(parent=f"../{first.name}", parent_check=check, epoch=1, step=23, batch=0)

        def continue_run(_, records):
            del records[2:4]  # the initial state and epoch 0
            records.insert(1, resume.as_record())

        return str(whole), str(runs.write(3, edit=continue_run, **header))

    return write


def test_a_resumed_run_becomes_one_ledger(resumed, unpacked):
    """It says where the run was resumed, as the run does."""
    both = resumed()
    folder, _ = unpacked(*both)
    for ledgers in (both, [folder / side for side in SIDES]):
        found = compare_ledgers(*map(read_ledger, ledgers))
        (said,) = list_one_sided(found)
        assert found.equal
        assert json.loads(json.dumps(found.as_json()))["ranks"][0]["actual"]["breaks"]
        assert said == "Rank 0: this run was interrupted and resumed at epoch 1, batch 0 (step 23)."


def test_a_segment_claims_no_more_than_it_has_computed(resumed, unpacked):
    both = resumed(program={SEGMENT: "until 69"})
    folder, _ = unpacked(*both)
    ledgers = (both, [folder / side for side in SIDES])
    compared = [compare_ledgers(*map(read_ledger, pair)).ranks[0] for pair in ledgers]
    assert [(own.segment, own.records, own.epochs) for own in compared] == [((23, 69), 5, 2)] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "c"], "3 paths were given: a b c. Give two ledgers"),
        (["open"], "takes one capsule"),
        (["open", "train.py", "-o", "a.zip"], "--output has no effect here"),
        (["open", "train.py"], "train.py is not a capsule, or is damaged: File is not a zip"),
        (["open", "other.zip"], 'is not a capsule, or is damaged: "There is no item named'),
        (["runs", "-o", "train.py"], "train.py exists already, so nothing can be written"),
        (["runs", "-o", "none/b.zip"], "none/b.zip is in no folder"),
    ],
)
def test_wrong_words_are_one_clear_error(here, bundle, words, message):
    Path("train.py").write_text(PROGRAM)
    with zipfile.ZipFile("other.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    status, out, errors = bundle(*words)
    assert (status, out) == (2, "")
    assert message in errors
    assert errors.startswith("d9m: error: ")
    assert not Path("d9m-bundle.zip").exists()


@pytest.mark.parametrize("text", ["[", '{"report":[3]}', '{"x":' + "[" * 400 + "]" * 400 + "}"])
def test_a_result_of_locate_that_was_edited_is_an_error(located, bundle, text):
    (located / "runs/locate.json").write_text(text)
    status, _, errors = bundle("runs")
    assert status == 2
    assert "The result of d9m locate in runs cannot be used" in errors


@pytest.mark.parametrize(
    "facts", [{"lines": [1]}, {"op": "mm"}, {"lines": [{"file": "train.py", "line": 1}]}]
)
def test_no_file_is_read_that_a_result_of_a_stranger_names(located, bundle, facts):
    file = located / "runs/locate.json"
    known = json.loads(file.read_text()) | {"report": ["different"], "source": []}
    file.write_text(json.dumps(known | facts))
    status, out, errors = bundle("runs", "-v")
    assert status == 1, errors
    assert "import numpy" not in out


def test_the_next_command_has_no_secret(here, bundle):
    out = " ".join(bundle("runs/run-001", "runs/run-002")[1].split())
    assert "d9m locate -- python train.py --hf-token [removed]" in out


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("clean", f"https://ann:{SECRET}@host/repo.git"),
        ("clean", f"https://host/data?version=3&token={SECRET}&split=test"),
        ("clean", f"https://host/data?X-Amz-Signature={SECRET}#top"),
        ("clean", f"python train.py --hf-token {SECRET} --epochs 3"),
        ("clean", f"python train.py --password='{SECRET} two words'"),
        ("clean", f"python train.py --db-pwd {SECRET}"),
        ("clean", f"Authorization: Bearer {SECRET}"),
        ("clean", f"authorization: token {SECRET}"),
        ("clean", f"{{'Authorization': 'Bearer {SECRET}'}}"),
        ("clean", f"X-Api-Key: {SECRET}"),
        ("clean", f"call(Bearer {SECRET})"),
        ("clean", f'{{"password": "{SECRET}"}}'),
        ("clean", f"{{'hf_token': '{SECRET} two words'}}"),
        ("clean", f"python train.py pwd={SECRET}"),
        ("clean", f"python train.py --pwd {SECRET}"),
        ("clean", f"ghp_{SECRET}0123456789"),
        ("clean", f"the variable's {SECRET} in a path"),
        ("clean", f"WANDB_API_KEY={SECRET} python train.py"),
        ("clean", f"python train.py logger.token={SECRET}"),
        ("clean_code", f'client = Client(api_key="{SECRET}")'),
        ("clean_code", f"PASSWORD = '{SECRET}'"),
        ("clean_code", f'headers = {{"hf_token": "{SECRET}"}}'),
    ],
)
def test_a_secret_is_removed(method, text):
    secrets = SecretFilter({"MY_TOKEN": SECRET, "HOME": "/home/ann"})
    assert SECRET not in getattr(secrets, method)(text)
    # Also where the environment does not give it away.
    if "variable" not in text:
        secrets = SecretFilter({})
        assert SECRET not in getattr(secrets, method)(text)
    assert secrets.count == 1
    cleaned = getattr(secrets, method)(text)
    assert getattr(secrets, method)(cleaned) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "python train.py --max-tokens 512 --monkey 3 --seed 42 data.keys=3",
        "https://host/data?version=3&split=test",
        "embedding.token_embedding.weight",
        "git@host:ann/project.git",
        "for key in keys: print(key)",
    ],
)
def test_what_is_needed_stays(text):
    secrets = SecretFilter(
        {"TOKEN": "short", "KEYS": "project", "LANG": "values", "PWD": "project.git"}
    )
    assert secrets.clean(text) == text
    assert secrets.clean_code(text) == text
    code = "values = sorted(found, key=len)"
    assert secrets.clean_code(code) == code
    assert secrets.count == 0
