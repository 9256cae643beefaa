"""``d9m audit ops``: it finds what varies, checks torch's documentation, and survives its cases."""

import json
import sys
from pathlib import Path

import pytest
import torch

from lightning_d9m.audit.ops import conditions as audit_conditions
from lightning_d9m.audit.ops import worker_process
from lightning_d9m.audit.ops.cases import Case, Inputs, NotHereError, list_cases
from lightning_d9m.audit.ops.conditions import begin_row, measure_case
from lightning_d9m.audit.ops.report import judge_op
from lightning_d9m.audit.ops.torch_docs import find_documented_lines, read_documentation
from lightning_d9m.errors import SettingError
from lightning_d9m.patches.catalog.catalog import OPS

LINES = read_documentation(torch.use_deterministic_algorithms.__doc__)
DOCSTRINGS = (Path(__file__).parents[2] / "patches" / "catalog" / "docstrings").glob("*.txt")
OTHER_LINES = [line for path in DOCSTRINGS for line in read_documentation(path.read_text())]
FEW = (2, 0.0)


def case_of(make, **changes):
    return Case(**({"op": "an_op", "parameters": {"size": 1}, "make": make} | changes))


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
    row = begin_row(case, "cpu", "float32", LINES) | {"conditions": conditions}
    assert judge_op([row]) == ["As documented."]


def raise_(error):
    def make(inputs):
        raise error

    return make


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RuntimeError("put_ does not have a deterministic implementation, but ..."), "raised"),
        (MemoryError(), "out of memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory"), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory"),
        (NotImplementedError("no kernel for 'aten::x' on this backend"), "missing"),
        (RuntimeError("\"histogram_cpu\" not implemented for 'Half'"), "missing"),
        (NotHereError("The package flash_attn is not installed."), "missing"),
        (ValueError("shapes do not match\nand more"), "failed"),
    ],
)
def test_what_goes_wrong_becomes_the_row(error, outcome):
    conditions = measure_case(case_of(raise_(error)), "cpu", "float32", *FEW)
    assert {entry["outcome"] for entry in conditions.values()} == {outcome}
    for entry in conditions.values():
        assert entry["reason"].startswith(type(error).__name__)
        assert "\n" not in entry["reason"]


def test_an_op_of_another_device_is_a_row_too():
    conditions = measure_case(
        case_of(raise_(AssertionError()), devices=("cuda",)), "cpu", "float32", *FEW
    )
    assert conditions["default"] == {"outcome": "missing", "reason": "The op exists on cuda only."}


def test_the_oracle_sees_the_numbers_that_were_rounded():
    measured = Inputs("cpu", torch.bfloat16).normal(50)
    oracle = Inputs("cpu", torch.float64, torch.bfloat16).normal(50)
    assert torch.equal(measured.double(), oracle)


def test_no_two_cases_share_a_key():
    keys = [case.key(dtype) for case in list_cases() for dtype in case.dtypes]
    assert len(keys) == len(set(keys))


def test_the_catalog_is_covered():
    """But for the entry that speaks of a kind of device; cases may have more exact names."""
    ops = {case.op.replace("conv", "convolution") for case in list_cases()}
    missing = [op.name for op in OPS if not any(name.startswith(op.name) for name in ops)]
    assert missing == ["apple_devices"]


def test_every_line_of_the_documentation_has_a_case():
    """Of the torch that is installed, and of others."""
    known = {name for case in list_cases() for name in case.documented}
    missing = [
        line.text
        for line in (*LINES, *OTHER_LINES)
        if not find_documented_lines((line,), known, (*line.devices, "cpu")[0])
    ]
    assert missing == []


def test_each_documented_case_has_a_line():
    for case in list_cases():
        for name in case.documented:
            devices = ("cpu", "cuda", "mps")
            found = [find_documented_lines((*LINES, *OTHER_LINES), [name], d) for d in devices]
            assert any(found), name


def test_the_documentation_is_read_with_its_conditions():
    put = [line for line in LINES if line.name == "torch.Tensor.put_"]
    assert {(line.kind, line.devices) for line in put} == {
        ("switches", ("cpu",)),
        ("raises", ()),
        ("raises", ("cuda",)),
    }
    modes = [line for line in LINES if line.name == "torch.nn.functional.interpolate"]
    assert "``bicubic``" in modes[0].text
    assert find_documented_lines(LINES, ["torch.nn.AvgPool3d"], "cpu") == ()
    assert len(find_documented_lines(LINES, ["torch.nn.AvgPool3d"], "cuda")) == 1


