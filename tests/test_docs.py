"""The tables of the documentation are complete; tests/docs runs its code."""

import json
import re
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
from scripts import load_script

from lightning_d9m import DeterminismCallback, Settings
from lightning_d9m.control import environment
from lightning_d9m.ledger.format import records
from lightning_d9m.ledger.format.records import MAX_LAYOUT_PLACES, MAX_NAME
from lightning_d9m.ledger.format.writer import LedgerWriter

ROOT = Path(__file__).parents[1]


def test_the_settings_page_names_every_setting():
    page = (ROOT / "docs/settings.md").read_text()
    named = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert {field.name for field in fields(Settings)} <= named
    assert set(signature(DeterminismCallback).parameters) <= named


def test_the_settings_page_names_every_variable_and_its_value():
    page = (ROOT / "docs/settings.md").read_text()
    for variable in environment.VARIABLES:
        line = rf"^\| `{variable.name}` \| `{re.escape(variable.wanted)}`"
        assert re.search(line, page, re.MULTILINE), variable.name


def test_the_settings_page_has_a_line_for_every_flag():
    page = (ROOT / "docs/settings.md").read_text()
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
    assert all(text in page for text in lines.values())


def test_the_settings_page_has_every_default():
    page = (ROOT / "docs/settings.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page, re.MULTILINE))
    of_session = {field.name: field.default for field in fields(Settings)}
    of_callback = {
        name: parameter.default
        for name, parameter in signature(DeterminismCallback).parameters.items()
    }
    # The callback inherits what is not given.
    assert all(of_callback.pop(name) is None for name in of_session)
    del of_session["seed"]  # the page has a section on it
    del of_session["patch_ops"], of_session["portable"]
    assert "| `patch_ops` | `True` if torch was built for CUDA |" in page
    assert "| `portable` | `True` with `LIGHTNING_D9M_PORTABLE=1` |" in page
    for defaults in (of_session, of_callback):
        for name, value in defaults.items():
            assert shown[name] == repr(value).replace("'", '"'), name


LEDGER = (ROOT / "docs/ledger.md").read_text()
EXAMPLE = re.search(r"```json\n(.*?)```", LEDGER, re.DOTALL)[1].replace("\n ", "")
DIGEST, CHECK = "00112233445566778899aabbccddeeff", "0011223344556677"


def example_records():
    text = EXAMPLE.replace("<32 hex>", DIGEST).replace('"..."', f'"{CHECK}"')
    return [json.loads(line) for line in text.splitlines()]


def test_the_ledger_page_describes_the_current_schema():
    assert f"## Records, schema {records.SCHEMA}\n" in LEDGER


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


def test_the_ledger_page_has_the_limits_of_the_reader():
    said = " ".join(LEDGER.split())
    for text in (
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
    path, places = tmp_path / "rank-0.jsonl", [["a", "b", 0], ["a", "c", 0]]
    frame = {"kind": "probes", "epoch": 0, "step": 0, "batch": 0, "layout": 0, "digests": b"a" * 32}
    further = {"batch": 1, "digests": b"bcdefghi" * 4}
    with LedgerWriter(path) as writer:
        writer.write({"kind": "layout", "id": 0, "places": places})
        for change in ({}, further, {"epoch": 7, "step": 1}):
            writer.write(frame | change)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = list(load_script("examples/read_ledger.py").list_batches(records))
    assert [entry[:3] for entry in found] == [(0, 0, 0), (0, 0, 1), (7, 1, 0)]
    assert [[digest for _, digest in entry[3]] for entry in found[:2]] == [
        [b"a" * 16, b"a" * 16],
        [b"bcdefghi" * 2] * 2,
    ]
    assert [place for place, _ in found[0][3]] == places
