"""Details of the report's page. tests/cli/test_report.py reads whole reports."""

import pytest

from lightning_d9m.output.html_page import _make_environment


@pytest.mark.parametrize(
    ("sentence", "marked"),
    [
        ("Use `d9m scan`.", "Use <code>d9m scan</code>."),
        ("a < b, `<x>` and `y`", "a &lt; b, <code>&lt;x&gt;</code> and <code>y</code>"),
        ("no command", "no command"),
    ],
)
def test_commands_in_a_sentence_are_code(sentence, marked):
    """What stands between backticks is code, and nothing is taken for HTML."""
    template = _make_environment().from_string("{{ sentence | commands }}")
    assert template.render(sentence=sentence) == marked
