"""Attributes of the user's objects that were replaced, and what was there before."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_MISSING = object()


class AttributePatches:
    """Replaces attributes, and puts all of them back, in reverse.

    The owners are not kept alive: a loader that Lightning reloads every epoch may die meanwhile.
    """

    def __init__(self) -> None:
        self._originals: list[tuple[Callable[[], Any], str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; of several replacements the first one's original is kept.

        Raises:
            AttributeError: When the owner does not let it be set; nothing is changed then.
        """
        original = _find_original(owner, name)
        # A DataLoader refuses to set `dataset` and its like once it is built, for it may have
        # derived a sampler from it. What is set here has the same length and the same samples.
        object.__setattr__(owner, name, value)
        if any(known() is owner and name == other for known, other, _ in self._originals):
            return
        self._originals = [entry for entry in self._originals if entry[0]() is not None]
        self._originals.append((_refer(owner), name, original))

    def undo(self) -> None:
        """Put back every attribute whose owner still lives."""
        while self._originals:
            reference, name, original = self._originals.pop()
            owner = reference()
            if owner is None:
                continue
            if original is _MISSING:
                with suppress(AttributeError):
                    object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, original)


def _find_original(owner: Any, name: str) -> Any:
    """Return what to put back: what a class supplies is seen again once the instance's is gone."""
    own = vars(owner) if hasattr(owner, "__dict__") else {}
    if name in own:
        return own[name]
    # Properties and slots are set through the class.
    return (
        getattr(owner, name) if hasattr(getattr(type(owner), name, None), "__set__") else _MISSING
    )


def _refer(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # its class has slots and none for weak references
        return lambda: owner
