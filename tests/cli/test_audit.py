"""``d9m audit ops``: it finds what varies, and survives its cases."""

import json

import pytest
import torch

from lightning_d9m.ops.patches.catalog.catalog import OPS
from lightning_d9m.tools.audit.ops import measurement
from lightning_d9m.tools.audit.ops.cases import Case, Inputs, list_cases
from lightning_d9m.tools.audit.ops.measurement import measure_case
from lightning_d9m.tools.audit.ops.report import CONDITIONS, judge_op

FEW = (2, 0.0)


@pytest.mark.alone
def test_the_accumulating_index_put_of_two_threads_is_caught(two_threads):
    """2,000,000 values into 50 bins: it varies by default, and in no other condition."""
    case = next(
        case
        for case in list_cases()
        if case.op == "index_put_accumulate" and case.parameters["values"] == 2_000_000
    )
    for _ in range(5):  # until the threads have raced
        conditions = measure_case(case, "cpu", "float32", 4, 600)
        if conditions["default"]["spread"]["distinct"] > 1:
            break
    outputs = {condition: entry["spread"]["distinct"] for condition, entry in conditions.items()}
    assert outputs.pop("default") > 1
    assert outputs == {"deterministic": 1, "patched": 1, "oracle": 1}
    raced, *others = (entry["spread"]["runs"] for entry in conditions.values())
    assert 2 <= raced <= 4
    assert others == [4, 4, 4]
    assert conditions["default"]["spread"]["vermv"] > 0
    assert conditions["default"]["spread"]["vc"] > 0
    assert conditions["patched"]["ratio"] > 0
    assert judge_op([{"conditions": conditions}]) == []


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


def test_the_cases_are_those_of_the_catalog():
    keys = [case.key(dtype) for case in list_cases() for dtype in case.dtypes]
    assert len(keys) == len(set(keys))
    # But for the entry that speaks of a kind of device; cases may have more exact names.
    ops = {case.op.replace("conv", "convolution") for case in list_cases()}
    missing = [op.name for op in OPS if not any(name.startswith(op.name) for name in ops)]
    packages = ("torchvision_", "flex_attention", "mamba_", "torch_scatter", "triton_")
    assert [name for name in missing if not name.startswith(packages)] == ["apple_devices"]


def ran(distinct):
    return {"outcome": "ran", "spread": {"distinct": distinct}}


RAISED = {"outcome": "raised", "reason": "RuntimeError: refused"}


@pytest.mark.parametrize(
    ("default", "deterministic", "patched", "finding"),
    [
        (ran(3), ran(1), ran(1), None),
        (ran(2), ran(2), ran(1), "and does not raise"),
        (ran(3), RAISED, RAISED, "Torch refuses it with the flag on."),
        (ran(2), RAISED, ran(1), "and the patched op gave one output"),
        ({"outcome": "failed", "reason": "gone"}, RAISED, RAISED, "Not measured: gone"),
    ],
)
def test_what_an_op_does_with_the_flag_is_said(default, deterministic, patched, finding):
    conditions = {"default": default, "deterministic": deterministic, "patched": patched}
    found = judge_op([{"conditions": conditions}])
    assert (found == []) if finding is None else (finding in found[0])


PLAN = [(Case(op, {}, lambda: torch.zeros(1)), "float32") for op in "abc"]


@pytest.fixture
def audit(tmp_path, monkeypatch, d9m):
    """Return a function that audits three cases; it gives status and output."""

    def run(*words, varies=False, fate=lambda: None, broken=None):
        def measure(case, *_):
            if case.op == "b":
                fate()
            spread = {"distinct": 1 + (varies and case.op == "c"), "runs": 2, "vs": None}
            spread |= {"vermv": 0.0, "vc": 0.0, "ulps": 0}
            entry = {"outcome": "ran", "microseconds": 1.0, "ratio": 1.0, "spread": spread}
            failed = {"outcome": "failed", "reason": "RuntimeError: no kernel"}
            return {name: failed if name in (broken or ()) else entry for name in CONDITIONS}

        monkeypatch.setattr(measurement, "measure_case", measure)
        facts = {"torch": "0", "threads": torch.get_num_threads()}
        monkeypatch.setattr(measurement, "plan_rows", lambda _: (PLAN, facts))
        return d9m("audit", "ops", "--quick", "-o", tmp_path / "out", *words)

    return run


def test_rows_json_and_markdown_are_left(audit, tmp_path):
    """Also of a patched op that varies."""
    status, out, err = audit(varies=True)
    assert status == 1
    assert "[2 of 3] b" in err
    assert "Ops: 3, in 3 cases; varied: 1;" in out
    assert "the patched op varied: c" in out
    folder = tmp_path / "out"
    rows = map(json.loads, (folder / "ops.jsonl").read_text().splitlines()[1:])
    assert [row["row"]["op"] for row in rows] == ["a", "b", "c"]
    page = (folder / "ops.md").read_text()
    assert "| `a` | no | no | no |  |" in page
    assert "| `c` | yes | yes | yes | Varies although deterministic" in page
    assert "|  | patched | 2 | 2 |  | 0 | 0 |  | 1 | 1 |" in page
    result = json.loads((folder / "ops.json").read_text())
    assert result["ops"][0]["findings"] == []


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (["patched"], "the patched op failed: a() float32: RuntimeError: no kernel"),
        (CONDITIONS, "no patched op ran, so nothing was measured"),
    ],
)
def test_what_failed_is_no_success(audit, broken, said):
    status, out, _ = audit(broken=broken)
    assert (status, said in out) == (1, True)


def interrupt():
    raise KeyboardInterrupt


def test_an_interrupted_audit_goes_on_where_it_was(audit, tmp_path):
    """Of a row that was cut the case is measured again."""
    status, _, err = audit(fate=interrupt)
    assert (status, "] c" in err) == (130, False)
    with (tmp_path / "out" / "ops.jsonl").open("a") as file:
        file.write('\n{"settings": {')
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


def test_an_op_is_measured(tmp_path, d9m):
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
