"""What the migration page gives in place of something else is there, and takes what it is given."""

import ast
import re
import shlex
from inspect import signature
from pathlib import Path

import pytest
from lightning.pytorch import Trainer, seed_everything

import lightning_d9m
from lightning_d9m.cli.main import build_parser

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
NAMES = {name: getattr(lightning_d9m, name) for name in lightning_d9m.__all__}
NAMES |= {"lightning_d9m": lightning_d9m, "Trainer": Trainer, "seed_everything": seed_everything}


def read_replacements():
    """Return each piece of code of the second columns."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    return sorted({code for row in rows for code in re.findall(r"`([^`]+)`", row[1])})


def check(code):
    if code.startswith("d9m "):
        words = shlex.split(code)[1:]
        parser = build_parser(words[0])
        return parser.parse_args(words) if len(words) > 1 else parser
    if code.endswith("="):
        return signature(lightning_d9m.DeterminismCallback).parameters[code[:-1]]
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = eval(ast.unparse(node.func), NAMES)  # noqa: S307 - the page's own
            signature(function).bind_partial(*node.args, **{w.arg: w for w in node.keywords})
        if isinstance(node, ast.ImportFrom):
            exec(ast.unparse(node), {})  # noqa: S102 - the page's own
    return tree


@pytest.mark.parametrize("code", read_replacements())
def test_a_replacement_is_there(code):
    check(code)


@pytest.mark.parametrize(
    "code",
    [
        "DeterminismCallback(patch=True)",
        "lightning_d9m.seed(1)",
        "from lightning_d9m import Patch",
        "sed=",
        "d9m repeat --runs many",
    ],
)
def test_a_replacement_that_is_not_there_is_found(code):
    with pytest.raises((TypeError, AttributeError, ImportError, KeyError, SystemExit)):
        check(code)
