"""docs/errors.md holds every message of the code, so that a search for one finds it."""

from scripts import load_script

WRITER = load_script("docs/write_errors.py")


def test_the_page_is_up_to_date():
    assert WRITER.PAGE.read_text() == WRITER.format_page(), "run: python docs/write_errors.py"


def test_messages_are_read_with_what_is_filled_in_left_out():
    messages = WRITER.read_messages()
    texts = {module: text for module, text in messages["SettingError"] if "whole number" in text}
    assert "allowed: a whole number from … to …" in texts["lightning_d9m.control.settings"]
    assert sum(map(len, messages.values())) > 100


def test_messages_are_followed_to_where_their_text_is():
    """Through variables, lists of lines, attributes and functions."""
    messages = WRITER.read_messages()

    def has(error, words):
        return any(words in text for _, text in messages[error])

    assert has("DriftError", "This run differs from its reference in … on rank …")
    assert has("InexactResumeError", "This run cannot be resumed exactly from the checkpoint")
    assert has("StackDifferenceError", "nondeterminism of this program")
    assert has("RanksDisagreeError", "The ranks are about to do different things")
    assert has("RanksDisagreeError", "The ranks do not agree on what takes part in")
