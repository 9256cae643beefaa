"""``d9m audit ops``: it finds what varies, checks torch's documentation, and survives its cases."""

import json
import sys
from pathlib import Path

import pytest
import torch

from lightning_d9m.errors import SettingError
from lightning_d9m.ops.patches.catalog.catalog import OPS
from lightning_d9m.tools.audit.ops import measurement
from lightning_d9m.tools.audit.ops.cases import (
    Case,
    Inputs,
    find_documented_lines,
    list_cases,
    read_documentation,
)
from lightning_d9m.tools.audit.ops.measurement import measure_case
from lightning_d9m.tools.audit.ops.report import judge_op

LINES = read_documentation(torch.use_deterministic_algorithms.__doc__)
DOCSTRINGS = (Path(__file__).parents[2] / "patches" / "catalog" / "docstrings").glob("*.txt")
OTHER_LINES = [line for path in DOCSTRINGS for line in read_documentation(path.read_text())]
FEW = (2, 0.0)


@pytest.mark.alone
def test_the_accumulating_index_put_of_two_threads_is_caught(two_threads):
    """2,000,000 values into 50 bins: it varies by default, and in no other condition."""
    case = next(
        case
        for case in list_cases()
        if case.op == "index_put_accumulate" and case.parameters["values"] == 2_000_000
    )
    conditions = measure_case(case, "cpu", "float32", 4, 60)
    outputs = {condition: entry["spread"]["distinct"] for condition, entry in conditions.items()}
    assert outputs.pop("default") > 1
    assert outputs == {"deterministic": 1, "patched": 1, "oracle": 1}
    assert [entry["spread"]["runs"] for entry in conditions.values()] == [2, 4, 4, 4]
    assert conditions["default"]["spread"]["vermv"] > 0
    assert conditions["default"]["spread"]["vc"] > 0
    assert conditions["patched"]["ratio"] > 0
    documented = [line.kind for line in find_documented_lines(LINES, case.documented, "cpu")]
    row = {"documented": documented, "conditions": conditions}
    assert judge_op([row]) == ["As documented."]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RuntimeError("put_ does not have a deterministic implementation, but ..."), "raised"),
        (torch.OutOfMemoryError("CUDA out of memory."), "failed"),
        (ValueError("shapes do not match\nand more"), "failed"),
    ],
)
def test_what_goes_wrong_becomes_the_row(error, outcome):
    def fail():
        raise error

    conditions = measure_case(Case("an_op", {}, fail), "cpu", "float32", *FEW)
    assert {entry["outcome"] for entry in conditions.values()} == {outcome}
    for entry in conditions.values():
        assert entry["reason"].startswith(type(error).__name__)
        assert "\n" not in entry["reason"]
    elsewhere = measure_case(Case("an_op", {}, fail, devices=("cuda",)), "cpu", "float32", *FEW)
    assert elsewhere["default"] == {"outcome": "failed", "reason": "The op exists on cuda only."}


def test_the_oracle_sees_the_numbers_that_were_rounded():
    measured = Inputs("cpu", torch.bfloat16).normal(50)
    oracle = Inputs("cpu", torch.float64, torch.bfloat16).normal(50)
    assert torch.equal(measured.double(), oracle)


def test_the_cases_are_those_of_the_catalog_and_of_the_documentation():
    """Of the torch that is installed, and of others."""
    keys = [case.key(dtype) for case in list_cases() for dtype in case.dtypes]
    assert len(keys) == len(set(keys))
    # But for the entry that speaks of a kind of device; cases may have more exact names.
    ops = {case.op.replace("conv", "convolution") for case in list_cases()}
    missing = [op.name for op in OPS if not any(name.startswith(op.name) for name in ops)]
    packages = ("torchvision_", "flex_attention", "mamba_", "torch_scatter", "triton_")
    assert [name for name in missing if not name.startswith(packages)] == ["apple_devices"]
    lines = (*LINES, *OTHER_LINES)
    known = {name for case in list_cases() for name in case.documented}
    for line in lines:
        assert find_documented_lines((line,), known, (*line.devices, "cpu")[0]), line.text
    for name in known:
        assert any(find_documented_lines(lines, [name], kind) for kind in ("cpu", "cuda", "mps"))


def test_the_documentation_is_read_with_its_conditions():
    put = [line for line in LINES if line.name == "torch.Tensor.put_"]
    assert {(line.kind, line.devices) for line in put} == {
        ("switches", ("cpu",)),
        ("raises", ()),
        ("raises", ("cuda",)),
    }
    assert find_documented_lines(LINES, ["torch.nn.AvgPool3d"], "cpu") == ()
    assert len(find_documented_lines(LINES, ["torch.nn.AvgPool3d"], "cuda")) == 1
    with pytest.raises(SettingError, match="cannot be checked"):
        read_documentation("Nothing is listed here.")


def ran(distinct):
    return {"outcome": "ran", "spread": {"distinct": distinct}}


RAISED = {"outcome": "raised", "reason": "RuntimeError: refused"}


@pytest.mark.parametrize(
    ("documented", "default", "deterministic", "patched", "findings"),
    [
        ([], ran(1), ran(1), ran(1), "As documented."),
        (["switches"], ran(3), ran(1), ran(1), "As documented."),
        (["raises"], ran(3), RAISED, RAISED, "As documented."),
        ([], ran(2), ran(1), ran(1), "Varies, and torch does not document it."),
        (["switches"], ran(1), ran(1), ran(1), "Documented as nondeterministic, and did not vary"),
        ([], ran(2), ran(2), ran(1), "and does not raise"),
        ([], ran(1), RAISED, RAISED, "Raises, and torch does not document it."),
        (["raises"], ran(2), ran(1), ran(1), "Documented as raising, and ran."),
        (["raises"], ran(2), RAISED, ran(1), "although a deterministic version exists"),
        ([], {"outcome": "failed", "reason": "gone"}, RAISED, RAISED, "Not measured: gone"),
    ],
)
def test_each_way_to_stand_to_the_documentation(
    documented, default, deterministic, patched, findings
):
    conditions = {"default": default, "deterministic": deterministic, "patched": patched}
    assert findings in " ".join(judge_op([{"conditions": conditions, "documented": documented}]))


