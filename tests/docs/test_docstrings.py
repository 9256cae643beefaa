"""Modules, files and functions that docstrings and comments name are there."""

import ast
import io
import re
import tokenize
from importlib import import_module
from pathlib import Path

import lightning_d9m

PACKAGE = Path(lightning_d9m.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(
    path
    for folder in (PACKAGE, ROOT / "benchmarks", ROOT / "docs", ROOT / "examples", ROOT / "tests")
    for path in folder.rglob("*.py")
    if "corpus" not in path.parts
)
NAMES = {path.name for path in SOURCES} | {path.name for path in ROOT.glob("[!.]*/*.md")}
# A module, class or function by its address; a file; and what a role of Sphinx names.
ADDRESS = re.compile(r"\blightning_d9m(?:\.\w+)+\b(?!/)")
FILE = re.compile(r"(?<![\w/.{}*<])(?:[\w-]+/)*[\w-]+\.(?:py|md)\b")
# A module without the package's name; the first part is a folder of the package.
SHORT = re.compile(r"``((?:[a-z_]+\.)+(?!(?:py|md|txt|c|h)`)[a-z_]+)``")
FOLDERS = {path.name for path in PACKAGE.rglob("*") if path.is_dir()}
MODULES = {str(path.relative_to(PACKAGE).with_suffix("")) for path in PACKAGE.rglob("*.py")}
ROLE = re.compile(r":(?:func|class|mod|meth|attr|data):`~?([\w.]+)`")
# Of the user, of another library, or of an example that the text tells.
FOREIGN = {
    "train.py",
    "src/train.py",
    "doc/xxhash_spec.md",
    "values.py",
    "pytorch_lightning/gin.py",
    "lightning_d9m.repository",
}


def read_texts(path):
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def resolves(address):
    """Return whether an address is that of a module or of something in one."""
    parts = address.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
            for name in parts[length:]:
                found = getattr(found, name)
        except ImportError:
            continue
        except AttributeError:
            return False
        return True
    return False


def is_there(name, beside):
    """Return whether a file is in the folder of a source or above it, or anywhere by its name."""
    folders = (*beside.parents, PACKAGE, ROOT / "docs")
    ours = any(f"/{module}.py".endswith(f"/{name}") for module in MODULES)
    return ours or name in NAMES or any((folder / name).exists() for folder in folders)


def is_gone(name):
    """Return whether a short name of a module of ours has no module, nor any of torch's."""
    ending = name.replace(".", "/")
    found = any(f"/{module}".endswith(f"/{ending}") for module in MODULES)
    return name.partition(".")[0] in FOLDERS and not found and not resolves(name)


def test_modules_functions_and_files_that_texts_name_are_there():
    missing = {}
    for path in SOURCES:
        for text in read_texts(path):
            absent = {name for name in ADDRESS.findall(text) if not resolves(name)}
            absent |= {name for name in ROLE.findall(text) if "." in name and not resolves(name)}
            absent |= {name for name in FILE.findall(text) if not is_there(name, path)}
            absent |= {name for name in SHORT.findall(text) if is_gone(name)}
            if absent - FOREIGN:
                missing.setdefault(str(path.relative_to(ROOT)), set()).update(absent - FOREIGN)
    assert not missing, "\n".join(f"{path}: {names}" for path, names in missing.items())
