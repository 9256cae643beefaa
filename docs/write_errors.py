"""Write docs/errors.md: every message that the package raises, as it stands in the code.

``python docs/write_errors.py`` writes the page; ``tests/docs/test_pages.py`` compares it
with the code.
"""

import ast
import inspect
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lightning_d9m import errors
from lightning_d9m.text import pluralize

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
_HEAD = """# Errors

The search (press `/`) finds the message that you have; `…` stands for what is filled in. Each
message says what is wrong, what is allowed and what to do. All are `lightning_d9m.D9mError`s,
listed by class, and below it by the part of the package that raises them.
"""


@cache
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
        source = _Module(ast.parse(path.read_text()))
        for function, node in source.calls():
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            given, end = node.args[:1], ""
            if name == "file_errors":  # the class, and the text before the reason
                name, given, end = ast.unparse(given[0]), node.args[1:2], ": …"
            if name in classes and given:
                for text in source.list_messages(given[0], function):
                    message = " ".join(text.split()) + end
                    if message.strip("… "):
                        found[name].append((module, message))
    return found


class _Module:
    """A module's source, in which a message is followed to where its text is.

    Args:
        tree: Its syntax tree.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._functions = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }

    def calls(self) -> Iterator[tuple[ast.AST, Any]]:
        """Yield (the innermost function, call) of each call of a name or an attribute."""
        pending: deque[tuple[ast.AST, ast.AST]] = deque([(self._tree, self._tree)])
        while pending:
            function, node = pending.popleft()
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                yield function, node
            inner = node if isinstance(node, ast.FunctionDef) else function
            pending += [(inner, child) for child in ast.iter_child_nodes(node)]

    def list_messages(self, node: ast.AST, function: ast.AST) -> list[str]:
        """Return the texts that an expression may have: of a variable, all that it is given."""
        match node:
            case ast.Name(id=name):
                return self._follow(name, function)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self._follow(f"self.{name}", self._tree)
            case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[lines]):
                return self.list_messages(lines, function)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if (
                name in self._functions
            ):
                called = self._functions[name]
                returned = [part.value for part in ast.walk(called) if isinstance(part, ast.Return)]
                return [
                    text
                    for value in returned
                    if value
                    for text in self.list_messages(value, called)
                ]
            case ast.List(elts=elements):
                texts = (self.list_messages(element, function) for element in elements)
                return [" ".join(text[0] if text else "…" for text in texts)]
            case _:
                return ["".join(_texts(node))]

    def _follow(self, name: str, where: ast.AST) -> list[str]:
        """Return the texts that are assigned to a name, with the lines that are appended to it."""
        texts, lines = [], []
        for node in ast.walk(where):
            match node:
                case ast.Assign(targets=[target], value=value) if ast.unparse(target) == name:
                    texts += self.list_messages(value, where)
                case ast.Call(func=ast.Attribute(value=owner, attr="append"), args=[line]) if (
                    ast.unparse(owner) == name
                ):
                    lines += self.list_messages(line, where)
        return [" ".join([*texts, *lines])] if lines else texts


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
        parts: dict[str, list[str]] = {}
        for module, message in dict.fromkeys(messages):
            short = module.removeprefix("lightning_d9m.")
            line = f"- {_plain(message)} (`{short}`)"
            parts.setdefault(short.partition(".")[0], []).append(line)
        for part, listed in parts.items():
            head = f"<summary><code>{part}</code>: {pluralize(len(listed), 'message')}</summary>"
            lines += ['<details markdown="1">', head, "", *listed, "", "</details>", ""]
    lines.append("<!-- `python docs/write_errors.py` writes this page from the code. -->\n")
    return "\n".join(lines)


def _plain(message: str) -> str:
    """Return a message with what Markdown would take for markup escaped."""
    for mark in "\\`*_[]<>#|":
        message = message.replace(mark, f"\\{mark}")
    return message


if __name__ == "__main__":
    PAGE.write_text(format_page())
