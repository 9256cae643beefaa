"""The benchmark of the callback times functions by name; each must exist."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "callback.py"


def test_each_timed_function_exists():
    spec = importlib.util.spec_from_file_location("callback_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.ENTRANCES
    for owner, names in module.ENTRANCES.items():
        assert set(names) <= set(vars(owner)), owner
