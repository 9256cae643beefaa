"""The tables show what was measured where it belongs."""

import math

from lightning_d9m.tools.output.html_page import LoggedDifferences


def test_logged_values_are_shown_where_they_differ_first_and_most():
    values = LoggedDifferences()
    same = [(9, -0.0, -0.0), (18, math.nan, math.nan)]
    pairs = [(9, 0.5, 0.5), (18, 0.0, -0.0), (27, 1.0, 0.75), (36, 1.0, math.inf), (45, 2.0, 2.25)]
    for name, series in {"a": same, "loss": pairs}.items():
        for step, one, other in series:
            values.note(step, {name: one}, {name: other})
    values.note(9, {}, {"b": 3.0})
    assert values.rows == {
        "a": ["equal", "", "", None, ""],
        "loss": [18, "0.0", "-0.0", 0.25, 27],
        "b": [9, "missing", "3.0", None, ""],
    }
