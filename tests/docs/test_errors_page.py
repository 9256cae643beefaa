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


def test_messages_are_followed_to_where_their_text_is():
    """Through variables, lists of lines, attributes and functions."""
    messages = load().read_messages()

    def has(error, words):
        return any(words in text for _, text in messages[error])

    assert has("DriftError", "This run differs from its reference in … on rank …")
    assert has("InexactResumeError", "This run cannot be resumed exactly from the checkpoint")
    assert has("StackDifferenceError", "nondeterminism of this program")
    assert has("RanksDisagreeError", "The ranks are about to do different things")
    assert has("RanksDisagreeError", "The ranks do not agree on what takes part in")
