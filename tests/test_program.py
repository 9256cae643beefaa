"""Lines of the program are told from those of the framework."""

import contextlib
import sys
from types import ModuleType
from unittest.mock import patch

import typing_extensions
from torch import nn

from lightning_d9m.program import find_line, is_of_framework


def test_the_framework_is_known_by_the_names_of_its_packages():
    names = ("torch.nn", "lightning.pytorch", "lightning_d9m.errors", "torchvision", "numpy", None)
    assert [is_of_framework(name) for name in names] == [True] * 3 + [False] * 3


def test_the_innermost_line_of_the_program_is_found():
    """Around it are lines of torch, and around those lines of contextlib."""
    module, found = nn.Linear(1, 1), []
    module.register_parameter = lambda *_: found.append(find_line())
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, module, "weight", module.weight)
    (line,) = found
    assert (line.file, line.function) == (__file__, "<lambda>")
    assert line.text.endswith("found.append(find_line())")


def test_a_wrapper_that_torch_calls_is_not_the_program():
    wrapper = ModuleType("typing_extensions")
    wrapper.find_line = find_line
    code = compile("run = lambda: find_line()", typing_extensions.__file__, "exec")
    with patch.dict(sys.modules, typing_extensions=wrapper):
        exec(code, vars(wrapper))  # noqa: S102 - as if it were its own
        assert wrapper.run().file == __file__


def test_no_line_is_looked_for_around_an_end():
    namespace = {"__name__": "torch.generated", "find_line": find_line}
    exec("def run():\n    return find_line('run')", namespace)  # noqa: S102 - code without a file
    assert namespace["run"]() is None
