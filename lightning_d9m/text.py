"""Untrusted values as printable text, since a ledger may hold any name; and tables of texts."""

import re
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path

# Shown of the 32 digits of a digest: enough to tell runs apart, and tables fit 80 columns.
_DIGEST = re.compile(r"^([0-9a-f]{16})[0-9a-f]{16}(?= |\Z)")


def quote(value: object, limit: int = 80) -> str:
    r"""Return a value as one line of printable characters, cut at ``limit``.

    A name in a ledger is untrusted and must not move the cursor of a terminal.

    >>> print(quote("layers.0.weight"), quote("red\x1b[31m"), quote(None))
    'layers.0.weight' 'red\x1b[31m' None
    """
    # Cut before it is escaped, because a name in a ledger may be long. `repr` lets through what is
    # printable, and `isprintable` is False for marks that turn the direction of a line.
    if isinstance(value, str):
        text = value[: limit + 1]
        line = repr(text) if text.isprintable() else ascii(text)
    else:
        line = reprlib.repr(value)
    return line if len(line) <= limit + 2 else line[: limit - 1] + "..."


def escape(value: object, limit: int = 80) -> str:
    """Return a value as ``quote`` does, without the quotes around a printable string.

    >>> escape("layers.0.weight"), escape(3)
    ('layers.0.weight', '3')
    """
    if isinstance(value, str) and value.isprintable() and len(value) <= limit:
        return value
    return quote(value, limit)


def printable(line: str) -> str:
    r"""Return a whole line, with escapes for characters that move the cursor or turn the direction.

    >>> print(printable("a \x1b[31m"))
    a \x1b[31m
    """
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line)


def describe_moment(moment: str, epoch: int, step: int) -> str:
    """Return a moment in a few words.

    >>> describe_moment("epoch", 3, 92), describe_moment("initial", 0, 0)
    ('epoch 3 (step 92)', 'the initial state')
    """
    if moment == "initial":
        return "the initial state"
    if moment in ("final", "exception"):
        which = "final state" if moment == "final" else "state at the exception"
        return f"the {which} (epoch {epoch}, step {step})"
    if moment.startswith("saved "):
        return f"{escape(moment)} (file {epoch + 1} of this name)"
    prefix = "" if moment == "epoch" else f"{escape(moment)}, " if moment else ""
    return f"{prefix}epoch {epoch} (step {step})"


def cut_digests(values: Sequence[str]) -> list[str]:
    """Return values that are shown together, with each digest cut to one length.

    If two different values would look equal, all are returned as they are.

    >>> cut_digests(["0123456789abcdef" * 2, "none"])
    ['0123456789abcdef', 'none']
    >>> cut_digests(["0" * 32, "0" * 31 + "1"])
    ['00000000000000000000000000000000', '00000000000000000000000000000001']
    """
    cut = [_DIGEST.sub(r"\1", value) for value in values]
    return cut if len(set(cut)) == len(set(values)) else list(values)


def describe_pair(expected: str, actual: str, *, verbose: bool = False) -> list[str]:
    """Return what a run has and what its reference has, digests cut and numbers as decimals.

    Args:
        expected: The value of the reference: a digest, or a number from ``float.hex()``.
        actual: The value of this run.
        verbose: Whether to show whole digests, and the bits of numbers.
    """
    shown = [expected, actual] if verbose else cut_digests([expected, actual])
    return [describe_value(value, bits=verbose) for value in shown]


def describe_value(value: str, *, bits: bool = False) -> str:
    """Return a digest unchanged, and a number from ``float.hex()`` as a decimal number.

    Args:
        value: The value.
        bits: Whether to show a number in both notations.

    >>> describe_value("0x1.8000000000000p-3")
    '0.1875'
    >>> describe_value("0x1.8000000000000p-3", bits=True)
    '0x1.8000000000000p-3 (0.1875)'
    """
    if value.lstrip("-").startswith(("0x", "inf", "nan")):
        try:
            number = float.fromhex(value)
        except (ValueError, OverflowError):
            return escape(value)
        # Different numbers have different texts.
        return f"{value} ({number!r})" if bits else repr(number)
    return escape(value)


def describe_names(names: Sequence[str], count: int, limit: int = 3) -> str:
    """Return the first names and the number of the others.

    >>> describe_names(["a", "b", "c", "d"], 9)
    'a, b, c and 6 more'
    """
    listed = ", ".join(escape(name) for name in names[:limit])
    more = count - min(len(names), limit)
    return f"{listed} and {more} more" if more > 0 else listed


def pluralize(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun; the plural is the noun and an s unless it is given.

    >>> pluralize(1, "record"), pluralize(2500, "record")
    ('1 record', '2,500 records')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def read_stanzas(path: Path) -> Iterator[dict[str, list[str]]]:
    """Yield the fields of each stanza of a file of the package, by name.

    A stanza ends with a blank line, and a field with its line. A line that begins with a blank
    continues the line before, and one that begins with ``#`` is a comment.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    for stanza in text.strip().split("\n\n"):
        fields: dict[str, list[str]] = {}
        for line in re.split(r"\n(?! )", stanza):
            name, _, value = " ".join(line.split()).partition(":")
            fields.setdefault(name, []).append(value.strip())
        yield fields
