"""The benchmark of the callback times functions by name; each must exist."""

from scripts import load_script


def test_each_timed_function_exists():
    module = load_script("benchmarks/callback.py")
    assert module.ENTRANCES
    for owner, names in module.ENTRANCES.items():
        assert set(names) <= set(vars(owner)), owner
