"""Lines, alerts and figures meet in one row for each op."""

import json
import runpy
import warnings
from contextlib import closing

import pytest

from lightning_d9m.audit.ops.cases import list_cases
from lightning_d9m.audit.ops.conditions import Budget, begin_row, measure_case
from lightning_d9m.audit.ops.rows import RowFile
from lightning_d9m.cli.main import main
from lightning_d9m.errors import SettingError
from lightning_d9m.lint.join import join_ops, read_records

SPREAD = {"distinct": 7, "runs": 10, "vs": 0.1, "vermv": 1e-7, "vc": 0.25}
STEADY = {**SPREAD, "distinct": 1, "vermv": 0.0, "vc": 0.0}


@pytest.fixture
def records(tmp_path):
    ran = {"outcome": "ran"}
    audit = {
        "rows": [
            {"op": "avg_pool3d_backward", "conditions": {"default": {**ran, "spread": SPREAD}}},
            {"op": "avg_pool3d_backward", "conditions": {"default": {**ran, "spread": STEADY}}},
            {"op": "sum", "conditions": {"default": {**ran, "spread": STEADY}}},
            {"op": "put_", "conditions": {"default": {"outcome": "raised", "reason": "no memory"}}},
        ]
    }
    ended = {"kind": "end", "status": "failed"}
    alert = "does not have a deterministic implementation, but you set ..."
    (tmp_path / "ops.json").write_text(json.dumps(audit))
    (tmp_path / "ledger").mkdir()
    for rank, kernel in enumerate(["avg_pool3d_backward_cuda"] * 3 + ["_histc_cuda with floats"]):
        lines = [{"kind": "header"}, {**ended, "error": f"RuntimeError: {kernel} {alert}"}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "ledger" / f"rank-{rank}.jsonl").write_text(text)
    return tmp_path


def test_one_row_holds_what_was_found_alerted_and_measured(records, scan):
    found = scan("from torch import nn\nnn.AvgPool3d(2)\n", whole=True)
    read = read_records(records / "ops.json") + read_records(records / "ledger")
    rows = {row.op: row for row in join_ops(found, read)}
    assert list(rows) == ["avg_pool3d_backward", "histc"]
    row = rows["avg_pool3d_backward"]
    assert len(row.lines) == 1
    assert row.alerts == 3
    assert (row.worst.distinct, row.worst.vermv) == (7, 1e-7)
    assert rows["histc"].lines == []


@pytest.mark.parametrize(
    ("row", "op", "line"),
    [
        ({"op": "conv2d_backward", "entry": "convolution"}, "convolution", "nn.Conv2d(1, 1, 1)"),
        (
            {"op": "getitem_backward"},
            "index_put_accumulate",
            "torch.zeros(3).index_put((i,), v, accumulate=True)",
        ),
        ({"op": "take_backward"}, "put_", "torch.zeros(3).take(i)"),
        ({"op": "scatter_reduce_mean"}, "scatter_reduce_sum", "x.scatter_reduce(0, i, x, 'mean')"),
    ],
)
def test_what_audit_and_catalogue_name_apart_is_one_row(scan, row, op, line):
    found = scan(f"import torch\nfrom torch import nn\nx = torch.zeros(2)\n{line}\n", whole=True)
    [joined] = join_ops(found, [{**row, "conditions": {"default": {"spread": SPREAD}}}])
    assert (joined.op, len(joined.lines), joined.worst.distinct) == (op, 1, 7)


@pytest.mark.parametrize(
    ("message", "op"),
    [
        ("adaptive_max_pool2d_backward_cuda", "adaptive_max_pool2d_backward"),
        ("upsample_linear1d_backward_out_cuda", "upsample_linear1d_backward"),
        ("nll_loss2d_forward_out_cuda_template", "nll_loss2d"),
        ("_histc_cuda with floating point input", "histc"),
        ("_bincount_cuda", "bincount"),
        ("median CUDA with indices output", "median"),
        ("max_unpooling2d_forward_out", "max_unpool2d"),
        ("max_pool3d_with_indices_backward_cuda", "max_pool3d_backward"),
        ("embedding_bag_backward_cuda_max", "embedding_bag_max_backward"),
        ("ctc_loss_backward_gpu", "ctc_loss_backward"),
        ("cumsum_cuda_kernel", "cumsum"),
        ("quantized_resize_cpu_", "resize_quantized"),
        ("invented_cuda", "invented_cuda"),
    ],
)
def test_torchs_name_of_a_kernel_is_the_catalogues(message, op):
    error = f"RuntimeError: {message} does not have a deterministic implementation, but you set ..."
    assert [row.op for row in join_ops([], [{"kind": "end", "error": error}])] == [op]


def test_an_error_of_another_kind_is_no_alert():
    assert join_ops([], [{"kind": "end", "error": "ValueError: index does not have 3 rows"}]) == []


PROGRAM = """\
import lightning as L
import torch
from lightning_d9m import DeterminismCallback


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def training_step(self, batch, _):
        return torch.zeros(4).put_(batch, self.weight[:2]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
off |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1}
callback = DeterminismCallback(ledger_dir="ledgers")
L.Trainer(callbacks=[callback], **off).fit(Net(), torch.zeros(1, 2, dtype=torch.int64))
"""


def test_a_run_an_audit_and_a_scan_meet_as_they_are_written(tmp_path, monkeypatch, capsys):
    """Nothing is made up: torch ends the training, the audit measures the op, the scan finds it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    with pytest.raises(RuntimeError, match="put_ does not have"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        runpy.run_path("train.py")
    case = next(case for case in list_cases() if case.op == "put_")
    row = begin_row(case, "cpu", "float32", []) | {
        "conditions": measure_case(case, "cpu", "float32", Budget(runs=3, seconds=0.0))
    }
    with closing(RowFile(tmp_path / "ops.jsonl", {"device": "cpu"})) as rows:
        rows.add(row)
    words = ["scan", "train.py", "--with", "ledgers", "--with", "ops.jsonl", "--format", "json"]
    assert main(words) == 1
    [joined] = json.loads(capsys.readouterr().out)["ops"]
    assert joined["op"] == "put_"
    assert joined["lines"] == ["train.py:12:16"]
    assert joined["alerts"] == 1
    spread = row["conditions"]["default"]["spread"]
    assert joined["measured"] == [{name: spread[name] for name in joined["measured"][0]}]


def test_the_command_prints_the_table(records, capsys):
    (records / "net.py").write_text("from torch import nn\nnn.AvgPool3d(2)\n")
    words = ["scan", str(records / "net.py"), "--with", str(records / "ops.json")]
    assert main([*words, "--with", str(records / "ledger")]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["avg_pool3d_backward", "1", "3", "7/10", "1e-07", "0.25"] in rows


@pytest.mark.parametrize("text", [None, "{", "not json\n{}"])
def test_what_is_no_record_is_misuse(tmp_path, text):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingError, match=r"x\.json"):
        read_records(path)
