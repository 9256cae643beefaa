"""Comments that suppress findings: ``# d9m: ignore[RULE] reason``."""

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lightning_d9m.lint.rules import CODE, RULES, Finding

_MARK = re.compile(r"#\s*d9m:")
_COMMENT = re.compile(r"#\s*d9m:\s*(?P<verb>[\w-]*)\s*(?:\[(?P<rules>[^\]]*)\])?\s*(?P<reason>.*)")


@dataclass(frozen=True)
class _Suppression:
    """A comment that suppresses findings.

    Attributes:
        comment: A finding at the place of the comment, for what is wrong with it.
        rules: The named rules.
        problem: An error in the comment; empty for a valid one.
        target: The line whose findings it suppresses.
    """

    comment: Finding
    rules: tuple[str, ...]
    problem: str
    target: int


def suppress(
    findings: Iterable[Finding], text: str, path: str, rules: frozenset[str]
) -> Iterator[Finding]:
    """Yield the findings that no comment suppresses, and findings about the comments."""
    suppressions = list(_read_suppressions(text, path)) if _MARK.search(text) else []
    used: set[tuple[int, str]] = set()
    for finding in findings:
        matching = {
            (number, finding.rule)
            for number, one in enumerate(suppressions)
            if not one.problem
            and finding.rule in one.rules
            and finding.line <= one.target <= finding.end_line
        }
        used |= matching
        if not matching:
            yield finding
    for number, one in enumerate(suppressions):
        unused = [rule for rule in one.rules if rule in rules and (number, rule) not in used]
        if one.problem:
            yield replace(one.comment, reason=one.problem)
        elif unused:
            reason = f"It suppresses {', '.join(unused)}, which is not found here."
            fix = RULES["D9M003"].fix
            yield replace(one.comment, rule="D9M003", reason=reason, fix=fix)


def _read_suppressions(text: str, path: str) -> Iterator[_Suppression]:
    """Yield the suppressions of a valid text; one alone on its line applies to the next code."""
    lines = text.split("\n")
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return
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
        comment = Finding.at(
            path,
            "D9M002",
            (row, column + 1),
            (row, token.end[1] + 1),
            code=lines[row - 1][column:][:CODE],
        )
        problem = _find_problem(match["verb"], rules, match["reason"])
        yield _Suppression(comment, rules, problem, target)


def _find_problem(verb: str, rules: tuple[str, ...], reason: str) -> str:
    if verb != "ignore":
        return f"{verb!r} is not a verb of d9m; allowed: ignore."
    if not rules:
        return "It does not name a rule."
    if unknown := [rule for rule in rules if rule not in RULES]:
        return f"The rule {unknown[0]!r} does not exist."
    return "" if reason.strip() else "It does not give a reason."
