"""``dev.py`` runs before anything is installed, so it must need nothing but Python."""

import ast
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "dev.py"


def test_imports_the_standard_library_alone():
    tree = ast.parse(SCRIPT.read_text())
    modules = {
        name.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    } | {
        node.module.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert modules <= sys.stdlib_module_names


def test_an_unknown_command_is_misuse():
    done = subprocess.run(
        [sys.executable, SCRIPT, "tests"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "digits" in done.stderr
