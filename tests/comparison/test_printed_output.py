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
