"""A run that compiles says what the compiler's code depends on."""

import pytest
from torch._inductor import config

from lightning_d9m.ledger import compiler
from lightning_d9m.ledger.compiler import capture_compiler
from lightning_d9m.ledger.stack import stack_differences


@pytest.fixture
def graphs(monkeypatch, tmp_path):
    """Return the folder of compiled graphs of an empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "fxgraph"


def test_the_cache_is_cold_until_there_is_a_graph(graphs):
    assert capture_compiler()["compiler.cache"] == "cold"
    graphs.mkdir()
    assert capture_compiler()["compiler.cache"] == "cold"
    (graphs / "ab").mkdir()
    assert capture_compiler()["compiler.cache"] == "warm"
    with config.patch(force_disable_caches=True):
        assert capture_compiler()["compiler.cache"] == "disabled"


def test_settings_are_compared_and_the_cache_is_not(graphs):
    first = capture_compiler()
    (graphs / "ab").mkdir(parents=True)
    with config.patch(max_autotune=not config.max_autotune):
        found = stack_differences(first, capture_compiler())
    assert [entry[0] for entry in found] == ["flag.inductor.max_autotune"]


def test_the_compiler_of_cxx_is_named_where_there_is_one(monkeypatch):
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "echo")
    compiler._read_cxx.cache_clear()
    assert "echo" in compiler._read_cxx()
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "no-such-program")
    compiler._read_cxx.cache_clear()
    assert compiler._read_cxx() is None
    compiler._read_cxx.cache_clear()
