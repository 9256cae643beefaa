"""The output that runs of a command printed, compared line by line."""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path

_MOST_PRINTED, _MOST_SHOWN, _MOST_COMMON = 2**20, 60, 20
# The time of SequenceMatcher grows with the square of the number of lines. Of that many lines in
# which two runs differ, one is enough.
_MOST_LINES = 2000
# Lines of progress; a percentage that is not beside a bar may be a result.
_PROGRESS = re.compile(
    r"it/s|s/it|%\||%\s*\[[=#> .-]{3}|(?:[=#━█╸]{3}|[=#> .-]{3}\])\s*\d+(?:\.\d+)?\s?%"
)
# Addresses, but not floats in hexadecimal; numbers of processes; dates, times and sizes.
_VARIES = re.compile(
    r"(?i:0x[0-9a-f]+(?![0-9a-f.])|\bpid\b\W*\d+|\d{4}-\d\d-\d\d|\d+:\d\d[\d:.,]*"
    r"|\d+(?:\.\d+)?(?:e[+-]?\d+)?\s?(?:[munµ]?s|sec(?:ond)?s?|min(?:ute)?s?|[kmg]i?b)\b"
    # A number beside a word that says it is measured, and perhaps its unit.
    r"|\b(?:time|took|elapsed|sec(?:ond)?s?|duration|eta|throughput|speed|latency)\b"
    r"(?:\s?[(\[][\w/]+[)\]])?\W*\d[\w.+-]*)"
)
# A library says so of what an earlier run left, such as a folder of checkpoints.
_EXISTS = re.compile(r"[/\\].*\b(?:exists?|not empty|overwr\w+|already)\b", re.IGNORECASE)


def compare_printed(output: Path) -> str:
    """Return the first line that a run printed and run 1 did not, or otherwise; empty without one.

    Times, sizes and addresses do not count, nor lines of progress and blanks: a progress bar writes
    them over itself. Nor does what only a later run says of files that exist.

    Args:
        output: The folder with the folder of each run.
    """
    first, *others = ([*_read(log)] for log in sorted(output.glob("run-*/output.log")))
    for number, lines in enumerate(others, start=2):
        for one, other in _list_differences(first, lines):
            if one and other:
                shared = _find_first(one, other) - _MOST_COMMON
                return f"such as {_cut(one, shared)!r} and {_cut(other, shared)!r}"
            if one or not _EXISTS.search(other):
                which = 1 if one else number
                return f"such as {_cut(one or other)!r}, which only run {which} printed"
    return ""


def _read(log: Path) -> Iterator[str]:
    with log.open(errors="replace") as file:
        # A program may print the path of its run, whose folder has the run's number.
        text = file.read(_MOST_PRINTED).replace(log.parent.name, "run")
    for line in map(str.strip, text.splitlines()):
        if line and not _PROGRESS.search(line):
            yield _VARIES.sub("…", line)


def _list_differences(one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the lines that differ in pairs; a line that one run lacks has an empty counterpart."""
    # Most of two outputs is equal at the beginning, which need not be matched.
    start = _find_first(one, other)
    ours, theirs = (lines[start : start + _MOST_LINES] for lines in (one, other))
    for what, low, high, left, right in SequenceMatcher(None, ours, theirs).get_opcodes():
        if what != "equal":
            yield from zip_longest(ours[low:high], theirs[left:right], fillvalue="")


def _find_first(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the first place at which two texts, or their lines, differ."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (left, right) in pairs if left != right), min(len(one), len(other)))


def _cut(line: str, start: int = 0) -> str:
    """Return the part of a line that is shown; it begins at a place, if the line is long."""
    start = start if start > 0 and len(line) > _MOST_SHOWN else 0
    return "..." * (start > 0) + line[start : start + _MOST_SHOWN]
