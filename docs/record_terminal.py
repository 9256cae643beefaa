"""Write docs/images/terminal.svg: what a terminal shows when runs differ and the cause is found.

The commands are really run, on examples/noisy_digits.py. Cuts are marked by an ellipsis.

Run it with: python docs/record_terminal.py
"""

import inspect
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
WIDTH = 80
# The commands, with the line of their output before which it is cut.
COMMANDS = (
    ("d9m repeat -n 2 -- python train.py", "Rank 0, "),
    ("d9m locate -- python train.py", "values: "),
)
_BLOCK = 65_536


def run(command: str, folder: Path) -> str:
    """Run a command of d9m on a terminal of 80 columns; return what it prints, with its colors."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_d9m", *command.split()[1:]],
        cwd=folder,
        env=os.environ | {"COLUMNS": str(WIDTH), "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=subprocess.DEVNULL,
    )
    os.close(end)
    printed = b""
    while True:
        try:
            block = os.read(terminal, _BLOCK)
        except OSError:  # the terminal is closed on the other side
            break
        if not block:
            break
        printed += block
    os.close(terminal)
    process.wait()
    return printed.decode().replace("\r\n", "\n")


def cut(printed: str, before: str | None) -> str:
    """Return the output up to a line that begins with a text, and an ellipsis; or all of it."""
    if before is None:
        return printed.rstrip()
    kept, _, _ = printed.partition(f"\n{before}")
    return f"{kept.rstrip()}\n..."


def record(commands: Iterable[tuple[str, str | None]], folder: Path, picture: Path) -> None:
    """Run commands in a folder, and write what they print as a picture."""
    console = Console(record=True, width=WIDTH, file=sys.stderr, highlight=False)
    for command, before in commands:
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        shown = cut(run(command, folder), before).replace(f"{folder.resolve()}/", "")
        console.print(Text.from_ansi(shown.replace(f"{folder}/", "")))
        console.print()
    style = inspect.signature(Console.export_svg).parameters["code_format"].default
    # No font from the network.
    style = re.sub(r"@font-face \{\{.*?\}\}\n", "", style, flags=re.DOTALL)
    style = style.replace("Fira Code", "DejaVu Sans Mono")
    picture.write_text(console.export_svg(title="d9m", code_format=style, unique_id="d9m") + "\n")
    sys.stdout.write(f"{picture}\n")


def main() -> None:
    """Run the commands and write the picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(ROOT / "examples" / "noisy_digits.py", folder / "train.py")
        record(COMMANDS, folder, PICTURE)


if __name__ == "__main__":
    main()