def test_documentation_without_its_lists_is_refused():
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
        ([], {"outcome": "missing", "reason": "gone"}, RAISED, RAISED, "Not measured: gone"),
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
FACTS = {"torch": "0", "threads": 1, "unknown": []}


@pytest.fixture
def audit(tmp_path, monkeypatch, d9m):
    """Return a function that audits with a worker of that fate; it gives status and output."""

    def run(*words, fate="pass", varies=False):
        worker = tmp_path / "worker.py"
        worker.write_text(FAKE.replace("FATE", fate).replace("VARIES", str(varies)))
        monkeypatch.setattr(worker_process, "_WORKER", [sys.executable, str(worker)])
        monkeypatch.setattr(audit_conditions, "plan_rows", lambda _: (PLAN, FACTS))
        return d9m("audit", "ops", "--quick", "-o", tmp_path / "out", *words)

    return run


def keys_of(path):
    return [json.loads(line)["row"]["key"] for line in path.read_text().split("\n")[1:]]


def test_rows_json_and_markdown_are_left(audit, tmp_path):
    status, out, err = audit()
    assert status == 0
    assert "[2 of 3] b" in err
    assert "Ops: 3, in 3 cases; varied: 0;" in out
    folder = tmp_path / "out"
    assert keys_of(folder / "ops.jsonl") == ["a", "b", "c"]
    assert json.loads((folder / "ops.json").read_text())["ops"][0]["findings"] == ["As documented."]
    assert "| `a` | no | no | no | As documented. |" in (folder / "ops.md").read_text()


def test_a_case_that_ends_its_process_is_a_row(audit):
    status, out, _ = audit("--json", fate="os.kill(os.getpid(), signal.SIGKILL)")
    rows = {row["key"]: row["conditions"]["default"] for row in json.loads(out)["rows"]}
    assert status == 0
    assert list(rows) == ["a", "b", "c"]
    assert rows["b"]["outcome"] == "lost"
    assert "runs out of memory" in rows["b"]["reason"]
    assert rows["c"]["outcome"] == "ran"


@pytest.mark.alone
def test_a_case_that_hangs_is_ended(audit):
    _, out, _ = audit("--json", "--timeout", "1.5", fate="signal.pause()")
    rows = {row["key"]: row["conditions"]["default"] for row in json.loads(out)["rows"]}
    assert "still running after 1.5 s" in rows["b"]["reason"]
    assert rows["c"]["outcome"] == "ran"


def test_a_worker_that_never_begins_is_an_error(audit, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    status, _, err = audit()
    assert status == 2
    assert "before its first case" in err


def test_a_patched_op_that_varies_is_found(audit):
    status, out, _ = audit(varies=True)
    assert status == 1
    assert "the patched op varied: c" in out


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


@pytest.fixture
def forked_worker(monkeypatch, forking_python):
    """Start the real worker as a fork, which has imported torch."""
    command = [forking_python, *worker_process._WORKER[1:]]
    monkeypatch.setattr(worker_process, "_WORKER", command)


def test_the_real_worker(tmp_path, d9m, forked_worker):
    """One op, measured in a real worker process."""
    status, out, _ = d9m("audit", "ops", "--quick", "--ops", "cumsum", "-o", tmp_path, "--json")
    result = json.loads(out)
    assert status == 0
    assert result["settings"]["torch"] == torch.__version__
    assert [row["op"] for row in result["rows"]] == ["cumsum"]
    assert result["rows"][0]["conditions"]["patched"]["spread"]["distinct"] == 1


def test_of_what_cannot_be_no_folder_is_left(tmp_path, d9m):
    """cli/test_refusals.py has the other refusals."""
    words = ["--quick", "-o", tmp_path / "new" / "folder", "--ops", "no_such_op"]
    status, _, err = d9m("audit", "ops", *words)
    assert status == 2
    assert "--ops contains 'no_such_op', which matches no op of the audit" in err
    assert list(tmp_path.iterdir()) == []
