"""docs/errors.md holds every message of the code, so that a search for one finds it."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "write_errors.py"


def load():
    spec = importlib.util.spec_from_file_location("write_errors", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    writer = load()
    assert writer.PAGE.read_text() == writer.format_page(), "run: python docs/write_errors.py"


def test_messages_are_read_with_what_is_filled_in_left_out():
    messages = load().read_messages()
    texts = {module: text for module, text in messages["SettingError"] if "whole number" in text}
    assert "allowed: a whole number from … to …" in texts["lightning_d9m.control.settings"]
    assert sum(map(len, messages.values())) > 100
