"""A hook acts after one module's first import, and leaves no trace in it."""

import importlib
import inspect
import sys

import pytest

from lightning_d9m.lightning.autoload.entry_points import call_after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make a module that can be imported; give its name."""
    (tmp_path / "hooked_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "hooked_module"
    sys.modules.pop("hooked_module", None)


def test_acts_once_after_the_import(module):
    seen = []
    call_after_import(module, lambda: seen.append(sys.modules[module].value))
    assert seen == []
    finders = len(sys.meta_path)
    loaded = importlib.import_module(module)
    assert seen == [1]
    assert len(sys.meta_path) == finders - 1
    importlib.reload(loaded)
    assert seen == [1]


def test_the_module_keeps_its_own_loader(module):
    call_after_import(module, lambda: None)
    loaded = importlib.import_module(module)
    assert loaded.__loader__ is loaded.__spec__.loader
    assert type(loaded.__loader__).__name__ == "SourceFileLoader"
    assert inspect.getsource(loaded) == "value = 1\n"


def test_acts_at_once_when_it_is_imported_already(module):
    importlib.import_module(module)
    seen = []
    call_after_import(module, lambda: seen.append(1))
    assert seen == [1]
