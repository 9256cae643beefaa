"""Temporary replacement of attributes of the user's objects."""

import copy
import functools
import operator
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from types import ModuleType
from typing import Any

from lightning_d9m.hooks import Hook, raise_missing

_MISSING = object()


class AttributePatches:
    """Replaces attributes and restores all of them in reverse order."""

    def __init__(self) -> None:
        # References are weak, so that a loader that Lightning reloads every epoch can be freed.
        self._originals: list[tuple[Callable[[], Any], str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute. Repeated replacements keep the first original value.

        Raises:
            AttributeError: If the owner does not allow it; then nothing changes.
            HookMissingError: If the owner has no such attribute.
        """
        # A name that the owner lacks would be set and never called: the library has renamed it.
        if not hasattr(owner, name):
            home = owner if isinstance(owner, type | ModuleType) else type(owner)
            module, kind = (
                getattr(home, "__module__", home.__name__),
                getattr(home, "__qualname__", ""),
            )
            raise_missing(Hook(module, kind, name, "replace it", ""))
        original = _find_original(owner, name)
        # A DataLoader does not allow to set `dataset` and similar attributes after construction,
        # because its sampler may depend on them. Replacements here keep length and samples.
        set_, _ = _find_accessors(owner)
        set_(owner, name, value)
        # `is`, because the owner may define `__eq__`, as tensors do.
        if any(patched() is owner and name == other for patched, other, _ in self._originals):
            return
        self._originals = [entry for entry in self._originals if entry[0]() is not None]
        self._originals.append((_make_reference(owner), name, original))

    def read_original(self, owner: Any, name: str) -> Any:
        """Return an attribute as it was before it was replaced; None if there was none."""
        for patched, other, original in self._originals:
            if patched() is owner and name == other:
                return getattr(type(owner), name, None) if original is _MISSING else original
        return getattr(owner, name, None)

    def undo(self) -> None:
        """Restore every attribute whose owner still exists."""
        while self._originals:
            reference, name, original = self._originals.pop()
            owner = reference()
            if owner is None:
                continue
            set_, delete = _find_accessors(owner)
            # Deleted rather than set to the value of the class, which may change later. The program
            # may have deleted it already.
            if original is _MISSING:
                with suppress(AttributeError):
                    delete(owner, name)
            else:
                set_(owner, name, original)


class Replacement:
    """Stands for a method of one object; a copy of the object, or a file of it, gets the method."""

    def __init__(self, replaced: Any, call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, replaced)  # Lightning reads signatures
        self.replaced, self._call = replaced, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stands for the method."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.replaced, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        # Returns the method, and needs no function of this package when the file is read.
        return operator.itemgetter(0), ((self.replaced,),)


def _find_accessors(owner: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return what sets and deletes an attribute of a class, or of an object past its class."""
    if isinstance(owner, type):
        return setattr, delattr
    return object.__setattr__, object.__delattr__


def _find_original(owner: Any, name: str) -> Any:
    """Return the instance's value, or a marker if the class supplies the attribute."""
    attributes = vars(owner) if hasattr(owner, "__dict__") else {}
    if name in attributes:
        return attributes[name]
    # The class stores the values of properties and slots.
    return (
        getattr(owner, name) if hasattr(getattr(type(owner), name, None), "__set__") else _MISSING
    )


def _make_reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # a class with slots and without `__weakref__`
        return lambda: owner


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
