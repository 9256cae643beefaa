"""Write docs/errors.md: every message that the package raises, as it stands in the code.

``python docs/write_errors.py`` writes the page; ``tests/docs/test_errors_page.py`` holds it
against the code.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from lightning_d9m import errors

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
_HEAD = """# Errors

Every message of the package, by the class of its exception; all of them are
`lightning_d9m.D9mError`s. `…` stands for what is filled in. Search this page for a piece of the
message that you have: each says what was allowed and what to do, and the page of the feature says
more.

This page is written from the code by `python docs/write_errors.py`.
"""


def read_messages() -> dict[str, list[tuple[str, str]]]:
    """Return (module, message) by the name of the exception, in order of the modules."""
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.D9mError)
    }
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in sorted(classes)}
    for path in sorted((ROOT / "lightning_d9m").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if name in classes and node.args:
                    message = " ".join("".join(_texts(node.args[0])).split())
                    if message.strip("… "):
                        found[name].append((module, message))
    return found


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield a message's text; whatever is computed is an ellipsis."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            for value in values:
                yield from _texts(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from _texts(left)
            yield from _texts(right)
        case _:
            yield "…"


def format_page() -> str:
    """Return the page."""
    lines = [_HEAD]
    for name, messages in read_messages().items():
        if not messages:
            continue
        summary = (inspect.getdoc(getattr(errors, name)) or "").splitlines()[0]
        lines += [f"## {name}", "", summary, ""]
        for module, message in dict.fromkeys(messages):
            lines.append(f"- {_plain(message)} (`{module.removeprefix('lightning_d9m.')}`)")
        lines.append("")
    return "\n".join(lines)


def _plain(message: str) -> str:
    """Return a message with what Markdown would take for markup escaped."""
    for mark in "\\`*_[]<>#|":
        message = message.replace(mark, f"\\{mark}")
    return message


if __name__ == "__main__":
    PAGE.write_text(format_page())
