"""A suppression needs a rule and a reason, and something to suppress."""

import pytest

LINE = "import random\nrandom.seed()"


def test_a_good_one_silences_its_rule_on_its_line(scan):
    assert scan(f"{LINE}  # d9m: ignore[D9M204] a game, not a training\n") == []


def test_one_alone_on_its_line_is_for_the_next_code(scan):
    source = "import random\n# d9m: ignore[D9M204] a game\n\nrandom.seed(\n)\n"
    assert scan(source) == []


def test_one_within_a_call_of_several_lines_counts(scan):
    assert scan("import random\nrandom.seed(\n    None  # d9m: ignore[D9M204] a game\n)\n") == []


@pytest.mark.parametrize(
    ("comment", "rules"),
    [
        ("# d9m: ignore[D9M204]", ["D9M002", "D9M204"]),
        ("# d9m: ignore a reason", ["D9M002", "D9M204"]),
        ("# d9m: ignore[D9M999] a reason", ["D9M002", "D9M204"]),
        ("# d9m: noqa[D9M204] a reason", ["D9M002", "D9M204"]),
        ("# d9m: ignore[D9M301] a reason", ["D9M003", "D9M204"]),
        ("# d9m: ignore[D9M204, D9M301] a reason", ["D9M003"]),
    ],
)
def test_a_bad_one_is_itself_found(scan, comment, rules):
    assert sorted(rule for _, rule in scan(f"{LINE}  {comment}\n")) == rules


def test_one_in_a_string_is_none(scan):
    assert scan("x = '# d9m: ignore[D9M204] reason'\n") == []
