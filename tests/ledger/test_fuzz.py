"""Some mutations of a ledger; benchmarks/fuzz_ledger.py makes many more."""

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("benchmarks/fuzz_ledger.py")


def test_mutations_are_refused_or_judged_right(script, tmp_path):
    outcomes, failures = script.fuzz(120, 3, tmp_path)
    assert failures == []
    kinds = {(how, outcome) for how, outcome in outcomes}
    assert {("bytes", "refused"), ("forged", "refused"), ("forged", "different")} <= kinds


def test_a_wrong_verdict_is_found(script, tmp_path, monkeypatch):
    equal = type("Comparison", (), {"verdict": "equal"})
    monkeypatch.setattr(script, "compare_ledgers", lambda *_: equal)
    _, failures = script.fuzz(20, 3, tmp_path)
    assert {failure["wrong"] for failure in failures} == {"different contents are called equal"}
