"""Comments that suppress findings: ``# d9m: ignore[RULE] reason``."""

import io
import re
import tokenize
from dataclasses import dataclass, field

from lightning_d9m.lint.rules import RULES

_COMMENT = re.compile(r"#\s*d9m:\s*(?P<verb>[\w-]*)\s*(?:\[(?P<rules>[^\]]*)\])?\s*(?P<reason>.*)")


@dataclass
class Suppression:
    """One comment.

    Attributes:
        line: Where it stands.
        column: From 0, in characters.
        end_column: The column behind it.
        rules: What it names.
        problem: What is wrong with it; empty for a good one.
        target: The line whose findings it suppresses.
        used: The rules that it suppressed something of.
    """

    line: int
    column: int
    end_column: int
    rules: tuple[str, ...]
    problem: str
    target: int
    used: set[str] = field(default_factory=set)


def read_suppressions(text: str) -> list[Suppression]:
    """Return the suppressions of a text that parses; one alone on its line is for the next code."""
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
        return f"{verb!r} is nothing that d9m knows; allowed: ignore."
    if not rules:
        return "It names no rule."
    if unknown := [rule for rule in rules if rule not in RULES]:
        return f"There is no rule {unknown[0]!r}."
    return "" if reason.strip() else "It gives no reason."
