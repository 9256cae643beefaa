"""Scripts of the repository as modules: examples, benchmarks, the writers of pages."""

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
