"""Temporary wrappers around methods of one object."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from lightning_d9m.attribute_patches import AttributePatches


def wrap_method(
    stack: ExitStack, owner: Any, name: str, around: Callable[[], AbstractContextManager[object]]
) -> None:
    """Run each call of a method inside a context, until ``stack`` is closed.

    The class of ``owner`` stays unchanged. ``around`` makes the context of one call.
    """
    method = getattr(owner, name)

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with around():
            return method(*args, **kwargs)

    replace_method(stack, owner, name, inside)


def replace_method(stack: ExitStack, owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Replace a method of one object, until ``stack`` is closed."""
    patches = AttributePatches()
    patches.replace(owner, name, method)
    stack.callback(patches.undo)
