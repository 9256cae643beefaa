"""The package unpickles nothing but a file of which the user says that it may run code."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_d9m"
# Modules that unpickle, functions of torch.distributed that do, and what lets NumPy.
NAMES = {
    *("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "allow_pickle"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    "recv_object_list",
}
ALLOWED = {
    "engine/state/object_digest.py": [
        "from pickle import Pickler, PicklingError"
    ],  # which only write
    # The one load that may unpickle, with --allow-objects.
    "integrations/lightning/saved_state.py": [
        "torch.load(path, map_location='cpu', weights_only=not allow_objects)"
    ],
}


def find_unpickling(source):
    """Return the parts of a program that unpickle, or may."""
    found = []
    for node in ast.walk(ast.parse(source)):
        text, names = ast.unparse(node), set()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            names = {node.attr}
        elif isinstance(node, ast.keyword):
            names = {node.arg}
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            # A strategy's broadcast unpickles, and torch.load without `weights_only`.
            if function.endswith("strategy.broadcast") or (
                function == "torch.load" and "weights_only=True" not in text
            ):
                found.append(text)
        if not NAMES.isdisjoint({str(name).partition(".")[0] for name in names}):
            found.append(text)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "from torch.distributed import all_gather_object",
        "trainer.strategy.broadcast(folder)",
    ],
)
def test_each_way_is_found(line):
    assert find_unpickling(f"{line}\n") == [line]


def test_nothing_is_unpickled():
    found = {
        path.relative_to(PACKAGE).as_posix(): parts
        for path in PACKAGE.rglob("*.py")
        if (parts := find_unpickling(path.read_text()))
    }
    assert found == ALLOWED
