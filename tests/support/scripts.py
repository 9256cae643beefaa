"""Scripts of the repository as modules: examples, benchmarks, the writers of pages; programs."""

import ast
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_script(path):
    """Import a script by its path in the repository; each call makes a new module."""
    path = ROOT / path
    spec = spec_from_file_location(f"{path.stem}_script", path)
    module = sys.modules[spec.name] = module_from_spec(spec)  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def execute(*words, folder=None, fails=False, without=(), **variables):
    """Run a program; return how it ended, with its output.

    Args:
        words: Its command.
        folder: Where it runs.
        fails: Whether it may fail.
        without: How the names of variables begin that it does not get.
        variables: Those that it gets besides.
    """
    kept = {name: own for name, own in os.environ.items() if not name.startswith(tuple(without))}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=kept | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert fails or not done.returncode, done.stdout + done.stderr
    return done


def list_imports(path):
    """Return the names of the packages that a file imports, at any place."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
