"""Scripts of the repository as modules: examples, benchmarks, the writers of pages."""

import ast
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


def list_imports(path):
    """Return the names of the packages that a file imports, at any place."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
