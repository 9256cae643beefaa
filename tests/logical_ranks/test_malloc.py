"""The memory of gradients stays with the process, unless the user chooses otherwise."""

from types import SimpleNamespace

import pytest

from lightning_d9m.logical_ranks import malloc


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.a=1")],
)
def test_a_users_choice_of_allocation_stays(monkeypatch, name, value):
    """Otherwise the thresholds are raised, if the C library is glibc."""
    for variable in ("GLIBC_TUNABLES", *malloc._VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    calls = []
    library = SimpleNamespace(mallopt=lambda *call: calls.append(call) or 1)
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda _: library)
    assert malloc.disable_malloc_trim()
    assert calls == [(-1, 2**28), (-3, 2**25)]
    monkeypatch.setenv(name, value)
    assert not malloc.disable_malloc_trim()
    monkeypatch.delenv(name)
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert not malloc.disable_malloc_trim()
    assert len(calls) == 2
