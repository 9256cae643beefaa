"""Tables and paragraphs on a terminal, and the commands that help next.

They are laid out by rich; plain in a pipe and under NO_COLOR.
"""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_d9m.text import printable

if TYPE_CHECKING:
    from rich.text import Text

    from lightning_d9m.engine.ledger.folder import Ledger

# As Python's `shutil.get_terminal_size`, where the width is not known.
WIDTH = 80
# By the words of verdicts, so that each has one color in all commands.
_WORDS = {
    "green": "equal, whole, found, between records, ok, patched",
    "bold red": "different, not found, damaged, not comparable, differs, other, "
    "invalid, problem, error",
    "bold yellow": "incomplete, warning",
    "red": "no match",
    "yellow": "note",
    "dim": "reference, exempt",
    "bold": "heading",
}
_STYLES = {word: style for style, words in _WORDS.items() for word in words.split(", ")}


def style(meaning: str, shown: str) -> "Text":
    """Return text in the color of its meaning, if that has one."""
    from rich.text import Text

    return Text(shown, _STYLES.get(meaning, ""))


def wrap(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """Return a text in lines of at most 80 columns; words and paths are not broken.

    ``first`` stands before the first line in place of ``indent``.
    """
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,  # so that a path can be copied
    )


def paint(meaning: str, shown: str) -> str:
    """Return text in the color of its meaning if standard output is a terminal."""
    from rich.console import Console

    # rich would wrap at the width of the terminal, and color numbers and paths.
    console = Console(highlight=False, soft_wrap=True)
    with console.capture() as capture:
        console.print(style(meaning, shown), end="")
    return capture.get()


def print_lines(lines: Sequence[str]) -> None:
    """Print lines; a verdict that begins the first one is colored on a terminal."""
    verdict, colon, rest = lines[0].partition(":")
    if verdict in _STYLES and sys.stdout.isatty():  # rich is loaded only where colors show
        lines = [f"{paint(verdict, verdict)}{colon}{rest}", *lines[1:]]
    print("\n".join(lines))


def print_error(text: str) -> None:
    """Print an error; on a terminal, wrapped between words."""
    # It may hold untrusted text: the name of a folder, a field of a ledger, a line of a log.
    lines = [printable(line) for line in f"d9m: error: {text}".splitlines()]
    if sys.stderr.isatty():
        # Indented lines are laid out already: the end of a log, two values to be compared.
        lines = [
            part for line in lines for part in ([line] if line[:1] in ("", " ") else wrap(line))
        ]
    print("\n".join(lines), file=sys.stderr)


def wrap_on_terminal(lines: Sequence[str]) -> Sequence[str]:
    """Return lines; if standard output is a terminal, long ones are wrapped between words."""
    # What reads a pipe gets each fact in one line.
    if not sys.stdout.isatty():
        return lines
    return [part for line in lines for part in wrap(line, "  ", "") or [""]]


def terminal_width(limit: int = 100) -> int:
    """Return the terminal's width, or ``COLUMNS``, or 80; at most ``limit``."""
    # Lines of a very wide terminal are hard to read.
    return min(shutil.get_terminal_size().columns, limit)


def find_command(ledgers: Sequence["Ledger"]) -> str:
    """Return the command that trains, if all runs have the same; "" otherwise."""
    commands = {str(ledger.header.program.get("command") or "") for ledger in ledgers}
    return commands.pop() if len(commands) == 1 else ""


def list_next_steps(command: str, ledgers: str) -> list[tuple[str, str]]:
    """Return commands that find the cause of a difference.

    ``command`` has ``--`` and the command that trains, ``ledgers`` two paths, quoted for a shell.
    """
    return [
        (f"d9m locate {command}", "finds the step, module and source line"),
        (f"d9m report {ledgers}", "shows the difference as a page"),
        ("d9m scan", "lists causes in the source"),
    ]


def format_next_steps(steps: Sequence[tuple[str, str]]) -> list[str]:
    r"""Return a block of commands with what each does; what does not fit beside it stands below.

    >>> print("\n".join(format_next_steps([("d9m scan", "lists causes in the source")])))
    <BLANKLINE>
    Next:
      d9m scan  lists causes in the source
    """
    if not steps:
        return []
    width = max(len(command) for command, _ in steps)
    beside = 2 + width + 2 + max(len(purpose) for _, purpose in steps) <= WIDTH
    lines = ["", "Next:"]
    for command, purpose in steps:
        if beside:
            lines.append(f"  {command:{width}}  {purpose}")
        else:
            lines += [f"  {command}", f"      {purpose}"]
    return lines
