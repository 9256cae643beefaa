"""Removes secrets from text that leaves this machine: tokens in URLs, options and variables.

A name is secret by its last word, so that ``HF_TOKEN`` is and ``max_tokens`` is not.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

REMOVED = "[removed]"
_NAME = (
    r"(?:(?:[\w-]*[_-])?(?:token|secret|passw(?:or)?d|passphrase|credentials?|auth|signature|sig"
    r"|key|apikey)|[\w-]+[_-]pwd)"  # not PWD, the working folder
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# A shorter value of a variable occurs in other words.
_SHORTEST = 6
# What stands before a secret is kept; the secret itself is the last group.
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(\b[a-z][\w+.-]*://)([^\s/@'\"]+)(?=@)",  # user:password@host
        rf"([?&;]{_NAME}=)([^\s&#'\"]+)",  # of a URL's query
        rf"(--?{_NAME}(?:=| +))('[^']*'|\"[^\"]*\"|[^\s'\"]+)",  # an option
        r"(\bauthorization: *(?:bearer|basic) +)([^\s'\"]+)",
        # Tokens that common services give out, by the letters that they begin with.
        r"()\b((?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-|AKIA)[\w-]{12,})",
    )
)
_ASSIGNED = re.compile(rf"((?<![\w-]){_NAME}=)('[^']*'|\"[^\"]*\"|[^\s'\"&]+)", re.IGNORECASE)
_QUOTED = re.compile(rf"({_NAME}['\"]?\]? *[:=] *)[rbf]?('[^']+'|\"[^\"]+\")", re.IGNORECASE)


class SecretFilter:
    """Replaces secrets in text.

    Args:
        variables: The environment; the values of variables with secret names are secrets wherever
            they occur.

    Attributes:
        count: How many secrets were replaced.
    """

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        self.count = 0
        values = {
            value
            for name, value in variables.items()
            if _SECRET_NAME.fullmatch(name) and len(value) >= _SHORTEST
        }
        longest_first = sorted(values, key=lambda value: (-len(value), value))
        known = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._patterns = (re.compile(f"()(?:{known})"), *_PATTERNS)

    def clean(self, text: str) -> str:
        """Return a value or command without secrets; ``token=abc`` is one, as for Hydra."""
        return self._replace(text, _ASSIGNED)

    def clean_code(self, text: str) -> str:
        """Return a line of source without secrets: a text that is given to a secret name is one."""
        return self._replace(text, _QUOTED)

    def clean_values(self, value: Any) -> Any:
        """Return JSON types without secrets in their texts; keys are kept."""
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, Mapping):
            return {key: self.clean_values(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean_values(inner) for inner in value]
        return value

    def _replace(self, text: str, further: re.Pattern[str]) -> str:
        def replace(found: re.Match[str]) -> str:
            if REMOVED in found[0]:
                return found[0]
            self.count += 1
            return f"{found[1]}{REMOVED}"

        for pattern in (*self._patterns, further):
            text = pattern.sub(replace, text)
        return text
