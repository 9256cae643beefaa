"""The commands that help now, printed below a verdict."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_d9m.ledger.folder import Ledger

from lightning_d9m.output.terminal import WIDTH


def find_command(ledgers: Sequence["Ledger"]) -> str:
    """Return the command that trains, if all runs have the same; "" otherwise."""
    commands = {str(ledger.header.program.get("command") or "") for ledger in ledgers}
    return commands.pop() if len(commands) == 1 else ""


def list_next_steps(command: str, ledgers: str) -> list[tuple[str, str]]:
    """Return commands that find the cause of a difference.

    Args:
        command: The arguments of ``d9m locate``: ``--`` and the command that trains.
        ledgers: Two paths, quoted for a shell.
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
