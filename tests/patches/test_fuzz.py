"""Random shapes and layouts: errors not above torch's, and one result for any order of terms.

``benchmarks/patch_fuzz.py`` runs 2,000 of them; a few run here.
"""

import json
from pathlib import Path

import pytest
import torch
from scripts import load_script
from torch import Tensor

FUZZ = load_script("benchmarks/patch_fuzz.py")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "patch-fuzz.json"

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")


def test_random_cases_are_as_exact_as_torch() -> None:
    """Of every op."""
    counts, differences = FUZZ.run_cases(range(60))
    assert differences == []
    assert len(counts) > 10


def test_a_difference_is_found() -> None:
    """Of values, shape and dtype, and of the bits if the terms are shuffled."""

    def make(size: int = 3, factor: float = 1.0):
        return lambda dtype: torch.full((size,), factor, dtype=dtype)

    def find(last: object, shuffle: object = None) -> str | None:
        answers = [make(), make(), last]

        def compute(dtype: torch.dtype) -> Tensor:
            return answers.pop(0)(dtype)

        return FUZZ.find_difference(FUZZ.Case("op", compute, shuffle), torch.float32)

    for wrong in (make(2), make(factor=1 + 1e-5), lambda _: torch.ones(3, dtype=torch.float16)):
        assert find(wrong)
    assert find(make(), make(factor=1 + 1e-5))
    assert find(make(), make()) is None


def test_the_recorded_run_found_no_difference() -> None:
    """Of 2,000 cases."""
    record = json.loads(RESULTS.read_text())
    assert record["cases"] == 2000
    assert record["differences"] == []
