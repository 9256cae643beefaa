"""The table of rules: which function computes an operation of torch portably.

Rules have the arguments of the functional overloads of ``aten``, and call torch outside the mode:
they may use only what gives the same bits everywhere. A rule may return ``NotImplemented``: then
torch's decomposition serves. A *composed* rule runs under the mode, so each operation in it is
looked up itself. Operations whose arguments and results are whole numbers are torch's own.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

from torch import Tensor

Rule = Callable[..., Any]
_Rule = TypeVar("_Rule", bound=Rule)

RULES: dict[str, Rule] = {}
COMPOSED: dict[str, Rule] = {}


def rule(*names: str, table: dict[str, Rule] = RULES) -> Callable[[_Rule], _Rule]:
    """Register a function for operations, by their names without the namespace."""

    def register(function: _Rule) -> _Rule:
        table.update(dict.fromkeys(names, function))
        return function

    return register


composed = partial(rule, table=COMPOSED)
"""Register a function that runs under the mode."""


def along_dim(function: _Rule) -> _Rule:
    """Let a rule along a dimension see a scalar as a vector of one element."""

    @wraps(function)
    def call(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        if values.dim():
            return function(values, *args, **kwargs)
        found = function(values.view(1), *args, **kwargs)
        return tuple(one.view(()) for one in found) if isinstance(found, tuple) else found.view(())

    return cast("_Rule", call)
