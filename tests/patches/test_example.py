"""The segmentation example is bit-exact on a CPU, and what it is made of is what is patched."""

import subprocess
from pathlib import Path

import pytest
import torch
from patches.cases import deterministic_algorithms
from patches.construction import judged
from scripts import load_script

from lightning_d9m.patches.catalog.catalog import select_ops
from lightning_d9m.patches.registration import patches_applied

EXAMPLE = Path(__file__).parents[2] / "examples" / "segmentation.py"


def test_two_runs_agree_bit_for_bit(tmp_path: Path, forking_python: str) -> None:
    """One epoch on few scenes: every op of it runs forward and backward."""
    training = [forking_python, EXAMPLE, "--epochs", "1", "--scenes", "32", "--accelerator", "cpu"]
    repeat = [forking_python, "-m", "lightning_d9m", "repeat", "-n", "2", "-o", tmp_path / "runs"]
    done = subprocess.run(
        [*repeat, "--", *training],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "equal: the fits of 2 runs agree bit for bit" in done.stdout


def test_it_trains_on_patched_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the ops that torch refuses on CUDA goes through its replacement."""
    example = load_script(EXAMPLE)
    model = example.SegmentationNet()
    images, masks = example.make_scenes(2, seed=0)[:]
    ops = select_ops(torch.__version__)
    flagged, patched = deterministic_algorithms(), patches_applied("CPU")
    with judged(ops, monkeypatch) as (judge, ran), flagged, patched:
        torch.nn.functional.nll_loss(model(images), masks, model.weights).backward()
    assert ran == {
        "lightning_d9m.patches.kernels.separable:adaptive_avg_pool2d_backward",
        "lightning_d9m.patches.kernels.separable:upsample_bicubic2d_backward",
        "lightning_d9m.patches.kernels.separable:upsample_bilinear2d_backward",
        "lightning_d9m.patches.kernels.reductions:nll_loss2d_forward",
        "lightning_d9m.patches.kernels.max_pool:adaptive_max_pool2d_backward",
        "lightning_d9m.patches.kernels.separable:reflection_pad2d_backward",
    }
    assert judge.refused == set()
