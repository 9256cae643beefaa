"""The package unpickles nothing but a file of which the user says that it may run code."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_d9m"
# Modules that unpickle, and functions of torch.distributed that do.
MODULES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
FUNCTIONS = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("recv_object_list", "allow_pickle"),
}
WRITES = {"Pickler", "PicklingError"}
# The one load that may unpickle, with --allow-objects.
ALLOWED = ("lightning/saved_state.py", "weights_only=not allow_objects")


def find_unpickling(source, module=""):
    """Return the lines of a program that unpickle, or may."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [] if WRITES.issuperset(names) else [str(node.module).partition(".")[0]]
        elif isinstance(node, ast.Attribute | ast.keyword):
            names = [node.attr if isinstance(node, ast.Attribute) else node.arg]
        elif isinstance(node, ast.Call) and _is_unsafe(node, module):
            names = ["pickle"]
        if not MODULES.union(FUNCTIONS).isdisjoint(names):
            found.append(node.lineno)
    return found


def _is_unsafe(call, module):
    """Return whether a call is `torch.load` without `weights_only`, or a strategy's broadcast."""
    function = ast.unparse(call.func)
    if function == "torch.load":
        written = [ast.unparse(word) for word in call.keywords]
        return "weights_only=True" not in written and not (
            module == ALLOWED[0] and ALLOWED[1] in written
        )
    return function.endswith("strategy.broadcast")


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "from pickle import Pickler, loads",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "torch.load(file, weights_only=not allow_objects)",
        "torch.distributed.broadcast_object_list(values)",
        "from torch.distributed import all_gather_object",
        "trainer.strategy.broadcast(folder)",
        "np.load(file, allow_pickle=True)",
    ],
)
def test_each_way_is_found(line):
    assert find_unpickling(f"{line}\n") == [1]


def test_nothing_is_unpickled():
    found = {
        name: lines
        for path in PACKAGE.rglob("*.py")
        if (name := path.relative_to(PACKAGE).as_posix())
        and (lines := find_unpickling(path.read_text(), name))
    }
    assert found == {}
