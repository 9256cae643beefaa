"""The printed output of runs, of which only what a run decides counts."""

import pytest

from lightning_d9m.tools.comparison.printed_output import compare_printed

LONG = "INFO: a line of a library that begins alike in each run and is longer than is shown: "


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a\nb", "a\nb", ""),
        ("loss 1\nb", "loss 2\nb", "such as 'loss 1' and 'loss 2'"),
        ("a\nb\nc", "a\nc", "such as 'b', which only run 1 printed"),
        ("a\n┏━━┓", "a\n/x/model_checkpoint.py: Checkpoint directory /y exists.\n┏━━┓", ""),
        ("a", "a\nResuming from step 3\nb", "such as 'Resuming from step 3', which only run 2"),
        (f"{LONG}x1", f"{LONG}y2", "n is shown: y2'"),
        ("seconds 17.1\ntook 2", "seconds 18.2\ntook 3", ""),
        ("weights 0x1.7baec0p-5", "weights 0x1.5c8698p-6", "such as 'weights 0x1.7baec0p-5' and"),
        (
            "time series model, mse 0.12",
            "time series model, mse 0.98",
            "series model, mse 0.12' and",
        ),
        ("<A at 0x7f01> in 1.5 s (pid 3)", "<A at 0x7e5c> in 2 s (pid 41)", ""),
        ("2026-11-30 04:18:26,382 a", "2026-12-01 05:01:02,9 a", ""),
        ("elapsed: 3.5\nETA 12\nTime (ms): 7", "elapsed: 4e-05\nETA 9\nTime (ms): 8", ""),
        ("took 2 s, loss 1", "took 3 s, loss 2", "such as '… s, loss 1' and"),
        ("Accuracy: 9912/10000 (99%)", "Accuracy: 9844/10000 (98%)", "such as 'Accuracy: 9912"),
        ("top-1 99% | top-5 100%", "top-1 98% | top-5 100%", "such as 'top-1 99%"),
        ("train: 45%|███ | 3/9\n━━━╸ 45%", "train: 67%|████ | 6/9\n━━━━ 67%", ""),
        ("[==>   ] 45.5%\n45% [=>   ]", "[====> ] 67.2%\n67% [==>  ]", ""),
    ],
)
def test_two_runs(tmp_path, one, other, expected):
    for number, text in enumerate((one, other), start=1):
        (tmp_path / f"run-{number:03d}").mkdir()
        (tmp_path / f"run-{number:03d}" / "output.log").write_text(f"first\n{text}\n")
    found = compare_printed(tmp_path)
    assert expected in found if expected else not found
