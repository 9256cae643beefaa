"""Comments that suppress findings: ``# d9m: ignore[RULE] reason``."""

import io
import re
import tokenize
from dataclasses import dataclass, field

from lightning_d9m.lint.rules import RULES

_COMMENT = re.compile(r"#\s*d9m:\s*(?P<verb>[\w-]*)\s*(?:\[(?P<rules>[^\]]*)\])?\s*(?P<reason>.*)")


@dataclass
class Suppression:
    """A comment that suppresses findings.

    Attributes:
        line: The line of the comment.
        column: From 0, in characters.
        end_column: The column behind it.
        rules: The named rules.
        problem: An error in the comment; empty for a valid one.
        target: The line whose findings it suppresses.
        used: The rules of the findings that it suppressed.
    """

    line: int
    column: int
    end_column: int
    rules: tuple[str, ...]
    problem: str
    target: int
    used: set[str] = field(default_factory=set)


def read_suppressions(text: str) -> list[Suppression]:
    """Return the suppressions of a valid text; one alone on its line applies to the next code."""
    lines = text.split("\n")
    found = []
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return []
    for token in tokens:
        match = _COMMENT.match(token.string) if token.type == tokenize.COMMENT else None
        if match is None:
            continue
        row, column = token.start
        target = row
        if not lines[row - 1][:column].strip():
            while target < len(lines) and lines[target].strip()[:1] in {"", "#"}:
                target += 1
            target += 1
        rules = tuple(word.strip() for word in (match["rules"] or "").split(",") if word.strip())
        problem = _find_problem(match["verb"], rules, match["reason"])
        found.append(Suppression(row, column, token.end[1], rules, problem, target))
    return found


def _find_problem(verb: str, rules: tuple[str, ...], reason: str) -> str:
    if verb != "ignore":
        return f"{verb!r} is not a verb of d9m; allowed: ignore."
    if not rules:
        return "It does not name a rule."
    if unknown := [rule for rule in rules if rule not in RULES]:
        return f"The rule {unknown[0]!r} does not exist."
    return "" if reason.strip() else "It does not give a reason."
