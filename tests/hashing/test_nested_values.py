"""Every nested value is walked by one function."""

import subprocess
import sys
from types import MappingProxyType

import numpy as np
import pytest

from lightning_d9m.hashing.nested_values import list_leaves


@pytest.mark.parametrize(
    ("value", "leaves"),
    [
        ({"a": [1, (2, {"b": 3})]}, [("a.0", 1), ("a.1.0", 2), ("a.1.1.b", 3)]),
        (MappingProxyType({"z": 1, "a": 2}), [("z", 1), ("a", 2)]),
        ({1: "x", (2, 3): "y"}, [("1", "x"), ("(2, 3)", "y")]),
        ({"a": {}, "b": [], "c": ()}, [("a", {}), ("b", []), ("c", ())]),
        ("text", [("", "text")]),
        ({1, 2}, [("", {1, 2})]),
    ],
)
def test_leaves_have_dotted_paths_in_order(value, leaves):
    assert list_leaves(value) == leaves


def test_a_leaf_without_a_truth_value_is_not_compared():
    array = np.ones(3)
    ((path, leaf),) = list_leaves([array])
    assert path == "0"
    assert leaf is array


def test_a_container_that_holds_itself_is_a_leaf_there():
    value = {"a": 1}
    value["self"] = value
    assert [path for path, _ in list_leaves(value)] == ["a", "self"]


def test_a_container_that_occurs_twice_is_walked_twice():
    shared = [1]
    assert list_leaves({"a": shared, "b": shared}) == [("a.0", 1), ("b.0", 1)]


def test_the_caller_decides_what_a_container_is():
    def strings(value, depth):
        return enumerate(value) if isinstance(value, str) and depth < 1 else None

    assert list_leaves("ab", entries=strings) == [("0", "a"), ("1", "b")]


def test_torch_is_not_imported():
    program = "import sys, lightning_d9m.hashing.nested_values; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
