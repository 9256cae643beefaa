"""Methods of one object that something is put around, for a while."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

_MISSING = object()


def wrap_method(
    stack: ExitStack, owner: Any, name: str, around: Callable[[], AbstractContextManager[object]]
) -> None:
    """Let each call of a method run inside a context, until ``stack`` is closed.

    Args:
        stack: What takes it off again.
        owner: The object; its class stays as it is.
        name: The method.
        around: Makes the context of one call.
    """
    method = getattr(owner, name)

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with around():
            return method(*args, **kwargs)

    replace_method(stack, owner, name, inside)


def replace_method(stack: ExitStack, owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Give one object another method, until ``stack`` is closed."""
    before = vars(owner).get(name, _MISSING)
    vars(owner)[name] = method

    def restore() -> None:
        if before is _MISSING:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = before

    stack.callback(restore)
