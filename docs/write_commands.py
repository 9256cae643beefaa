"""Write docs/commands.md: the help of every command, as its parser prints it, and d9m scan's rules.

``python docs/write_commands.py`` writes the page; ``tests/docs/test_pages.py`` compares it
with the parsers.
"""

import argparse
import os
import re
import textwrap
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from lightning_d9m.tools.cli.main import COMMANDS, build_parser
from lightning_d9m.tools.lint.rules import RULES

PAGE = Path(__file__).parent / "commands.md"
# What a code block shows without scrolling beside both tables of contents.
_WIDTH = 76
_NO_BREAK = "\0"  # textwrap takes a non-breaking space for a character
_HEAD = """# Commands

Every command and option, as `d9m COMMAND --help` prints them. The exit status of each is 0 for
equal or in order, 1 for a difference or a finding, 2 for misuse or a file that cannot be read or
written, and 3 if a command that it ran failed, such as the training, or if a ledger was cut off and
is equal as far as it goes.
"""
_RULES = """
## Rules of d9m scan

`d9m ops NAME` prints the details of an op.

| rule | severity | reason | fix |
| --- | --- | --- | --- |
"""


def format_page() -> str:
    """Return the page."""
    os.environ["COLUMNS"] = "80"
    sections = [
        f"\n## {parser.prog}\n\n{parser.description}\n\n{_format_usage(parser)}\n"
        f"Example: `{str(parser.epilog).removeprefix('example: ')}`\n\n"
        f"| argument | meaning |\n| --- | --- |\n{''.join(_format_arguments(parser))}"
        for parser in _list_commands(build_parser(*COMMANDS))
    ]
    rules = [
        f"| {rule.id} `{rule.name}` | {rule.severity} | {rule.reason} | {rule.fix} |\n"
        for rule in RULES.values()
    ]
    return _HEAD + "".join(sections) + _RULES + "".join(rules)


def _list_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to list commands
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            yield from action.choices.values()


def _format_usage(parser: argparse.ArgumentParser) -> str:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").replace("[-h] ", "").split())
    return f"```text\n{_wrap_usage(usage)}\n```\n"


def _wrap_usage(usage: str) -> str:
    """Break the line before an option, but not within its brackets."""
    usage = re.sub("(?<=--) | (?=[.]{3})", _NO_BREAK, usage)
    depths = accumulate((char == "[") - (char == "]") for char in usage)
    joined = "".join(
        _NO_BREAK if char == " " and depth else char
        for char, depth in zip(usage, depths, strict=True)
    )
    lines = textwrap.wrap(
        joined, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace(_NO_BREAK, " ")


def _format_arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:  # noqa: SLF001 - as above
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):  # noqa: SLF001 - as above
            continue
        names = ", ".join(action.option_strings)
        value = action.metavar or (
            f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
        )
        takes_value = action.nargs != 0 or not action.option_strings
        shown = f"{names} {value}".strip() if takes_value else names
        text = (action.help or "") % (vars(action) | {"prog": parser.prog})
        yield f"| `{shown}` | {text} |\n"


if __name__ == "__main__":
    PAGE.write_text(format_page())
