"""The table of rules: which function computes an operation of torch portably.

Rules have the arguments of the functional overloads of ``aten``, and call torch outside the mode:
they may use only what gives the same bits everywhere. A *composed* rule runs under the mode, so
each operation in it is looked up itself.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Rule = Callable[..., Any]
_Rule = TypeVar("_Rule", bound=Rule)

RULES: dict[str, Rule] = {}
COMPOSED: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[_Rule], _Rule]:
    """Register a function for operations, by their names without the namespace."""

    def register(function: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def composed(*names: str) -> Callable[[_Rule], _Rule]:
    """Register a function that runs under the mode."""

    def register(function: _Rule) -> _Rule:
        COMPOSED.update(dict.fromkeys(names, function))
        return function

    return register


def as_tensor(value: Any, like: Tensor) -> Tensor:
    """Return a number as a tensor of one element that does not decide a dtype."""
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=like.dtype, device=like.device)