# A worker that measures at once, and does not survive what FATE says.
FAKE = """
import json, os, signal, sys, time
sys.stdin.readline()
print("[]", flush=True)
for line in sys.stdin:
    key = json.loads(line)
    if key == "b":
        FATE
    ran = {"outcome": "ran", "microseconds": 1.0, "ratio": 1.0, "spread": {
        "distinct": 2 if key == "c" and VARIES else 1, "runs": 2, "vs": None, "vermv": 0.0,
        "vc": 0.0, "ulps": 0}}
    conditions = ("default", "deterministic", "patched", "oracle")
    print(json.dumps(dict.fromkeys(conditions, ran)), flush=True)
"""
PLAN = [
    {"key": key, "op": key, "parameters": {}, "dtype": "float32", "documented": []} for key in "abc"
]


@pytest.fixture
def audit(tmp_path, monkeypatch, d9m):
    """Return a function that audits with a worker of that fate; it gives status and output."""

    def run(*words, fate="pass", varies=False):
        worker = tmp_path / "worker.py"
        worker.write_text(FAKE.replace("FATE", fate).replace("VARIES", str(varies)))
        monkeypatch.setattr(measurement, "_WORKER", [sys.executable, str(worker)])
        monkeypatch.setattr(
            measurement, "plan_rows", lambda _: (PLAN, {"torch": "0", "threads": 1})
        )
        return d9m("audit", "ops", "--quick", "-o", tmp_path / "out", *words)

    return run


def test_rows_json_and_markdown_are_left(audit, tmp_path):
    """Also of a case that ends its process, and of a patched op that varies."""
    status, out, err = audit(fate="os.kill(os.getpid(), signal.SIGKILL)", varies=True)
    assert status == 1
    assert "[2 of 3] b" in err
    assert "Ops: 3, in 3 cases; varied: 1;" in out
    assert "the patched op varied: c" in out
    folder = tmp_path / "out"
    rows = map(json.loads, (folder / "ops.jsonl").read_text().splitlines()[1:])
    assert [row["row"]["key"] for row in rows] == ["a", "b", "c"]
    page = (folder / "ops.md").read_text()
    assert "| `a` | no | no | no | As documented. |" in page
    assert "| `c` | yes | yes | yes | Varies, and torch does not document it. Varies al" in page
    assert "|  | patched | 2 | 2 |  | 0 | 0 |  | 1 | 1 |" in page
    result = json.loads((folder / "ops.json").read_text())
    assert result["ops"][0]["findings"] == ["As documented."]
    lost = result["rows"][1]["conditions"]["default"]
    assert lost["outcome"] == "lost"
    assert "runs out of memory" in lost["reason"]


@pytest.mark.alone
def test_a_case_that_hangs_is_ended(audit):
    _, out, _ = audit("--json", "--timeout", "1.5", fate="signal.pause()")
    rows = {row["key"]: row["conditions"]["default"] for row in json.loads(out)["rows"]}
    assert "still running after 1.5 s" in rows["b"]["reason"]
    assert rows["c"]["outcome"] == "ran"


def test_a_worker_that_never_begins_is_an_error(audit, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    status, _, err = audit()
    assert status == 3
    assert "before its first case" in err


def test_an_interrupted_audit_goes_on_where_it_was(audit, tmp_path):
    rows = tmp_path / "out" / "ops.jsonl"
    audit()
    text = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(text[:2]) + text[2][:20])  # one row whole, the second one torn
    status, _, err = audit()
    assert status == 0
    assert "] a" not in err
    assert "[2 of 3] b" in err
    # Rows of other settings are measured.
    status, _, err = audit("--runs", "7")
    assert status == 0
    assert "] a" in err


def test_a_folder_that_cannot_be_written_is_an_error(audit, tmp_path):
    (tmp_path / "out").write_text("")
    status, _, err = audit()
    assert status == 2
    assert "The rows of the audit cannot be written to" in err


def test_the_real_worker(tmp_path, d9m, monkeypatch, forking_python):
    """One op, measured in a real worker process, a fork that has imported torch."""
    monkeypatch.setattr(measurement, "_WORKER", [forking_python, *measurement._WORKER[1:]])
    words = ["--quick", "--ops", "cumsum", "-n", "2", "-o", tmp_path, "--json"]
    status, out, _ = d9m("audit", "ops", *words)
    result = json.loads(out)
    assert status == 0
    assert result["settings"]["torch"] == torch.__version__
    assert [row["op"] for row in result["rows"]] == ["cumsum"]
    assert result["rows"][0]["conditions"]["patched"]["spread"]["distinct"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ops", "idnex_add"], "no op of the audit. Did you mean index_add? The ops are: "),
        (["--device", "nowhere"], "--device is 'nowhere', on which torch"),
    ],
)
def test_of_what_is_not_here_no_folder_is_left(tmp_path, d9m, words, said):
    status, _, err = d9m("audit", "ops", "--quick", "-o", tmp_path / "new" / "folder", *words)
    assert (status, said in err) == (2, True)
    assert list(tmp_path.iterdir()) == []
