"""glibc keeps freed memory, unless the user chooses otherwise."""

from types import SimpleNamespace

from lightning_d9m.integrations.strategies.sums import malloc
from lightning_d9m.integrations.strategies.sums.malloc import disable_malloc_trim


def test_glibc_keeps_freed_memory_unless_the_user_chooses_otherwise(monkeypatch):
    for variable in ("GLIBC_TUNABLES", *malloc._MALLOC_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    calls = []
    library = SimpleNamespace(mallopt=lambda *call: calls.append(call) or 1)
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda _: library)
    assert disable_malloc_trim()
    assert calls == [(-1, 2**28), (-3, 2**25)]
    for name, value in (("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.a=1")):
        monkeypatch.setenv(name, value)
        assert not disable_malloc_trim()
        monkeypatch.delenv(name)
    del library.mallopt  # as in another C library
    assert not disable_malloc_trim()
