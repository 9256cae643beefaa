"""The segmentation example runs on a CPU."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "segmentation.py"


def test_the_example_trains(tmp_path: Path) -> None:
    """One epoch on few scenes: every op of it runs forward and backward."""
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--epochs", "1", "--scenes", "64", "--accelerator", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "validation accuracy: " in done.stdout
