"""Lines, alerts and figures meet in one row for each op."""

import json

import pytest

from lightning_d9m.adapters.cli import main
from lightning_d9m.errors import SettingError
from lightning_d9m.scan.join import join_ops, name_alert, read_records

SPREAD = {"distinct": 7, "runs": 10, "vs": 0.1, "vermv": 1e-7, "vc": 0.25}
STEADY = {**SPREAD, "distinct": 1, "vermv": 0.0, "vc": 0.0}


@pytest.fixture
def records(tmp_path):
    ran = {"outcome": "ran"}
    audit = {
        "rows": [
            {"op": "avg_pool3d_backward", "arms": {"default": {**ran, "spread": SPREAD}}},
            {"op": "avg_pool3d_backward", "arms": {"default": {**ran, "spread": STEADY}}},
            {"op": "sum", "arms": {"default": {**ran, "spread": STEADY}}},
            {"op": "put_", "arms": {"default": {"outcome": "raised", "reason": "no memory"}}},
        ]
    }
    alert = "avg_pool3d_backward_cuda does not have a deterministic implementation, but ..."
    (tmp_path / "ops.json").write_text(json.dumps(audit))
    (tmp_path / "ledger").mkdir()
    lines = [{"kind": "header"}, {"kind": "alert", "message": alert, "count": 3}]
    lines += [{"kind": "alert", "op": "histc"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "ledger" / "rank-0.jsonl").write_text(text)
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


def test_flat_rows_of_other_arms_do_not_count(tmp_path):
    rows = [
        {"op": "topk", "arm": "default", **SPREAD},
        {"op": "topk", "arm": "ours", **STEADY},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [row] = join_ops([], read_records(path))
    assert [figures.distinct for figures in row.measured] == [7]


@pytest.mark.parametrize(
    ("row", "op", "line"),
    [
        ({"op": "conv2d_backward", "entry": "convolution"}, "convolution", "nn.Conv2d(1, 1, 1)"),
        (
            {"op": "index_put_accumulate", "entry": "index_put_accumulate"},
            "index_put",
            "torch.zeros(3).index_put((i,), v, accumulate=True)",
        ),
        ({"op": "take_backward"}, "put_", "torch.zeros(3).take(i)"),
        ({"op": "scatter_reduce_mean"}, "scatter_reduce_sum", "x.scatter_reduce(0, i, x, 'mean')"),
    ],
)
def test_what_audit_and_catalogue_name_apart_is_one_row(scan, row, op, line):
    found = scan(f"import torch\nfrom torch import nn\nx = torch.zeros(2)\n{line}\n", whole=True)
    [joined] = join_ops(found, [{**row, "arms": {"default": {"spread": SPREAD}}}])
    assert (joined.op, len(joined.lines), joined.worst.distinct) == (op, 1, 7)


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("adaptive_max_pool2d_backward_cuda", "adaptive_max_pool2d_backward"),
        ("upsample_linear1d_backward_out_cuda", "upsample_linear1d_backward"),
        ("nll_loss2d_forward_out_cuda_template", "nll_loss2d"),
        ("_histc_cuda", "histc"),
        ("_bincount_cuda", "bincount"),
        ("max_unpooling2d_forward_out", "max_unpooling2d_forward_out"),
        ("ctc_loss_backward_gpu", "ctc_loss_backward"),
    ],
)
def test_torchs_name_of_a_kernel_is_the_catalogues(kernel, op):
    message = f"{kernel} does not have a deterministic implementation, but you set ..."
    assert name_alert({"message": message}) == op


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
