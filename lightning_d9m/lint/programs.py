"""Detection of programs, their imports, and calls that seed torch."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path, PurePath

from lightning_d9m.lint.source import SourceError, parse, read_source
from lightning_d9m.lint.tree import Call, Tree, read_last_name

# Names that contain "seed", of functions that do not set a seed.
_READS = re.compile(r"(initial|get|derive|make|next|new)_?\w*seed|SeedSequence", re.IGNORECASE)
# Packages and classes that seed torch.
_SEEDED = re.compile(r"lightning_d9m\b|\bLightningCLI$")


def runs(tree: ast.Module) -> bool:
    """Return whether a module has a ``__name__`` guard or calls a function that it defines."""
    defined = {getattr(statement, "name", "") for statement in tree.body}
    for statement in tree.body:
        match statement:
            case ast.If(test) if "__name__" in ast.unparse(test):
                return True
            case ast.Expr(ast.Call(function)) if read_last_name(function) in defined:
                return True
    return False


def seeds(tree: Tree) -> bool:
    """Return whether a module seeds torch, or calls a function whose name says so."""
    imported = list_imports(tree.module)
    return any(map(_SEEDED.search, imported)) or any(map(_seeds_torch, tree.calls))


def _seeds_torch(call: Call) -> bool:
    name = read_last_name(call.node.func)
    if name == "seed":
        # random.seed, np.random.seed and env.seed do not seed torch; a local `seed` may.
        return isinstance(call.node.func, ast.Name) and not call.name
    return name == "set_rng_state" or ("seed" in name.lower() and not _READS.match(name))


def list_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of all imports of a module, including those within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def find_seeded(paths: Iterable[str], known: Iterable[str]) -> set[str]:
    """Return the programs that import, directly or indirectly, a file that seeds torch.

    Args:
        paths: The programs.
        known: The files that they may import, found by the last part of their modules' names.
    """
    modules: dict[str, list[str]] = defaultdict(list)
    for path in known:
        pure = PurePath(path)
        modules[pure.parent.name if pure.stem == "__init__" else pure.stem].append(path)
    read = cache(_read_program)
    seeded = set()
    for program in paths:
        reached, waiting = {program}, [program]
        while waiting:
            seeding, imported = read(waiting.pop())
            if seeding:
                seeded.add(program)
                break
            found = {path for word in imported for path in modules.get(word, ())} - reached
            reached |= found
            waiting += sorted(found)
    return seeded


def _read_program(path: str) -> tuple[bool, frozenset[str]]:
    """Return whether a file seeds torch, and the parts of the names that it imports."""
    try:
        tree = parse(read_source(Path(path)).text)
    except (OSError, SourceError):
        return False, frozenset()  # reported as D9M001
    if isinstance(tree, tuple):
        return False, frozenset()  # likewise
    return seeds(Tree(tree)), frozenset(
        part for name in list_imports(tree) for part in name.split(".")
    )
