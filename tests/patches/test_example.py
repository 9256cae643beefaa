"""The segmentation example is bit-exact on a CPU."""

import subprocess
from pathlib import Path

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
